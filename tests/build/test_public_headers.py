"""The public C++ headers compile together: every pair is in one unit, in both orders."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

import torchkiln

INCLUDE = Path(torchkiln.cmake_prefix_path).parents[1] / "include"
TORCH_INCLUDE = Path(torch.__file__).parent / "include"
NEEDS_CUDA = {"handles.h"}
"""Headers that include CUDA's headers, which a CPU-only machine does not have."""


def headers(*folders: str) -> list[str]:
    """The public C++ headers in these folders."""
    return sorted(
        f"torchkiln/{folder}/{path.name}"
        for folder in folders
        for path in (INCLUDE / "torchkiln" / folder).glob("*.h")
        if path.name not in NEEDS_CUDA
    )


@pytest.fixture
def compiler() -> str:
    """The path of the C++ compiler; skips without one."""
    found = os.environ.get("CXX") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def check_syntax(
    compiler: str, included: list[str], folder: Path, *options: str, code: str = ""
) -> None:
    """Compiles a file that includes these headers, without warnings."""
    source = folder / "unit.cpp"
    source.write_text("".join(f"#include <{header}>\n" for header in included) + code)
    command = [compiler, "-fsyntax-only", "-Wall", "-Werror", f"-I{INCLUDE}", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TORCH_FREE = headers("core", "kernels", "device", "cpu")


@pytest.mark.parametrize("header", TORCH_FREE)
def test_each_header_alone(compiler: str, header: str, tmp_path: Path) -> None:
    check_syntax(compiler, [header], tmp_path, "-std=c++17")


@pytest.mark.parametrize("order", [1, -1], ids=["a-z", "z-a"])
def test_all_headers_without_torch(compiler: str, order: int, tmp_path: Path) -> None:
    check_syntax(compiler, TORCH_FREE[::order], tmp_path, "-std=c++17")


SINGLE = """
#include <cstdio>
#include "torchkiln/cpu/isa.h"
namespace mine {
namespace TORCHKILN_ISA {
torchkiln::Status twice(int* x) { *x *= 2; return {}; }
}
TORCHKILN_CPU_ENTRY(twice, (int* x), (x))
}
int main() {
  int x = 21;
  const torchkiln::Status status = mine::twice(&x);
  std::printf("%d %s", x, status.ok() ? "" : status.error);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only")
@pytest.mark.parametrize(("built", "name"), [("avx2", "AVX2"), ("avx512", "AVX-512")])
def test_a_kernel_for_one_processor(compiler: str, built: str, name: str, tmp_path: Path) -> None:
    """A processor without the instructions gets an error, and the kernel does not run."""
    source, program = tmp_path / "single.cpp", tmp_path / "single"
    source.write_text(SINGLE)
    library = INCLUDE.parent / "lib" / "libtorchkiln_kernels.so"
    subprocess.run(
        [
            *(compiler, "-std=c++17", f"-I{INCLUDE}", str(source), "-o", str(program)),
            *(f"-DTORCHKILN_ISA={built}", "-DTORCHKILN_CPU_ENTRIES=1"),
            *(str(library), f"-Wl,-rpath,{library.parent}"),
        ],
        check=True,
    )

    def said(**variables: str) -> str:
        command = [str(program)]
        return subprocess.check_output(command, text=True, env=os.environ | variables)

    refused = said(TORCHKILN_CPU_ISA="baseline")
    assert refused.startswith(f"21 the CPU kernels of this build are for {name} only")
    assert refused.endswith("-Ctorchkiln.cpu-instructions=all .")
    flags = Path("/proc/cpuinfo").read_text()
    if {"avx2": " avx2", "avx512": " avx512bw"}[built] in flags:
        assert said() == "42 "


@pytest.fixture
def with_torch() -> list[str]:
    """Compiler options for torch's headers; skips without Python's headers."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        pytest.skip("Python's headers are not installed")
    folders = [TORCH_INCLUDE, TORCH_INCLUDE / "torch" / "csrc" / "api" / "include", python]
    return ["-std=c++20", *(word for folder in folders for word in ("-isystem", str(folder)))]


OP = """
using at::Tensor;
struct Options {
  double factor = 2.0;
  bool is_squared = false;
  TORCHKILN_FIELDS(self.factor, self.is_squared);
};
struct Scale {
  static constexpr const char* kSchema =
      "mine::scale(Tensor x, float factor=2.0, bool is_squared=False) -> Tensor";
  static Tensor meta(const Tensor& x, const Options&) { return at::empty_like(x); }
  static Tensor composite(const Tensor& x, const Options& o) {
    return x * (o.is_squared ? o.factor * o.factor : o.factor);
  }
  static Tensor kernel(const Tensor& x, const Options& o) { return composite(x, o); }
};
TORCH_LIBRARY_FRAGMENT(mine, m) { torchkiln::define<Scale>(m); }
"""


@pytest.mark.parametrize("name", ["c++", "clang++"])
def test_an_op_and_all_headers_with_torch(
    name: str, compiler: str, with_torch: list[str], tmp_path: Path
) -> None:
    """An op needs one header, and its registration instantiates templates. The rest comes after.

    Torch's headers take most of the time, so that both are in one unit.
    """
    if name == "clang++" and shutil.which(name) is None:
        pytest.skip(f"no {name}")
    alone = "torchkiln/torch/op.h"
    others = [header for header in (*headers("torch"), *TORCH_FREE) if header != alone]
    code = OP + "".join(f"#include <{header}>\n" for header in others)
    used = compiler if name == "c++" else name
    check_syntax(used, [alone], tmp_path, *with_torch, code=code)
