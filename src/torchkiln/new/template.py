"""Fills in templates: makes files by path from the name of an op."""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).parent / "templates"
COMMON = "common"

FUNCTION = "src/PACKAGE/ops.py"
"""The file with the Python function, relative to the folder of a template."""

TEMPLATES = {
    "elementwise": "a formula and its gradients; any strides, vector access, two inputs",
    "reduction": "one number per row: a kernel over rows, an elementwise backward",
    "custom": "a kernel of your own, with dynamic shared memory",
}
"""The description of each template, by name."""

HUB = "hub"
"""The folder with the files of a kernel for Hugging Face's hub."""

PLACEHOLDER = re.compile(
    "PACKAGE|HUBNAME|OPNAME|TYPENAME|KILN_VERSION|KERNELS_CMAKE|KERNELS_README|PARAMETERS|SUMMARY"
)

# Lines of common files for templates that contain a formula instead of kernels.
FORMULA_LINES = {
    "KERNELS_CMAKE": "  FORMULAS\n    {name}",
    "KERNELS_README": "| `cuda/include/{package}/kernels/{name}.h` | the formula and its "
    "gradients, for the CPU and the GPU; no torch |",
}
KERNEL_LINES = {
    "KERNELS_CMAKE": "    cuda/ops/{name}.cu\n  CPU_KERNELS\n    cpp/cpu/{name}.cpp",
    "KERNELS_README": "| `cuda/include/{package}/kernels/{name}.h` | parameters and launchers; no "
    "torch |\n| `cuda/ops/{name}.cu`, `cpp/cpu/{name}.cpp` | kernels, those for the CPU compiled "
    "once per instruction set; no torch |",
}
CPP_TYPES = {"Tensor": "const at::Tensor&", "float": "double", "int": "int64_t"}


def words_of(template: str, package: str, name: str, version: str) -> dict[str, str]:
    """The text for each placeholder. Shared C++ files have the parameters of the Python function.

    Args:
        template: one of :data:`TEMPLATES`.
        package: the package of the op, which is also the namespace in Python and C++.
        name: the name of the op.
        version: the version of torchkiln, such as 0.1.
    """
    text = (FOLDER / template / FUNCTION).read_text(encoding="utf-8")
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    types = {arg.arg: ast.unparse(arg.annotation or arg) for arg in function.args.args}
    returns = (ast.get_docstring(function) or "").splitlines()[0].removeprefix("Returns ")
    has_kernels = (FOLDER / template / "cuda" / "ops").is_dir()
    lines = KERNEL_LINES if has_kernels else FORMULA_LINES
    return {key: line.format(name=name, package=package) for key, line in lines.items()} | {
        "PACKAGE": package,
        "OPNAME": name,
        "TYPENAME": "".join(word.capitalize() for word in name.split("_")),
        "KILN_VERSION": version,
        "PARAMETERS": ", ".join(f"{CPP_TYPES[kind]} {arg}" for arg, kind in types.items()),
        "SUMMARY": returns.replace("``", ""),
    }


def hub_words(name: str) -> dict[str, str]:
    """The text for each placeholder in a kernel for Hugging Face's hub."""
    type_name = "".join(word.capitalize() for word in name.split("_"))
    return {"OPNAME": name, "TYPENAME": type_name, "HUBNAME": name.replace("_", "-")}


def filled(text: str, words: dict[str, str]) -> str:
    """The text with words for the placeholders."""
    return PLACEHOLDER.sub(lambda match: words[match[0]], text)


def files(folders: tuple[str, ...], words: dict[str, str]) -> dict[str, str]:
    """The files of folders of templates, filled in, by their path in the package."""
    found = {}
    for folder in folders:
        root = FOLDER / folder
        for file in sorted(root.rglob("*")):
            path = PurePosixPath(file.relative_to(root).as_posix())
            if file.is_file() and not path.match("__pycache__/*"):
                parts = [re.sub("^dot_", ".", part) for part in path.parts]
                text = file.read_text(encoding="utf-8")
                found[filled("/".join(parts), words)] = filled(text, words)
    return found
