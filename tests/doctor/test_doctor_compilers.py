"""The doctor's findings about compilers and their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_machine import Machine

from torchkiln.doctor import Finding
from torchkiln.doctor.compilers import (
    find_cmake,
    find_cuda_home,
    find_cxx,
    find_headers,
    find_nvcc,
    find_nvrtc,
    nvccs,
)
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts

Find = Callable[[Environment, Facts], list[Finding]]
TOOLKIT = "python -m pip install 'cuda-toolkit[nvcc,nvvm,crt,cccl]==13.0.*'"


def registry_toolkit(machine: Machine, **versions: str) -> Path:
    """A toolkit as pip installs it: four wheels; three have their version only in the metadata."""
    parts = {"nvidia_nvvm": "13.0.88", "nvidia_cuda_crt": "13.0.88", "nvidia_cuda_cccl": "13.0.85"}
    parts["nvidia_cuda_runtime"] = "13.0.96"
    for part, version in (parts | versions).items():
        if version:
            machine.write(machine.site / f"{part}-{version}.dist-info" / "METADATA")
    return machine.nvcc(machine.site / "nvidia/cu13/bin/nvcc", "13.0")


def test_as_it_should_be(machine: Machine) -> None:
    assert machine.find_one(find_nvcc, "ok")[0] == f"13.0 ({machine.bin}/nvcc)"
    assert machine.find(find_cuda_home) == []
    assert machine.find_one(find_nvrtc, "ok")[0].endswith("cu13/lib/libnvrtc.so.13")
    assert machine.find_one(find_headers, "ok")[0].endswith("cu13/include")
    assert machine.find_one(find_cxx, "ok")[0] == f"12.2.0 ({machine.bin}/g++)"
    assert machine.find_one(find_cmake, "ok")[0] == f"4.4.4 ({machine.bin}/cmake)"


def test_torch_without_cuda_needs_none(machine: Machine) -> None:
    machine.torch("2.99.0", None)
    found = [machine.find(find) for find in (find_nvcc, find_nvrtc, find_headers)]
    assert found == [[], [], []]


@pytest.mark.parametrize("building", [True, False])
def test_no_nvcc(machine: Machine, building: bool) -> None:
    (machine.bin / "nvcc").unlink()
    if building:
        machine.build(cuda=None, cuda_architectures=[])
    words, remedy = machine.find_one(find_nvcc, "problem" if building else "note")
    assert words == "none; torch's CUDA needs nvcc 13.0"
    assert remedy.endswith(TOOLKIT)


@pytest.mark.parametrize("version", ["12.8", "13.2"])
def test_other_nvcc(machine: Machine, version: str) -> None:
    machine.build(cuda=None, cuda_architectures=[])
    machine.nvcc("nvcc", version)
    words, remedy = machine.find_one(find_nvcc, "problem")
    assert words == f"{version} ({machine.bin}/nvcc); torch's CUDA needs nvcc 13.0"
    assert remedy.endswith(TOOLKIT)


def test_nvcc_that_does_not_run(machine: Machine) -> None:
    machine.program("nvcc", end="exit 1")
    assert machine.find_one(find_nvcc, "note")[0].startswith("one that does not run (")


def test_several(machine: Machine) -> None:
    machine.nvcc("nvcc", "12.8")
    home = machine.nvcc(machine.folder / "opt/cuda/bin/nvcc", "12.6")
    machine.variables["CUDA_HOME"] = str(home.parent.parent)
    system = machine.nvcc(machine.root / "usr/local/cuda-13.0/bin/nvcc", "13.0")
    (machine.root / "usr/local/cuda").symlink_to(system.parent.parent)
    words, _ = machine.find_one(find_nvcc, "ok")
    first = machine.root / "usr/local/cuda/bin/nvcc"
    beside = f"12.6 ({home}), 12.8 ({machine.bin}/nvcc)"
    assert words == f"13.0 ({first}); also {beside}"


def test_registry_toolkit(machine: Machine) -> None:
    (machine.bin / "nvcc").unlink()
    nvcc = registry_toolkit(machine)
    assert machine.find_one(find_nvcc, "ok")[0] == f"13.0 ({nvcc})"


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"nvidia_nvvm": "13.5.37"}, "13.0 with nvidia_nvvm-13.5.37 ("),
        ({"nvidia_cuda_crt": ""}, "13.0 with no nvidia_cuda_crt ("),
        ({"nvidia_cuda_runtime": ""}, "13.0 with no nvidia_cuda_runtime ("),
        ({"nvidia_cuda_cccl": "", "nvidia_nvvm": ""}, "no nvidia_nvvm, no nvidia_cuda_cccl ("),
    ],
)
def test_incomplete_registry_toolkit(machine: Machine, versions: dict[str, str], said: str) -> None:
    (machine.bin / "nvcc").unlink()
    registry_toolkit(machine, **versions)
    words, remedy = machine.find_one(find_nvcc, "note")
    assert said in words
    assert remedy.endswith(TOOLKIT)


def test_nvcc_that_was_named(machine: Machine) -> None:
    named = machine.nvcc("old", "12.4")
    machine.variables["CUDACXX"] = str(named)
    words, remedies = machine.find_one(find_nvcc, "note")
    assert words.startswith(f"12.4 ({named}), named by CUDACXX; ")
    assert remedies.startswith("unset CUDACXX | ")


def test_nvcc_of_a_prefix(machine: Machine) -> None:
    """An nvcc beside Python is found, as in a Conda environment that is not activated."""
    (machine.bin / "nvcc").unlink()
    machine.program("python-bin/python")
    nvcc = machine.nvcc("python-bin/nvcc", "13.0")
    environment = replace(machine.environment(), python=str(nvcc.with_name("python")))
    assert str(nvccs(environment, "13.0")[0]) == f"13.0 ({nvcc})"


@pytest.mark.parametrize("name", ["CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH"])
def test_wrong_cuda_home(machine: Machine, name: str) -> None:
    machine.variables[name] = str(machine.folder / "gone")
    words, remedy = machine.find_one(find_cuda_home, "problem")
    assert words == f"{machine.folder}/gone has no bin/nvcc"
    assert remedy == f"unset {name}"


def test_no_nvrtc(machine: Machine) -> None:
    library = machine.site / "nvidia/cu13/lib/libnvrtc.so.13"
    library.rename(library.with_name("libnvrtc.so.12"))
    words, remedy = machine.find_one(find_nvrtc, "problem")
    assert words.startswith("no libnvrtc.so.13")
    assert remedy.endswith("pip install 'nvidia-cuda-nvrtc==13.0.*'")
    machine.torch("2.99.0", "12.8")
    assert machine.find(find_nvrtc)[0].state == "ok"
    library.with_name("libnvrtc.so.12").unlink()
    assert machine.find_one(find_nvrtc, "problem")[1].endswith("'nvidia-cuda-nvrtc-cu12==12.8.*'")


def test_nvrtc_of_the_system(machine: Machine) -> None:
    (machine.site / "nvidia/cu13/lib/libnvrtc.so.13").unlink()
    machine.variables["LD_LIBRARY_PATH"] = f"/nowhere:{machine.folder}/lib"
    library = machine.write(machine.folder / "lib/libnvrtc.so.13")
    assert machine.find_one(find_nvrtc, "ok")[0] == str(library)


def test_no_headers(machine: Machine) -> None:
    (machine.site / "nvidia/cu13/include/cuda_fp16.h").unlink()
    words, remedy = machine.find_one(find_headers, "problem")
    assert words.startswith("no cuda_fp16.h")
    assert remedy.endswith("pip install 'nvidia-cuda-runtime==13.0.*'")


def test_headers_of_the_cpp_library_are_nvccs(machine: Machine) -> None:
    """Missing headers of the C++ library are noted only if nvcc, which needs them, is installed."""
    toolkit = machine.site / "nvidia" / "cu13"
    (toolkit / "include/nv/target").unlink()
    assert machine.find_one(find_headers, "ok")[0] == str(toolkit / "include")
    machine.write(toolkit / "bin/nvcc")
    words, remedy = machine.find_one(find_headers, "note")
    assert "but not nv/target, which nvcc needs" in words
    assert remedy.endswith(TOOLKIT)


@pytest.mark.parametrize(
    ("find", "name", "answer", "said", "command"),
    [
        (find_cxx, "g++", "", "none, a build needs 11 or", "sudo apt-get install g++"),
        (find_cxx, "g++", "10.2.1", "10.2.1 (", "sudo apt-get install g++"),
        (find_cmake, "cmake", "", "none, a build needs 3.28 or", "pip install 'cmake>=3.28'"),
        (find_cmake, "cmake", "cmake version 3.25.1", "3.25.1 (", "pip install 'cmake>=3.28'"),
        (find_cmake, "cmake", "segfault", "unknown version (", "pip install 'cmake>=3.28'"),
    ],
)
@pytest.mark.parametrize("building", [True, False])
def test_tools(
    machine: Machine, find: Find, name: str, answer: str, said: str, command: str, building: bool
) -> None:
    (machine.bin / name).unlink()
    if answer:
        machine.program(name, answer)
    if building:
        machine.build(python="3.9")
    words, remedy = machine.find_one(find, "problem" if building else "note")
    assert words.startswith(said)
    assert remedy.endswith(command)
    assert words.endswith("; nothing has to be built here") == (not building)


def test_other_compiler_that_was_named(machine: Machine) -> None:
    machine.program("g++-13", "13.3.0")
    machine.variables["CXX"] = "g++-13"
    assert machine.find_one(find_cxx, "ok")[0].startswith("13.3.0 (")


def test_another_torch_spares_compilers(machine: Machine) -> None:
    (machine.bin / "g++").unlink()
    machine.build(torch="2.98.0")
    assert machine.find_one(find_cxx, "note")
