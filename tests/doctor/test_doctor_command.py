"""The doctor's verdict on each op, and its command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_machine import H200, Machine, no_libcuda

import torchkiln
import torchkiln_command
from torchkiln.cli import main
from torchkiln.cli.status import Status
from torchkiln.doctor import Finding, problem, runtime
from torchkiln.doctor.report import CHECKS, examine
from torchkiln.ops.names import OPS


def test_a_problem_has_a_command() -> None:
    with pytest.raises(ValueError, match="Finding: remedies: got none, expected a command"):
        problem("driver", "none")


def test_nothing_wrong(machine: Machine) -> None:
    machine.gpu(H200, ("NVIDIA A10", (8, 6)))
    machine.imports(devices={"cuda:0": None, "cuda:1": None})
    found = examine(machine.environment())
    assert found.problems == 0, str(found)
    assert found.verdicts["relu"].devices == ("cpu", "cuda:0", "cuda:1")
    assert found.verdicts["relu"].words == (
        "runs on cuda:0 with the sm_90 kernel; runs on cuda:1 with the sm_80 kernel"
    )
    assert found.verdicts["linear"].words == (
        "runs on cuda:0 with the sm_90a kernel or torch's product; "
        "runs on cuda:1 with the sm_80 kernel"
    )
    assert str(found).endswith("\n\nno problems")


def no_torch(machine: Machine) -> None:
    shutil.rmtree(machine.site / "torch")


def old_torch(machine: Machine) -> None:
    machine.torch("2.98.0", "13.0")


def no_build(machine: Machine) -> None:
    shutil.rmtree(machine.site / "torchkiln")


def no_import(machine: Machine) -> None:
    machine.program("python", "torch is there", "ImportError: undefined symbol\n  more", "exit 1")


def no_torch_import(machine: Machine) -> None:
    machine.program("python", "", "OSError: libtorch.so", "exit 1")


def cpu_torch(machine: Machine) -> None:
    machine.torch("2.99.0", None)
    machine.build(cuda=None, cuda_architectures=[])


def cpu_build(machine: Machine) -> None:
    machine.build(cuda=None, cuda_architectures=[])


def no_gpu(machine: Machine) -> None:
    machine.load_library = no_libcuda
    (machine.bin / "nvidia-smi").unlink()


def hidden_gpu(machine: Machine) -> None:
    machine.gpu(code=100)


def old_driver(machine: Machine) -> None:
    machine.gpu(cuda=12080)


def old_gpu(machine: Machine) -> None:
    machine.gpu(("Tesla V100", (7, 0)))


def other_gpu(machine: Machine) -> None:
    machine.gpu(("NVIDIA B200", (10, 0)))


def unseen_gpu(machine: Machine) -> None:
    machine.imports()


def broken_gpu(machine: Machine) -> None:
    machine.imports(devices={"cuda:0": "CUDA error: out of memory"})


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (no_torch, "does not run, because there is no torch that could be imported"),
        (old_torch, "does not run, because torchkiln was built for torch 2.99.0, and this is"),
        (no_build, "does not run, because torchkiln has not been built"),
        (no_import, "does not run, because its import fails: ImportError: undefined symbol"),
        (no_torch_import, "does not run, because torch cannot be imported: OSError: libtorch.so"),
        (cpu_torch, "CPU only, because torch has no CUDA"),
        (cpu_build, "CPU only, because this build has no CUDA kernels"),
        (no_gpu, "CPU only, because no GPU is visible"),
        (hidden_gpu, "CPU only, because no GPU is visible: NVIDIA H200 cannot be used"),
        (old_driver, "CPU only, because the driver runs up to CUDA 12.8, and torch has CUDA 13.0"),
        (old_gpu, "CPU only: not on cuda:0, because its compute capability is older than 7.5"),
        (other_gpu, "CPU only: not on cuda:0, because this build has no kernel for NVIDIA B200"),
        (unseen_gpu, "CPU only: not on cuda:0, because torch does not see it"),
        (broken_gpu, "CPU only: not on cuda:0, because CUDA error: out of memory"),
    ],
)
def test_verdicts(machine: Machine, plant: Callable[[Machine], None], words: str) -> None:
    plant(machine)
    found = examine(machine.environment())
    assert found.verdicts["linear"].words.startswith(words)
    assert found.verdicts["linear"].devices == (("cpu",) if words.startswith("CPU") else ())
    assert (found.problems == 0) == (plant in (no_gpu, old_gpu))


def test_a_check_that_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError("nothing for you")

    monkeypatch.setattr(runtime, "writable", refuse)
    found = examine(machine.environment())
    assert Finding("caches", "note", "cannot be checked: nothing for you") in found.findings
    assert len(found.findings) >= len(CHECKS) - 6  # up to six checks report nothing if all is well


def run_doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a Python without site-packages, so without torch."""
    program = "from torchkiln_command import main; import sys; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )


def copy_package(folder: Path, *, built: bool) -> Path:
    skipped = shutil.ignore_patterns("*.so", "__pycache__", *([] if built else ["*.json"]))
    source = Path(torchkiln.__file__).parent
    shutil.copytree(source, folder / "torchkiln", ignore=skipped)
    command = Path(torchkiln_command.__file__).parent
    shutil.copytree(command, folder / "torchkiln_command", ignore=skipped)
    record = Path(torchkiln.cmake_prefix_path).parents[1] / "_build_info.json"
    if built and record.parent != source:
        shutil.copy(record, folder / "torchkiln")
    return folder


def test_without_torch(tmp_path: Path) -> None:
    done = run_doctor(copy_package(tmp_path, built=True), "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"PROBLEM  torch: none in {sys.executable}" in done.stdout
    assert "does not run, because there is no torch that could be imported" in done.stdout


def test_other_commands_without_torch(tmp_path: Path) -> None:
    done = run_doctor(copy_package(tmp_path, built=True), "explain", "add")
    assert (done.returncode, done.stdout) == (3, "")
    assert "but found no torch" in done.stderr
    assert "-m torchkiln_command doctor" in done.stderr
    assert "Traceback" not in done.stderr


def test_from_sources(tmp_path: Path) -> None:
    done = run_doctor(copy_package(tmp_path, built=False), "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == "torchkiln.doctor/1"
    assert found["build"] is None
    assert found["problems"] == sum(item["state"] == "problem" for item in found["findings"])
    assert set(found["ops"]) == set(OPS)
    assert "torchkiln has not been built" in [item["words"] for item in found["findings"]]


def test_without_the_package(tmp_path: Path) -> None:
    command = Path(torchkiln_command.__file__).parent
    shutil.copytree(command, tmp_path / "torchkiln_command")
    done = run_doctor(tmp_path, "doctor")
    assert done.returncode == Status.CANNOT_RUN == torchkiln_command.CANNOT_RUN
    assert "-m pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr


def test_other_commands_load_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchkiln", "--version"])
    assert torchkiln_command.main() == 0
    assert capsys.readouterr().out.strip() == torchkiln.__version__


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["problems"] else 0)
    assert found["build"].items() <= torchkiln.build_info().items()
    imported = next(item for item in found["findings"] if item["topic"] == "import")
    assert imported["state"] == "ok", imported
    assert "cpu" in found["ops"]["add"]["devices"]
