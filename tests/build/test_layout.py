"""The layout of the sources: one name for a family in all layers, namespaces, private headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchkiln

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {".h", ".cuh", ".cu", ".cpp"}

# Files in the folders of families that do not belong to a family.
SHARED = {
    "cuda/ops": set(),
    "cpp/cpu": {"CMakeLists", "isa", "libstdcxx_compat", "detail"},
    "cpp/ops": {"c_functions", "cuda_bridge", "cuda_loader", "detail"},
    "src/torchkiln/ops": {
        "_after_steps",
        "__init__",
        "_conv_moments",
        "_conv_routes",
        "_flops",
        "_folding",
        "_messages",
        "_on_import",
        "_over_logits",
        "_pair_fp8",
        "_pool",
        "_sharding",
        "_traced",
        "_two_uses",
        "eager",
        "names",
    },
    "src/torchkiln/testing/specs": {"__init__"},
}
NAMESPACES = {
    "cuda/include/torchkiln/core": "torchkiln",
    "cuda/include/torchkiln/kernels": "torchkiln",
    "cuda/include/torchkiln/device": "torchkiln::device",
    "cuda/detail/gemm": "torchkiln::gemm",
    "cuda/detail/reduce": "torchkiln::reduce",
    "cuda/detail/rowwise": "torchkiln::rowwise",
    "cuda/detail/sparse": "torchkiln::sparse",
    "cpp/include/torchkiln/torch": "torchkiln",
    "cpp/include/torchkiln/cpu": "torchkiln",
    "cpp/cpu": "torchkiln::cpu",
}
# Files that also define names in other namespaces.
ELSEWHERE = {
    "cpp/cpu/isa.cpp",
    "cuda/include/torchkiln/device/jit_elementwise.cuh",
    "cuda/include/torchkiln/device/formula.cuh",
}


def families() -> set[str]:
    """The op families: names of the headers from which the build derives its sources."""
    return stems("cuda/include/torchkiln/kernels")


def stems(folder: str) -> set[str]:
    """The names of the entries of a folder, without suffixes."""
    paths = (ROOT / folder).iterdir()
    return {path.stem for path in paths if path.name != "__pycache__"}


def sources(*folders: str) -> list[Path]:
    return [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES]


@pytest.mark.parametrize("folder", SHARED)
def test_a_family_has_one_name_in_every_layer(folder: str) -> None:
    missing = set()
    if folder in ("cuda/ops", "cpp/cpu"):  # the build generates kernels of formulas
        missing = {family for family in families() if is_formula(family)}
    if folder == "cpp/cpu":
        missing |= {"convolution", "matmul"}  # the CPU uses torch's
    if folder == "src/torchkiln/testing/specs":
        missing |= {"convolution"}  # a composition of ops, with its own tests
    assert stems(folder) - SHARED[folder] == families() - missing


def is_formula(family: str) -> bool:
    header = ROOT / "cuda" / "include" / "torchkiln" / "kernels" / f"{family}.h"
    return "namespace torchkiln::formulas {" in header.read_text()


@pytest.mark.parametrize(
    ("folder", "suffix"), [("cuda/ops", ".cu"), ("cpp/ops", ".cpp"), ("cpp/cpu", ".cpp")]
)
def test_every_source_is_compiled(folder: str, suffix: str) -> None:
    """CMake finds FAMILY.ext and FAMILY/*.ext; a CMakeLists.txt names every other source."""
    lists = [ROOT / name / "CMakeLists.txt" for name in ("cuda", "cpp", "cpp/cpu")]
    text = "\n".join(path.read_text() for path in lists)
    named = {Path(name).name for name in re.findall(r"[\w/]+\.(?:cu|cpp)\b", text)}
    found = [path for path in sources(folder) if path.suffix == suffix]
    assert len(found) > 10
    for path in found:
        parts = path.relative_to(ROOT / folder).parts
        in_family = len(parts) <= 2 and parts[0].removesuffix(suffix) in families()
        assert in_family or path.name in named, path


def test_modules_belong_to_families() -> None:
    others = {"__init__", "bias", "checks", "plain"}
    others |= {"attention", "kv_cache", "multihead", "torch_layers", "transformer"}
    assert stems("src/torchkiln/nn") - others <= families()


@pytest.mark.parametrize("folder", NAMESPACES)
def test_the_folder_is_the_namespace(folder: str) -> None:
    expected = NAMESPACES[folder]
    for path in sources(folder):
        if str(path.relative_to(ROOT)) in ELSEWHERE:
            continue
        opened = re.findall(r"^namespace (torchkiln\S*) \{", path.read_text(), re.MULTILINE)
        assert not opened or any(name.startswith(expected) for name in opened), path


def test_the_namespace_of_an_op_is_its_family() -> None:
    for path in sources("cpp/ops"):
        family = path.relative_to(ROOT / "cpp" / "ops").parts[0].removesuffix(path.suffix)
        ops = set(re.findall(r"^namespace torchkiln::(\w+)_ops \{", path.read_text(), re.MULTILINE))
        assert all(op == family or path.stem in {op, f"{op}_kernel"} for op in ops), path


def test_public_headers_include_no_private_ones() -> None:
    for path in sources("cuda/include", "cpp/include"):
        private = re.findall(r'#include ["<](?:detail/|[^">]*/detail/)', path.read_text())
        assert not private, path


def test_no_private_header_is_installed() -> None:
    installed = Path(torchkiln.cmake_prefix_path).parents[1] / "include" / "torchkiln"
    headers = {str(p.relative_to(installed)) for p in installed.rglob("*.*h")}
    assert "kernels/norm.h" in headers
    assert not [name for name in headers if "detail" in name]
    private = {p.name for p in sources("cuda/detail", "cpp/cpu/detail", "cpp/ops/detail")}
    assert not {Path(name).name for name in headers} & private


def test_first_files_begin_with_their_purpose() -> None:
    """The first comment has 2 to 6 lines on content, method and other files; plans may follow."""
    kernels = [p for p in sources("cuda/ops") if p.name in {"forward.cu", "backward.cu"}]
    for path in kernels + [p for p in sources("cpp/ops") if p.suffix == ".cpp"]:
        text = path.read_text()
        comment = re.match(r"(?://.*\n)*", text)
        assert comment, path
        purpose = re.split(r"^//$", comment[0], maxsplit=1, flags=re.MULTILINE)
        assert comment[0].count("\n") >= 2, path
        assert purpose[0].count("\n") <= 6, path
