"""The pytest plug-in of the contract in another package, and its errors."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import torch
from processes import forked

import torchkiln
from torchkiln import testing
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.matrix import Run
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
PACKAGE = Path(__file__).parents[1] / "foreign_package"
# The folder of this torchkiln, which a process may not have on its path.
FOLDER = str(Path(torchkiln.__path__[-1]).parent)


START = """
import os, sys, warnings
import pytest
warnings.simplefilter("ignore")
os.chdir(sys.argv[1])
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
sys.exit(pytest.main(sys.argv[2:]))
"""


def pytest_in(folder: Path, *arguments: str) -> CompletedProcess[str]:
    """Run pytest there, in a process of its own."""
    known = (FOLDER, str(folder), os.environ.get("PYTHONPATH"))
    paths = os.pathsep.join(path for path in known if path)
    options = ("-q", "-p", "no:cacheprovider", "--rootdir=.", *arguments)
    return forked(START, folder, *options, PYTHONPATH=paths)


CHECKED = (None, "opaque", "differentiable", "through_ops")
"""Values of ``needs`` of the checks that the op of the other package must pass."""


def test_an_op_of_another_package_keeps_its_contract(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    chosen = "not slow and not cuda and not large"
    done = pytest_in(PACKAGE, "-m", chosen, f"--contract-results={file}")
    assert done.returncode == 0, done.stdout
    found = Run.read(file)
    cells = found.ops["softclip"]
    assert json.loads(file.read_text())["schema"] == "torchkiln.contract/1"
    assert set(found.ops) == {"softclip"}
    assert {cell["status"] for cell in cells.values()} == {"passed"}
    expected = {
        name
        for name, check in CHECKS.items()
        if check.device is None and not check.slow and check.needs in CHECKED
    }
    assert set(cells) == expected
    assert found.environment["torch"] == torch.__version__


BROKEN = """
import dataclasses, pytest, torch
from torchkiln.testing.specs.pointwise import ADD
def op(a, b):
    return torch.add(a, b) * 1.001
WRONG = dataclasses.replace(ADD, op=op, {replaced})
@pytest.mark.contract([WRONG], devices=("cpu",))
def test_contract(contract_case):
    contract_case.run()
"""


def broken_package(folder: Path, replaced: str) -> Path:
    (folder / "conftest.py").write_text('pytest_plugins = ["torchkiln.testing.plugin"]\n')
    (folder / "test_contract.py").write_text(BROKEN.format(replaced=replaced))
    return folder


def test_a_failure_says_where(tmp_path: Path) -> None:
    folder = broken_package(tmp_path, "name='mine'")
    file = tmp_path / "results.json"
    done = pytest_in(folder, "-k", "values and float32", f"--contract-results={file}")
    assert done.returncode == 1, done.stdout
    assert "test_contract[mine-values-cpu-float32]" in done.stdout
    cell = Run.read(file).ops["mine"]["values"]
    assert cell["status"] == "failed"
    for word in ("mine: values: sample 'typical' (torch.float32", "the worst is", "allowed"):
        assert word in done.stdout
        assert word in cell["reason"]


def test_a_wrong_spec_ends_the_collection(tmp_path: Path) -> None:
    folder = broken_package(tmp_path, "name='mine', differentiable=(0, 7), helpers=('nothing',)")
    done = pytest_in(folder)
    assert done.returncode == 2, done.stdout
    assert "mine: differentiable: got position 7" in done.stdout
    assert "mine: helpers: got 'nothing'" in done.stdout
    assert "passed" not in done.stdout


def test_run_contract_reports_every_case() -> None:
    seen: list[testing.Outcome] = []
    chosen = {"values", "compile_policy", "vmap", "calls_from_several_threads"}
    applying = {name for name, check in CHECKS.items() if check.applies(ADD, CPU)}
    spec = dataclasses.replace(
        ADD,
        op=lambda a, b: torch.add(a, b) * 1.001,
        excluded=dict.fromkeys(applying - chosen, "not of interest here"),
    )
    found = testing.run_contract(spec, CPU, seen.append)
    assert list(found) == seen
    status = {(one.check, one.dtype): one.status for one in found}
    assert status["values", "float32"] == "failed"
    assert status["calls_from_several_threads", "float32"] == "passed"
    assert status["export", "float32"] == "excluded"
    reason = next(one.reason for one in found if one.status == "failed")
    for word in ("add: values", "elements are wrong", "on cpu"):
        assert word in reason


def test_the_contract_needs_specs(tmp_path: Path) -> None:
    folder = broken_package(tmp_path, "")
    (folder / "test_contract.py").write_text("def test_contract(contract_case):\n    pass\n")
    done = pytest_in(folder)
    assert done.returncode != 0
    assert "contract_case needs @pytest.mark.contract" in done.stdout + done.stderr


BENCHMARK = """
import warnings

def pytest_addoption(parser):
    parser.addoption("--benchmark-disable", action="store_true")

def pytest_configure(config):
    in_parallel = config.getoption("dist", "no") != "no" or hasattr(config, "workerinput")
    if in_parallel and not config.option.benchmark_disable:
        warnings.warn("Benchmarks are automatically disabled", stacklevel=1)
"""


def test_workers_start_beside_pytest_benchmark(tmp_path: Path) -> None:
    """pytest-benchmark's warning at start must not become an INTERNALERROR with -W error."""
    (tmp_path / "benchmark_stand_in.py").write_text(BENCHMARK)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["torchkiln.testing.plugin"]\n')
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    done = pytest_in(tmp_path, "-p", "benchmark_stand_in", "-n", "1", "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
