"""The pytest plug-in: makes named tests from a list of specs.

In ``conftest.py`` at the root of the tests::

    pytest_plugins = ["torchkiln.testing.plugin"]

and in a test file::

    @pytest.mark.contract([MY_SPEC])
    def test_contract(contract_case):
        contract_case.run()

``--contract-results=FILE`` writes the result of each op and check.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchkiln.testing.case import Case, cases
from torchkiln.testing.check import UnavailableError
from torchkiln.testing.environment import environment
from torchkiln.testing.result import Outcome, Status, write

if TYPE_CHECKING:
    from collections.abc import Generator

MARKERS = {
    "contract(specs, devices=('cpu', 'cuda:0'))": "the checks of these specs on these devices",
    "cuda": "needs a GPU and a build with CUDA kernels",
    "slow": "takes more than ten seconds",
    "large": "needs tens of gigabytes",
}
PROPERTY = "torchkiln_contract"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--contract-results``."""
    group = parser.getgroup("torchkiln")
    group.addoption("--contract-results", metavar="FILE", help="write op x check as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Add markers, and the collector of results to the process that reports."""
    # Under -n, pytest-benchmark warns that it disables itself, which is an INTERNALERROR if
    # warnings are errors. If it is disabled before, it does not warn.
    in_parallel = config.getoption("dist", "no") != "no" or hasattr(config, "workerinput")
    if in_parallel and hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    path = config.getoption("--contract-results")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(path)), "torchkiln-contract-results")


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Markers for the needs of a case: a GPU, much memory, or much time."""
    wanted = {
        "cuda": case.device.type == "cuda",
        "slow": case.check.slow,
        "large": case.check.large,
    }
    return [getattr(pytest.mark, name) for name, needed in wanted.items() if needed]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per case; specs with wrong fields abort the collection."""
    if "contract_case" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("contract")
    if marker is None or len(marker.args) != 1:
        where = metafunc.definition.nodeid
        raise pytest.UsageError(f"{where}: contract_case needs @pytest.mark.contract([SPEC, ...])")
    devices = marker.kwargs.get("devices", ("cpu", "cuda:0"))
    parameters = [
        pytest.param(case, id=str(case), marks=marks(case))
        for device in devices
        for case in cases(marker.args[0], torch.device(device))
    ]
    metafunc.parametrize("contract_case", parameters)


def case_of(item: pytest.Item) -> Case | None:
    """The case of a test; None for other tests."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case = parameters.get("contract_case")
    return case if isinstance(case, Case) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip cases that cannot run on this machine."""
    try:
        return (yield)
    except UnavailableError as reason:
        if case_of(item) is None:
            raise
        pytest.skip(str(reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the outcome to the report, which may go to another process."""
    report = yield
    case = case_of(item)
    if case is not None and (report.when == "call" or not report.passed):
        status: Status = "passed" if report.passed else "failed"
        reason = ""
        if report.skipped:
            status = "excluded" if case.check.name in case.spec.excluded else "unavailable"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            reason = reason.removeprefix("Skipped: ")
        elif report.failed and call.excinfo is not None:
            reason = call.excinfo.exconly().split("\n")[0]
        made = Outcome.of(case, status, reason, call.duration)
        report.user_properties.append((PROPERTY, made.as_dict()))
    return report


class Results:
    """Keeps the outcomes, and writes them at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Outcome] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect outcomes; pytest calls this for the tests of all processes."""
        found: list[tuple[str, Any]] = list(report.user_properties)
        self.found += [Outcome(**value) for name, value in found if name == PROPERTY]

    def pytest_sessionfinish(self) -> None:
        """Write the results to their file."""
        gpu = any(one.device == "cuda" for one in self.found if one.status == "passed")
        here = environment(torch.device("cuda:0" if gpu else "cpu"))
        kept = [one for one in self.found if (one.device == "cuda") == gpu]
        write(kept, dataclasses.asdict(here), self.path)
