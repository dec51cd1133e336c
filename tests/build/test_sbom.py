"""The SBOM lists third-party files of a build, from ninja's record of the compilation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sandbox import ROOT
from sbom import Part, bill, compiled_in, linked_in, parts


def write(path: Path, content: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def headers(tmp_path: Path) -> list[Path]:
    torch = tmp_path / "site" / "torch"
    write(torch / "version.py", "__version__ = '2.13.0+cu130'\n")
    numbers = "#define PYBIND11_VERSION_{} {}\n"
    words = (("MAJOR", 3), ("MINOR", 0), ("MICRO", 4), ("HEX", 9))
    common = "".join(numbers.format(*word) for word in words)
    toolkit = tmp_path / "cu13" / "include"
    runtime = write(toolkit / "cuda_runtime_api.h", "#define CUDART_VERSION  13020\n")
    version = toolkit / "cccl" / "cuda" / "std" / "__cccl" / "version.h"
    return [
        write(torch / "include/pybind11/detail/common.h", common),
        write(torch / "include/ATen/ATen.h"),
        write(torch / "include/torch/csrc/autograd/function.h"),
        runtime,
        write(version, "#define CCCL_VERSION 3001004\n"),
        Path("/usr/include/c++/12/vector"),
        Path("/usr/include/python3.11/Python.h"),
        Path("/usr/include/stdio.h"),
        ROOT / "cuda" / "include" / "torchkiln" / "vec.cuh",
    ]


def test_compiled_in() -> None:
    deps = "a.o: #deps 2, deps mtime 5 (VALID)\n    ../a.cpp\n    /b.h\n\nb.o: #deps 1\n    /b.h\n"
    assert compiled_in(deps) == [Path("../a.cpp"), Path("/b.h")]


def test_parts(headers: list[Path]) -> None:
    found = {part.name: part.version for part in parts(headers)}
    assert found == {
        "torch": "2.13.0",
        "pybind11": "3.0.4",
        "CUDA Toolkit headers": "13.2",
        "CCCL": "3.1.4",
        "libstdc++ headers": "12",
        "CPython headers": "3.11",
    }


def test_linked_in(headers: list[Path]) -> None:
    found = parts(headers)
    (runtime,) = linked_in("g++ -o lib.so /cu13/lib/libcudart_static.a -lrt", found)
    assert (runtime.name, runtime.version) == ("CUDA Runtime", "13.2")
    assert runtime.purl == "pkg:generic/cuda-cudart@13.2#lib/libcudart_static.a"
    assert "linked in" in runtime.included
    assert not linked_in("g++ -o lib.so /cu13/lib/libcudart.so", found)


def test_version_of_the_runtimes_wheel(headers: list[Path], tmp_path: Path) -> None:
    """The version is the complete one of the wheel in the registry."""
    (tmp_path / "nvidia_cuda_runtime-13.2.75.dist-info").mkdir()
    (runtime,) = linked_in("g++ libcudart_static.a", parts(headers))
    assert runtime.purl == "pkg:pypi/nvidia-cuda-runtime@13.2.75#lib/libcudart_static.a"
    (header,) = (part for part in parts(headers) if part.name == "CUDA Toolkit headers")
    assert header.purl == "pkg:pypi/nvidia-cuda-runtime@13.2.75#include"


def test_version_of_the_runtime_in_a_system_toolkit(headers: list[Path], tmp_path: Path) -> None:
    listed = {"cuda": {"version": "13.2.1"}, "cuda_cudart": {"version": "13.2.75"}}
    write(tmp_path / "cu13" / "version.json", json.dumps(listed))
    (runtime,) = linked_in("g++ libcudart_static.a", parts(headers))
    assert runtime.purl == "pkg:generic/cuda-cudart@13.2.75#lib/libcudart_static.a"


def test_several_torches(headers: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other" / "torch"
    write(other / "version.py", "__version__ = '2.14.1'\n")
    found = parts([*headers, write(other / "include/c10/core/Device.h")])
    assert {part.version for part in found if part.name == "torch"} == {"2.13.0", "2.14.1"}


def test_headers_that_torch_brings_along(headers: list[Path]) -> None:
    other = headers[1].parents[1] / "fmt" / "core.h"
    assert "fmt" in {part.name for part in parts([*headers, other])}


def test_bill_is_the_same_for_the_same_build() -> None:
    found = {Part("torch", "2.13.0", "BSD-3-Clause", "pkg:pypi/torch@2.13.0")}
    document = bill("0.1.0", "GNU 12.2.0", found)
    assert document == bill("0.1.0", "GNU 12.2.0", found)
    assert document["serialNumber"] != bill("0.1.1", "GNU 12.2.0", found)["serialNumber"]
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/torchkiln@0.1.0"
    assert [part["purl"] for part in document["components"]] == ["pkg:pypi/torch@2.13.0"]
    assert json.loads(json.dumps(document)) == document
