"""The public C++ headers compile together: every pair is in one unit, in both orders."""

from __future__ import annotations

import os
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
"""Headers that include CUDA's, which a CPU-only machine lacks."""


def headers(*folders: str) -> list[str]:
    """The C++ headers of folders of the package."""
    return sorted(
        f"torchkiln/{folder}/{path.name}"
        for folder in folders
        for path in (INCLUDE / "torchkiln" / folder).glob("*.h")
        if path.name not in NEEDS_CUDA
    )


@pytest.fixture
def compiler() -> str:
    """The C++ compiler."""
    found = os.environ.get("CXX") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def check_syntax(compiler: str, included: list[str], folder: Path, *options: str) -> None:
    """Compiles a file that includes only these headers."""
    source = folder / "unit.cpp"
    source.write_text("".join(f"#include <{header}>\n" for header in included))
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


def test_all_headers_with_torch(compiler: str, tmp_path: Path) -> None:
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        pytest.skip("Python's headers are not installed")
    folders = [TORCH_INCLUDE, TORCH_INCLUDE / "torch" / "csrc" / "api" / "include", python]
    options = [word for folder in folders for word in ("-isystem", str(folder))]
    check_syntax(compiler, [*headers("torch"), *TORCH_FREE], tmp_path, "-std=c++20", *options)
