"""The doctor's findings about torch, the build and its import."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_machine import Machine

from torchkiln._loader import minor
from torchkiln.doctor.gpu import find_architectures, kernel_for
from torchkiln.doctor.package import (
    find_abi,
    find_build,
    find_cpu_build,
    find_import,
    find_torch,
)

REBUILD = "--force-reinstall --no-deps --no-build-isolation"


def test_as_it_should_be(machine: Machine) -> None:
    assert machine.find_one(find_torch, "ok")[0].startswith("2.99.0 with CUDA 13.0 (")
    assert machine.find_one(find_abi, "ok")[0] == "torch uses the C++11 one"
    words, _ = machine.find_one(find_build, "ok")
    assert "for torch 2.99.0, Python 3." in words
    assert words.endswith("CUDA 13.0 (sm_80, sm_90)")
    assert machine.find(find_cpu_build) == machine.find(find_architectures) == []
    assert machine.find_one(find_import, "ok")[0] == "a kernel ran on the CPU, cuda:0"


def test_no_torch(bare: Machine) -> None:
    words, remedy = bare.find_one(find_torch, "problem")
    assert words == f"none in {bare.bin}/python"
    assert remedy.endswith("python -m pip install 'torch>=2.11'")
    bare.build()
    assert bare.find_one(find_torch, "problem")[1].endswith("pip install 'torch==2.99.*'")
    assert bare.find_one(find_build, "note")


@pytest.mark.parametrize("content", [None, "__version__ =", "cuda = None", "raise SystemError"])
def test_damaged_torch(machine: Machine, content: str | None) -> None:
    version = machine.site / "torch" / "version.py"
    version.unlink()
    if content:
        version.write_text(content)
    words, remedy = machine.find_one(find_torch, "problem")
    assert words.startswith(f"{machine.site}/torch is damaged: ")
    assert "pip install --force-reinstall torch" in remedy


def test_torch_without_cuda_beside_a_gpu(machine: Machine) -> None:
    machine.torch("2.99.0+cpu", None)
    words, remedy = machine.find_one(find_torch, "problem")
    assert "2.99.0 has no CUDA" in words
    assert "torch==2.99.0 --index-url https://download.pytorch.org/whl/cu130" in remedy


def test_torch_that_cannot_be_imported(machine: Machine) -> None:
    error = "ImportError: libcudart.so.13: cannot open shared object file"
    where = 'Traceback (most recent call last):\n  File "<string>", line 2, in <module>'
    machine.program("python", error=f"a warning\n{where}\n{error}", end="exit 1")
    words, remedy = machine.find_one(find_torch, "problem")
    assert words.endswith(f"cannot be imported: {error}")
    assert "--force-reinstall torch==2.99.0" in remedy
    assert "torch cannot be imported" in machine.find_one(find_import, "note")[0]


@pytest.mark.parametrize("ours", [True, False])
def test_other_abi(machine: Machine, ours: bool) -> None:
    old = machine.site / ("torchkiln/_C.so" if ours else "torch/lib/libc10.so")
    old.write_bytes(b"NSs4_RepE")
    words, remedy = machine.find_one(find_abi, "problem")
    assert words == f"torch uses the {'C++11' if ours else 'old'} one, _C.so the other"
    assert REBUILD in remedy


@pytest.mark.parametrize(
    ("record", "said", "remedies"),
    [
        (
            {"torches": [{"version": "2.98.1", "cuda": "13.0", "folder": "."}]},
            "but found torch 2.99.0 (",
            ["'torch==2.98.*'", REBUILD],
        ),
        ({"cuda": "12.8"}, "but found torch 2.99.0 with CUDA 13.0 (", [REBUILD]),
        ({"python": "3.9"}, "but found Python 3.", [REBUILD]),
        ({"platform": "linux-riscv64"}, "but found linux-", [REBUILD]),
    ],
)
def test_build_for_another(
    machine: Machine, record: dict[str, Any], said: str, remedies: list[str]
) -> None:
    machine.build(**record)
    words, commands = machine.find_one(find_build, "problem")
    assert said in words
    assert all(remedy in commands for remedy in remedies)
    assert "not tried" in machine.find_one(find_import, "note")[0]


def several(*versions: str) -> list[dict[str, str | None]]:
    return [
        {"version": version, "cuda": "13.0", "folder": f"torch{minor(version)}"}
        for version in versions
    ]


def test_build_for_several(machine: Machine) -> None:
    package = machine.build(torches=several("2.98.1", "2.99.0", "2.100.0"))
    machine.write(package / "torch2.99" / "_C.so", b"NSs4_RepE")
    assert "for torch 2.98, 2.99 and 2.100, Python 3." in machine.find_one(find_build, "ok")[0]
    assert machine.find_one(find_abi, "problem")[0].endswith("_C.so the other")
    machine.build(torches=several("2.97.0", "2.98.0"))
    words, remedy = machine.find_one(find_build, "problem")
    assert "for torch 2.97 and 2.98, " in words
    assert "but found torch 2.99.0 (" in words
    assert "pip install 'torch>=2.97,<2.99'" in remedy
    assert f"{REBUILD} .     (in the folder with its sources)" in remedy


def test_not_built(machine: Machine) -> None:
    record = machine.site / "torchkiln" / "_build_info.json"
    other = json.dumps(json.loads(record.read_text()) | {"torches": [1]})
    for text in ("", '{"version": "0.1.0"', "{}", "[]", "3", other):
        record.write_text(text)
        words, remedy = machine.find_one(find_build, "problem")
        assert words.startswith("_build_info.json is damaged: ")
        assert f"({machine.site / 'torchkiln'})" in words
        assert f"{REBUILD} .     (in the folder with its sources)" in remedy
    for file in (machine.site / "torchkiln").iterdir():
        file.unlink()
    (machine.site / "torchkiln").rmdir()
    assert machine.find_one(find_build, "problem")[0] == "torchkiln has not been built"


def test_cpu_build_beside_a_gpu(machine: Machine) -> None:
    machine.build(cuda=None, cuda_architectures=[])
    words, remedy = machine.find_one(find_cpu_build, "problem")
    assert words == "there is a GPU, but this build has kernels for the CPU only"
    assert "-C torchkiln.cuda=on .     (in the folder with its sources)" in remedy


def test_gpu_without_kernels(machine: Machine) -> None:
    machine.gpu(("NVIDIA B200", (10, 0)))
    words, remedy = machine.find_one(find_architectures, "problem")
    assert words == "none for cuda:0, NVIDIA B200 (compute capability 10.0)"
    assert "-C torchkiln.cuda-architectures=native" in remedy
    machine.gpu(("Tesla V100", (7, 0)))
    words, _ = machine.find_one(find_architectures, "note")
    assert words.endswith("they need 7.5 or newer")


@pytest.mark.parametrize(
    ("architectures", "ptx", "capability", "kernel"),
    [
        (["80", "90"], [], (9, 0), "sm_90 kernel"),
        (["80", "86", "90"], [], (8, 9), "sm_86 kernel"),
        (["86"], [], (8, 0), None),
        (["90a"], [], (9, 0), "sm_90a kernel"),
        (["100a"], [], (10, 3), None),
        (["100f"], [], (10, 3), "sm_100f kernel"),
        (["80", "90"], ["80", "90"], (10, 0), "PTX of sm_90, which the driver compiles"),
        (["90"], ["90a"], (10, 0), None),
        (["120"], ["120"], (10, 0), None),
    ],
)
def test_which_kernel(
    architectures: list[str], ptx: list[str], capability: tuple[int, int], kernel: str | None
) -> None:
    record = {"cuda_architectures": architectures, "cuda_ptx": ptx}
    assert kernel_for(record, capability) == kernel


@pytest.mark.parametrize(
    ("error", "end", "said"),
    [
        ("", "kill -SEGV $$", "the process was killed by SIGSEGV"),
        ("", "exit 9", "the process ended with status 9"),
        (
            "Traceback (most recent call last):\n  File\nImportError: _C.so: undefined\n  symbol",
            "exit 1",
            "ImportError: _C.so: undefined\n  symbol",
        ),
    ],
)
def test_import_that_fails(machine: Machine, error: str, end: str, said: str) -> None:
    machine.program("python", "torch is there", error, end)
    words, remedy = machine.find_one(find_import, "problem")
    assert words == said
    assert REBUILD in remedy


@pytest.mark.parametrize(
    ("devices", "said", "command"),
    [
        ({"cuda:0": "no kernel image is available"}, "no kernel image", "architectures=native"),
        ({"cuda:0": "CUDA error: out of memory"}, "out of memory", "nvidia-smi"),
        ({}, "torch does not see it", """import torch; torch.ones(1, device="cuda:0") + 1'"""),
    ],
)
def test_kernel_that_fails(
    machine: Machine, devices: dict[str, str], said: str, command: str
) -> None:
    machine.imports(devices=devices)
    words, remedy = machine.find_one(find_import, "problem")
    assert words.startswith("none ran on cuda:0: ")
    assert said in words
    assert command in remedy


def test_path_with_spaces(machine: Machine) -> None:
    environment = replace(machine.environment(), python="/my envs/python")
    assert environment.pip == "'/my envs/python' -m pip install"
