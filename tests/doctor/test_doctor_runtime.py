"""The doctor's findings about counters, caches, locks and duplicate libraries."""

from __future__ import annotations

import os
import time

import pytest
from fake_machine import Machine

from torchkiln.doctor.runtime import (
    STALE_SECONDS,
    cache_folders,
    find_caches,
    find_duplicates,
    find_ncu,
)


def test_ncu(machine: Machine) -> None:
    assert machine.find_one(find_ncu, "ok")[0] == f"{machine.bin}/ncu"
    (machine.bin / "ncu").unlink()
    installed = machine.write(machine.root / "opt/nvidia/nsight-compute/2025.3.1/ncu")
    assert machine.find_one(find_ncu, "ok")[0] == str(installed)
    installed.unlink()
    words, remedy = machine.find_one(find_ncu, "note")
    assert words.startswith("not found")
    assert "nsight-compute" in remedy


def test_ncu_without_a_gpu(bare: Machine) -> None:
    assert bare.find(find_ncu) == []


@pytest.mark.parametrize(
    ("capabilities", "allowed"),
    [
        ("0000000000000000", False),
        ("00000000a80425fb", False),
        ("0000000000200000", True),
        ("0000004000000000", True),
    ],
)
def test_counters_for_administrators(machine: Machine, capabilities: str, allowed: bool) -> None:
    machine.write(machine.root / "proc/self/status", f"Name:\tsh\nCapEff:\t{capabilities}\n")
    machine.write(machine.root / "proc/driver/nvidia/params", "RmProfilingAdminOnly: 0\n")
    assert machine.find_one(find_ncu, "ok")
    machine.write(machine.root / "proc/driver/nvidia/params", "RmProfilingAdminOnly: 1\n")
    words, remedies = machine.find_one(find_ncu, "ok" if allowed else "note")
    assert ("only administrators" in words) == (not allowed)
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in remedies) == (not allowed)
    assert ("--cap-add=SYS_ADMIN" in remedies) == (not allowed)


def test_caches(machine: Machine) -> None:
    assert machine.find_one(find_caches, "ok")[0] == "none yet"
    triton = machine.home / ".triton" / "cache"
    triton.mkdir(parents=True)
    assert machine.find_one(find_caches, "ok")[0] == str(triton)
    machine.variables["XDG_CACHE_HOME"] = "/elsewhere"
    extensions = cache_folders(machine.environment())["TORCH_EXTENSIONS_DIR"]
    assert str(extensions) == "/elsewhere/torch_extensions"


@pytest.mark.parametrize(
    "name",
    ["TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"],
)
def test_cache_that_cannot_be_written(machine: Machine, name: str) -> None:
    # Root may write to every folder, but cannot create one below a file.
    cache = machine.write(machine.folder / "file") / "cache"
    machine.variables[name] = str(cache)
    words, remedies = machine.find_one(find_caches, "problem")
    assert words == f"{cache} is not writable"
    assert f"sudo chown -R $(id -u) {cache}" in remedies
    assert f"export {name}=" in remedies


def test_cache_of_kernels(machine: Machine) -> None:
    kernels = machine.home / ".cache" / "torchkiln" / "jit"
    kernels.mkdir(parents=True, mode=0o700)
    assert machine.find_one(find_caches, "ok")[0] == str(kernels)
    kernels.chmod(0o777)
    words, remedies = machine.find_one(find_caches, "problem")
    assert words.startswith(f"{kernels} is not used, because other users can write to it")
    assert f"chmod go-w {kernels}" in remedies
    assert f"export TORCHKILN_CACHE={machine.home}/kernels-of-mine" in remedies
    kernels.chmod(0o755)
    assert machine.find_one(find_caches, "ok")
    file = machine.write(machine.folder / "file")
    machine.variables["TORCHKILN_CACHE"] = str(file)
    assert machine.find_one(find_caches, "problem")[0] == f"{file}/jit is not writable"


def test_cache_of_kernels_of_another_user(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = machine.home / ".cache" / "torchkiln" / "jit"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: kernels.stat().st_uid + 1)
    words, remedies = machine.find_one(find_caches, "problem")
    assert "is not used, because it belongs to user" in words
    assert remedies.startswith("export TORCHKILN_CACHE=")


@pytest.mark.parametrize("below", ["mine", "py311_cu130/mine"])
def test_stale_lock(machine: Machine, below: str) -> None:
    lock = machine.write(machine.home / ".cache/torch_extensions" / below / "lock")
    assert machine.find_one(find_caches, "ok")
    old = time.time() - STALE_SECONDS - 60
    os.utime(lock, (old, old))
    words, remedy = machine.find_one(find_caches, "problem")
    assert words.startswith(f"{lock} was left by a build that died")
    assert remedy == f"rm '{lock}'"


def test_one_of_each(machine: Machine) -> None:
    openmp = machine.write(machine.site / "torch/lib/libgomp.so.1")
    cuda = machine.write(machine.site / "nvidia/cu13/lib/libcudart.so.13")
    (machine.folder / "lib").mkdir()
    (machine.folder / "lib" / "libgomp.so.1").symlink_to(openmp)
    machine.imports(libraries=[str(openmp), str(cuda), "/lib/libompress.so"])
    found = [(finding.state, finding.words) for finding in machine.find(find_duplicates)]
    assert found == [("ok", str(openmp)), ("ok", str(cuda))]
    machine.imports()
    assert [finding.state for finding in machine.find(find_duplicates)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("first", "second", "topic"),
    [
        ("torch/lib/libgomp.so.1", "numpy.libs/libgomp-a34b3233.so.1.0.0", "OpenMP"),
        ("torch/lib/libgomp.so.1", "mkl/lib/libiomp5.so", "OpenMP"),
        ("nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.12", "CUDA"),
    ],
)
def test_two_in_the_environment(machine: Machine, first: str, second: str, topic: str) -> None:
    paths = [machine.write(machine.site / first), machine.write(machine.site / second)]
    words, _ = machine.find_one(find_duplicates, "note")
    assert all(str(path) in words for path in paths)
    assert machine.find(find_duplicates)[0].topic.startswith(topic)
    machine.imports(libraries=list(map(str, paths)))
    words, remedy = machine.find_one(find_duplicates, "problem")
    assert "are loaded at once" in words
    assert "pip list" in remedy


def test_two_of_conda(machine: Machine) -> None:
    machine.write(machine.site / "torch/lib/libgomp.so.1")
    other = machine.write(machine.folder / "lib/libiomp5.so")
    assert str(other) in machine.find_one(find_duplicates, "note")[0]


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_second_one_from_a_variable(machine: Machine, variable: str) -> None:
    outside = machine.write(machine.folder / "cuda/lib64/libcudart.so.12")
    inside = machine.write(machine.site / "nvidia/cu13/lib/libcudart.so.13")
    machine.imports(libraries=[str(outside), str(inside)])
    named = outside if variable == "LD_PRELOAD" else outside.parent
    machine.variables[variable] = f"/nowhere:{named}"
    assert machine.find_one(find_duplicates, "problem")[1] == f"unset {variable}"
