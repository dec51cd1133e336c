"""Usage: check_addition.py

Applies docs/adding-an-activation.md and docs/adding-an-option.md to a copy of the sources, adds ops
to it with `torchkiln new --op`, builds it without CUDA, and checks on the CPU the contracts of the
new ops, of bias_act with the new activation, and of cross_entropy with the new option. Also
compiles the CUDA kernels if there is a compiler that matches torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from torchkiln.testing import OpSpec, Sample

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "adding-an-activation.md", ROOT / "docs" / "adding-an-option.md")

OP = "mish"
OPTION = "scale"
ADDED = {"soft_gate": "elementwise", "row_squares": "reduction", "moving_sum": "custom"}
CHECKS = {
    *("values", "strides", "gradient_values", "gradcheck", "gradgradcheck"),
    *("written", "vmap", "meta_and_fake", "opcheck"),
}

# The heading of a change: the file, and the line after or before which the block is inserted.
CHANGE = re.compile(
    r"^`(?P<path>[^`\n]+)`, "
    r"(?:(?P<where>after|before|instead of)(?P<each> each)? `(?P<line>[^`\n]+)`|at the end):\n\n"
    r"```\w+ patch\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Change:
    """A block of a page, with the file and the line where it is inserted."""

    page: str
    path: str
    where: str | None
    line: str | None
    text: str
    each: bool = False
    """Whether the line occurs several times, and the block is inserted at each."""

    def apply(self, content: str) -> str:
        """The content of the file with the block inserted."""
        if self.line is None:
            return content + self.text
        found = [line.strip() == self.line.strip() for line in content.splitlines()]
        if sum(found) < 2 if self.each else sum(found) != 1:
            raise SystemExit(
                f"{self.page}: {self.path}: got {sum(found)} lines {self.line!r}, expected "
                f"{'several' if self.each else 1}; change the page to fit the file"
            )
        changed = []
        for line, is_place in zip(content.splitlines(keepends=True), found, strict=True):
            kept = "" if is_place and self.where == "instead of" else line
            block = self.text if is_place else ""
            changed += [kept, block] if self.where == "after" else [block, kept]
        return "".join(changed)


def changes(page: str, text: str) -> list[Change]:
    """The blocks of a page, in order; each must have a heading."""
    found = [
        Change(page, m["path"], m["where"], m["line"], m["text"], m["each"] is not None)
        for m in CHANGE.finditer(text)
    ]
    fences = len(re.findall(r"^```\w+ patch$", text, re.MULTILINE))
    if fences != len(found) or not found:
        raise SystemExit(f"{page}: got {len(found)} heads of changes, expected {fences}")
    return found


def changed(page: Path, root: Path) -> dict[str, str]:
    """The files that a page changes, with their new content."""
    files: dict[str, str] = {}
    for change in changes(page.name, page.read_text(encoding="utf-8")):
        content = files.get(change.path) or (root / change.path).read_text(encoding="utf-8")
        files[change.path] = change.apply(content)
    return files


def copy_sources(target: Path) -> None:
    """A copy of all tracked files of the working tree, with the changes of the pages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    for page in PAGES:
        for name, content in changed(page, target).items():
            (target / name).write_text(content, encoding="utf-8")


def run(folder: Path, *command: str | Path, **environment: str) -> None:
    """Run a command; ccache stores paths relative to ``folder``."""
    cache = {"CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, env=os.environ | cache | environment, check=False)
    words = " ".join(map(str, command[:3]))
    print(f"=== {words} ...: {time.perf_counter() - start:.0f} s", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"check_addition: exit {done.returncode} of: {words} ...")


def configure(sources: Path, build: Path, *options: str) -> tuple[str, ...]:
    """CMake's command: little optimisation, and torch's headers read once for many files."""
    # Without optimisation g++ does not see that a failed TORCH_CHECK ends a function.
    flags = "-DNDEBUG -Wno-return-type"
    return (
        *("cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), "-DTORCHKILN_UNITY=ON"),
        *("-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_CXX_FLAGS_DEBUG={flags}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", *options),
    )


def has_cuda_compiler() -> bool:
    """Whether nvcc of torch's CUDA version is installed."""
    import torch  # noqa: PLC0415

    if torch.version.cuda is None:
        return False
    spec = find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    nvccs = [str(path) for folder in folders for path in Path(folder).glob("cu*/bin/nvcc")]
    for nvcc in [*nvccs, *filter(None, [shutil.which("nvcc")])]:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        if f"release {torch.version.cuda}" in said.stdout:
            return True
    return False


def build(folder: Path) -> None:
    sources, site = folder / "sources", folder / "site"
    copy_sources(sources)
    for name, template in ADDED.items():
        words = ("new", name, "--op", f"--template={template}", f"--out={sources}")
        command = (sys.executable, "-m", "torchkiln_command", *words)
        run(folder, *command, PYTHONPATH=str(sources / "src"))
    cpu = folder / "cpu"
    run(folder, *configure(sources, cpu, "-DTORCHKILN_CUDA=OFF"))
    run(folder, "cmake", "--build", cpu)
    run(folder, "cmake", "--install", cpu, "--prefix", site / "torchkiln")
    shutil.copytree(sources / "src" / "torchkiln", site / "torchkiln", dirs_exist_ok=True)
    run(folder, sys.executable, __file__, str(site), PYTHONPATH=str(site))
    if has_cuda_compiler():
        cuda = folder / "cuda"
        options = ("-DTORCHKILN_CUDA=ON", "-DTORCHKILN_CUDA_ARCHITECTURES=90-real")
        run(folder, *configure(sources, cuda, *options))
        run(folder, "cmake", "--build", cuda, "--target", "torchkiln_kernels")
    else:
        print("no CUDA compiler for this torch: the kernels for the GPU were not compiled")


def check_contracts(site: Path) -> None:
    """Run the contracts of the new ops, and of existing ops with the new activation and option."""
    import torch  # noqa: PLC0415

    import torchkiln  # noqa: PLC0415
    from torchkiln import testing  # noqa: PLC0415
    from torchkiln.testing.check import ExcludedError  # noqa: PLC0415

    if not Path(torchkiln.__file__).is_relative_to(site):
        raise SystemExit(f"check_addition: imported {torchkiln.__file__}, expected it in {site}")
    specs = {spec.name: spec for spec in testing.SPECS}
    for name in (OP, *ADDED):
        if name not in specs:
            raise SystemExit(f"check_addition: got no spec of {name}, expected one")
    checked = [specs[name] for name in (OP, *ADDED)]
    checked.append(called_with(specs["bias_act"], "act", OP))
    checked.append(called_with(specs["cross_entropy"], OPTION))
    for case in testing.cases(checked, torch.device("cpu")):
        if case.check.name not in CHECKS:
            continue
        try:
            case.run()
        except ExcludedError as reason:  # a form of an op that has no such check
            print(f"no     {case}: {reason}", flush=True)
        else:
            print(f"ok     {case}", flush=True)


def called_with(spec: OpSpec, argument: str, value: object = None) -> OpSpec:
    """The spec of an op, limited to calls with this argument, or with this value of it."""

    def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        found = [s for s in spec.inputs(device, dtype) if argument in s.kwargs]
        found = [s for s in found if value is None or s.kwargs[argument] == value]
        if not found:
            raise SystemExit(f"check_addition: got no sample of {spec.name} with {argument}")
        yield from found

    return replace(spec, name=f"{spec.name} with {value or argument}", inputs=inputs)


def main(arguments: Sequence[str]) -> None:
    if arguments:
        check_contracts(Path(arguments[0]))
        return
    with tempfile.TemporaryDirectory(prefix="torchkiln-addition-") as folder:
        build(Path(folder).resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
