"""The doctor's findings about drivers and GPUs."""

from __future__ import annotations

import pytest
from fake_machine import H200, Machine, no_libcuda

from torchkiln.doctor.gpu import find_driver, find_gpus, find_old_driver

A100 = ("NVIDIA A100", (8, 0))


def test_as_it_should_be(machine: Machine) -> None:
    machine.gpu(H200, A100)
    words, _ = machine.find_one(find_driver, "ok")
    assert words == "580.159.04, runs up to CUDA 13.0"
    assert [finding.words for finding in machine.find(find_gpus)] == [
        "cuda:0: NVIDIA H200 (compute capability 9.0)",
        "cuda:1: NVIDIA A100 (compute capability 8.0)",
    ]
    assert machine.find(find_old_driver) == []


def test_no_driver(bare: Machine) -> None:
    assert bare.find_one(find_driver, "note")[0] == "no NVIDIA driver"
    assert bare.find_one(find_gpus, "note")[0] == "none visible to this process"


@pytest.mark.parametrize("seen_by", ["nvidia-smi", "proc"])
def test_no_libcuda(machine: Machine, seen_by: str) -> None:
    machine.load_library = no_libcuda
    name = "NVIDIA H200"
    if seen_by == "proc":
        (machine.bin / "nvidia-smi").unlink()
        name = "0000:19:00.0"
        (machine.root / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    words, remedies = machine.find_one(find_driver, "problem")
    assert words.startswith(f"there is a GPU ({name}), but libcuda.so.1: cannot open")
    assert "docker run --gpus all" in remedies
    assert "apt-get install nvidia-driver-580" in remedies


@pytest.mark.parametrize(
    ("code", "said", "command"),
    [
        (34, "stub", "unset LD_LIBRARY_PATH"),
        (802, "fabric", "systemctl restart nvidia-fabricmanager"),
        (803, "different versions", "sudo reboot"),
        (804, "data centre", "unset LD_LIBRARY_PATH"),
        (999, "gives no reason", "nvidia-modprobe -u"),
        (3, "cuInit fails with code 3", "sudo reboot"),
    ],
)
def test_driver_that_does_not_start(machine: Machine, code: int, said: str, command: str) -> None:
    machine.gpu(code=code)
    words, remedies = machine.find_one(find_driver, "problem")
    assert said in words
    assert command in remedies


def test_nvidia_smi_fails(machine: Machine) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    machine.program("nvidia-smi", said, end="exit 18")
    fine, failed = machine.find(find_driver)
    assert fine.state == "ok"
    assert (failed.state, failed.words) == ("problem", f"nvidia-smi says: {said}")
    assert failed.remedies == ("sudo reboot",)


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus(machine: Machine, value: str) -> None:
    machine.gpu(code=100)
    machine.variables["CUDA_VISIBLE_DEVICES"] = value
    words, remedies = machine.find_one(find_gpus, "problem")
    assert words == f"CUDA_VISIBLE_DEVICES={value!r} hides NVIDIA H200"
    assert remedies == "unset CUDA_VISIBLE_DEVICES"
    assert machine.find_one(find_driver, "ok")


def test_gpus_that_cannot_be_opened(machine: Machine) -> None:
    machine.gpu(code=100)
    words, remedies = machine.find_one(find_gpus, "problem")
    assert "NVIDIA H200 cannot be opened" in words
    assert "ls -l /dev/nvidia*" in remedies


@pytest.mark.parametrize(("driver", "old"), [(12080, True), (13000, False), (13020, False)])
def test_driver_older_than_torch(machine: Machine, driver: int, old: bool) -> None:
    machine.torch("2.99.0", "13.2")
    machine.gpu(cuda=driver)
    if not old:
        assert machine.find(find_old_driver) == []
        return
    words, remedies = machine.find_one(find_old_driver, "problem")
    assert words == "runs up to CUDA 12.8, but torch 2.99.0 has CUDA 13.2"
    assert remedies == "sudo apt-get install nvidia-driver-580"
