"""Damaged and second copies of the package raise ImportError and load no other copy's library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchkiln

ROOT = Path(__file__).resolve().parents[2]
WORKS = "assert torchkiln.silu(torchkiln._torch.ones(3)).shape == (3,); print('works')"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A complete copy of the package, with its libraries."""
    package = tmp_path / "torchkiln"
    ignored = shutil.ignore_patterns("__pycache__", "include", "share")
    shutil.copytree(Path(torchkiln.__file__).parent, package, ignore=ignored)
    compiled = Path(torchkiln.cmake_prefix_path).parents[1]
    if compiled != Path(torchkiln.__file__).parent:  # an editable install
        shutil.copytree(compiled, package, ignore=ignored, dirs_exist_ok=True)
    return package


def run(code: str, package: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code with this copy and torch on the path; -S keeps an editable install out."""
    path = [str(package.parent), str(Path(torch.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-S", "-c", f"import sys; sys.path[:0] = {path}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=package.parent,
        env=os.environ | variables,
    )


def library(package: Path, name: str = "libtorchkiln_kernels.so") -> Path:
    (found,) = package.rglob(name)
    return found


def module(package: Path) -> Path:
    return next(package.rglob("_C.*.so"))


def with_record(text: str) -> Callable[[Path], object]:
    return lambda package: (package / "_build_info.json").write_text(text)


def without_a_folder(package: Path) -> None:
    record = json.loads((package / "_build_info.json").read_text())
    del record["torches"][0]["folder"]
    (package / "_build_info.json").write_text(json.dumps(record))


def cut(file: Callable[[Path], Path], share: float) -> Callable[[Path], object]:
    return lambda p: os.truncate(file(p), int(file(p).stat().st_size * share))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "record without keys": (with_record("{}"), "_build_info.json: got '{}', expected an object"),
    "record of a list": (with_record("[]"), "_build_info.json: got '[]', expected an object"),
    "incomplete record": (without_a_folder, "_build_info.json: got '{"),
    "no module": (lambda p: module(p).unlink(), "No module named 'torchkiln._C'"),
    "kernels cut": (cut(library, 0.5), "libtorchkiln_kernels.so is shorter than its parts"),
    "kernels empty": (cut(library, 0), "libtorchkiln_kernels.so is shorter than its parts"),
    "no kernels": (lambda p: library(p).unlink(), "libtorchkiln_kernels.so: cannot open"),
    "kernels of zeros": (
        lambda p: library(p).write_bytes(bytes(library(p).stat().st_size)),
        "libtorchkiln_kernels.so: invalid ELF header",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_install_is_named(copy: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(copy)
    done = run("import torchkiln", copy)
    assert done.returncode == 1, done
    said = done.stderr.split("\nImportError: ")[-1]
    assert said.startswith(f"torchkiln ({copy}) is damaged, reinstall it: ")
    assert words in said
    pip = f"{sys.executable} -m pip install"
    assert f"{pip} --force-reinstall --no-deps --no-build-isolation .\nin the folder" in said


def test_a_whole_copy_works(copy: Path) -> None:
    here = f"assert torchkiln.__file__.startswith({str(copy)!r})"
    done = run(f"import torchkiln; {here}; {WORKS}", copy)
    assert done.stdout == "works\n", done.stderr


@pytest.mark.parametrize("name", ["libtorchkiln_kernels.so", "libtorchkiln.so"])
def test_libraries_beside_the_module_come_first(copy: Path, name: str, tmp_path: Path) -> None:
    """A library of the same name on LD_LIBRARY_PATH is not loaded."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    foreign = tmp_path / "foreign" / name
    foreign.parent.mkdir()
    (tmp_path / "empty.c").write_text("int of_a_foreign_library = 1;\n")
    command = (compiler, "-shared", f"-Wl,-soname,{name}", "-o", str(foreign))
    subprocess.run((*command, str(tmp_path / "empty.c")), check=True)
    done = run(f"import torchkiln; {WORKS}", copy, LD_LIBRARY_PATH=str(foreign.parent))
    assert done.stdout == "works\n", done.stderr


def test_a_second_copy_is_refused(copy: Path, tmp_path: Path) -> None:
    second = tmp_path / "second" / "torchkiln"
    shutil.copytree(copy, second)
    code = f"""
import torchkiln
for name in [name for name in sys.modules if name.split(".")[0] == "torchkiln"]:
    del sys.modules[name]
sys.path.insert(0, {str(second.parent)!r})
import torchkiln
"""
    done = run(code, copy)
    assert done.returncode == 1, done
    said = done.stderr.split("\nImportError: ")[-1]
    assert said.startswith(f"torchkiln ({second}): got a second copy in one process, expected one")
    assert f"{copy}{os.sep}" in said


def test_an_import_after_deletion(copy: Path) -> None:
    code = f"""
import torchkiln
for name in [name for name in sys.modules if name.split(".")[0] == "torchkiln"]:
    del sys.modules[name]
import torchkiln
{WORKS}
x = torchkiln._torch.ones(4, requires_grad=True)
compiled = torchkiln._torch.compile(
    lambda x: torchkiln.dropout_add(x, x, 0.5), backend="aot_eager", fullgraph=True
)
compiled(x).sum().backward()
"""
    done = run(code, copy)
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr


MAIN = """
#include <c10/util/Exception.h>
#include "torchkiln/torch/torch_cuda.h"
int main() {
  try {
    torchkiln::torch_cuda();
  } catch (const c10::Error& error) {
    puts(error.what_without_backtrace());
    return 0;
  }
  return 1;
}
"""


def test_a_bridge_of_another_copy_is_not_read(tmp_path: Path) -> None:
    """A bridge that is linked to another copy's library raises an error, as ours lacks its ops."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "main.cpp").write_text(MAIN)
    (tmp_path / "bridge.cpp").write_text("int of_another_copy = 1;\n")
    libraries = Path(torch.__file__).parent / "lib"
    installed = Path(torchkiln.cmake_prefix_path).parents[1] / "include"  # has version.h
    folders = (ROOT / "cpp" / "include", ROOT / "cuda" / "include", installed)
    headers = [f"-I{folder}" for folder in folders]
    torchs = ["-isystem", str(libraries.parent / "include"), f"-L{libraries}", "-lc10"]
    paths = [f"-Wl,-rpath,{tmp_path}:{libraries}", f"-L{tmp_path}"]

    def build(output: str, source: Path, *options: str) -> None:
        command = (compiler, "-std=c++20", "-fPIC", *headers, str(source), *options)
        subprocess.run((*command, *torchs, *paths, "-o", str(tmp_path / output)), check=True)

    build("libtorchkiln_cuda.so", tmp_path / "bridge.cpp", "-shared")
    build("libloader.so", ROOT / "cpp" / "ops" / "cuda_loader.cpp", "-shared")
    build("main", tmp_path / "main.cpp", "-lloader")
    done = subprocess.run((str(tmp_path / "main"),), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    path = tmp_path / "libtorchkiln_cuda.so"
    assert f"got {path} of another copy of torchkiln in one process, expected one" in done.stdout
