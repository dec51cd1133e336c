"""The CMake package in other projects: without torch near it, without components that are
required, or built as a part of the project."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sandbox import ROOT, Ground, Outcome

import torchkiln

KERNELS = ROOT / "tests" / "consumer" / "kernels"
ASKING = """
cmake_minimum_required(VERSION 3.28...4.4)
project(asking LANGUAGES CXX)
find_package(torchkiln {})
message(STATUS "found: ${{torchkiln_FOUND}}, torch: ${{torchkiln_torch_FOUND}}")
if(TARGET torchkiln::torch)
  message(STATUS "has the operators")
endif()
"""

PROGRAM = """
cmake_minimum_required(VERSION 3.28...4.4)
project(program LANGUAGES CXX)
find_package(torchkiln REQUIRED COMPONENTS kernels)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE torchkiln::kernels)
add_library(other SHARED other.cpp)
target_include_directories(other PRIVATE ${torchkiln_DIR}/../../../include)
target_compile_definitions(other PRIVATE OTHER_MINOR)
set_target_properties(other PROPERTIES OUTPUT_NAME torchkiln_kernels)
"""
SUM = """
#include "torchkiln/version.h"
#ifdef OTHER_MINOR
#undef TORCHKILN_ABI
#define TORCHKILN_ABI "v0_0"
#endif
#include "torchkiln/kernels/pointwise.h"
"""
CALL = """
#include <cstdio>
int main() {
  std::puts("started");
  const torchkiln::Elementwise<2> sum{};
  return torchkiln::cpu::add(sum, 0, 0).ok() ? 0 : 1;
}
"""
OTHER = """
torchkiln::Status torchkiln::cpu::add(const Elementwise<2>&, int64_t, int64_t) { return {}; }
"""


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    folder = tmp_path / "a place"
    folder.mkdir()
    return Ground(folder)


@pytest.fixture
def moved(ground: Ground) -> Path:
    """A copy of the installed package in a folder without torch."""
    prefix = ground.folder / "moved"
    installed = Path(torchkiln.cmake_prefix_path).parents[1]
    for name in ("include", "lib", "share"):
        shutil.copytree(installed / name, prefix / name)
    return prefix


def ask(ground: Ground, prefix: Path, arguments: str, *options: str) -> Outcome:
    ground.write(ground.folder / "asking" / "CMakeLists.txt", ASKING.format(arguments))
    sources = ground.folder / "asking"
    found = [f"-DCMAKE_PREFIX_PATH={prefix}", *options]
    return ground.configure(*found, sources=sources)


def build(ground: Ground, target: str) -> str:
    command = ("cmake", "--build", str(ground.build), "--target", target)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return subprocess.run(
        [ground.build / target], capture_output=True, text=True, check=True, env={}
    ).stdout


def test_kernels_where_there_is_no_torch(ground: Ground, moved: Path) -> None:
    outcome = ground.configure(f"-DCMAKE_PREFIX_PATH={moved}", sources=KERNELS)
    assert outcome.ended_well, outcome.text
    assert "values right" in build(ground, "with_kernels")


def test_operators_where_there_is_no_torch(ground: Ground, moved: Path) -> None:
    outcome = ask(ground, moved, "0.1 REQUIRED COMPONENTS torch")
    assert not outcome.ended_well
    torch = torchkiln.build_info()["torch"].rpartition(".")[0]
    assert outcome.says(
        f"torchkiln::torch was built against torch {torch}; found: none",
        f"pip install 'torch=={torch}.*'",
    )


def test_operators_beside_another_torch(ground: Ground, moved: Path) -> None:
    config = ground.torch(version="2.10.1") / "share/cmake/Torch"
    outcome = ask(ground, moved, "0.1 REQUIRED COMPONENTS torch", f"-DTorch_DIR={config}")
    assert not outcome.ended_well
    assert outcome.says("; found: 2.10.1. Type", "or name its folder: -DTorch_DIR=")


@pytest.mark.parametrize("arguments", ["0.1", "0.1 COMPONENTS torch", "COMPONENTS kernels torch"])
def test_operators_beside_their_torch(ground: Ground, moved: Path, arguments: str) -> None:
    config = ground.torch(version=torchkiln.build_info()["torch"]) / "share/cmake/Torch"
    outcome = ask(ground, moved, arguments, f"-DTorch_DIR={config}")
    assert outcome.says("found: 1, torch: TRUE", "has the operators")


def test_without_components(ground: Ground, moved: Path) -> None:
    outcome = ask(ground, moved, "0.1 REQUIRED")
    assert outcome.says("found: 1, torch:")
    assert "has the operators" not in outcome.text


@pytest.mark.parametrize("component", ["cublas", "torchkiln"])
def test_unknown_component(ground: Ground, moved: Path, component: str) -> None:
    outcome = ask(ground, moved, f"REQUIRED COMPONENTS kernels {component}")
    assert not outcome.ended_well
    assert outcome.says(f"torchkiln has no component '{component}', only: kernels, torch")


def test_unknown_component_that_may_be_missing(ground: Ground, moved: Path) -> None:
    outcome = ask(ground, moved, "REQUIRED COMPONENTS kernels OPTIONAL_COMPONENTS cublas")
    assert outcome.ended_well, outcome.text


def test_another_version(ground: Ground, moved: Path) -> None:
    outcome = ask(ground, moved, "7.0 REQUIRED")
    assert not outcome.ended_well
    version = torchkiln.build_info()["version"]
    assert outcome.says('compatible with requested version "7.0"', f"version: {version}")


def test_a_program_beside_another_minor_version(ground: Ground, moved: Path) -> None:
    """A program does not start with another minor version, which its symbols contain."""
    sources = ground.folder / "sources"
    ground.write(sources / "CMakeLists.txt", PROGRAM)
    ground.write(sources / "program.cpp", SUM + CALL)
    ground.write(sources / "other.cpp", SUM + OTHER)
    outcome = ground.configure(f"-DCMAKE_PREFIX_PATH={moved}", sources=sources)
    assert outcome.ended_well, outcome.text
    assert build(ground, "program") == "started\n"
    subprocess.run(["cmake", "--build", str(ground.build), "--target", "other"], check=True)
    name = "libtorchkiln_kernels.so"
    shutil.copy(ground.build / name, moved / "lib" / name)
    command = [ground.build / "program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert done.returncode != 0
    assert done.stdout == ""
    version = "_".join(torchkiln.build_info()["version"].split(".")[:2])
    assert re.search(rf"undefined symbol: \w*torchkiln\w*addB\d+v{version}", done.stderr)


def test_as_a_part_of_another_project(ground: Ground) -> None:
    """Targets have the package's names; only linked ones are built, and none is installed."""
    ground.torch(cuda=None)
    outcome = ground.configure(f"-DTORCHKILN_SOURCES={ROOT}", sources=KERNELS)
    assert outcome.ended_well, outcome.text
    steps = (ground.build / "build.ninja").read_text()
    assert "with_kernels: phony" in steps or "build with_kernels:" in steps
    assert "_C.cpython" not in steps
    assert "-Werror" not in steps
    installs = (ground.build / "torchkiln" / "cmake_install.cmake").read_text()
    assert "libtorchkiln" not in installs
