"""Results of checks, which can be printed, saved in a file and shown in tables."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torchkiln.cli.options import json_lines, write_whole
from torchkiln.testing.case import Case, cases
from torchkiln.testing.check import ExcludedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import torch

    from torchkiln.testing.spec import OpSpec

SCHEMA = "torchkiln.contract/1"
Status = Literal["passed", "failed", "excluded", "unavailable"]
ORDER: tuple[Status, ...] = ("failed", "passed", "excluded", "unavailable")
"""Order of precedence: a check in several dtypes has the first status that occurs."""


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    op: str
    check: str
    device: str
    dtype: str
    status: Status
    reason: str
    """The reason of a failure or an exclusion, or the part that this machine lacks."""
    seconds: float

    @classmethod
    def of(cls, case: Case, status: Status, reason: str, seconds: float) -> Outcome:
        """The outcome of a case, with its names."""
        dtype = str(case.dtype).removeprefix("torch.")
        names = (case.spec.name, case.check.name, case.device.type, dtype)
        return cls(*names, status, reason, round(seconds, 3))

    def as_dict(self) -> dict[str, Any]:
        """The fields in JSON types."""
        return dataclasses.asdict(self)


def outcome(case: Case) -> Outcome:
    """Run the case and return its outcome."""
    start = time.perf_counter()
    status: Status = "passed"
    reason = ""
    try:
        case.run()
    except ExcludedError as error:
        status, reason = "excluded", str(error)
    except UnavailableError as error:
        status, reason = "unavailable", str(error)
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        status, reason = "failed", f"{type(error).__name__}: {error} ({notes})"
    return Outcome.of(case, status, reason, time.perf_counter() - start)


def run_contract(
    spec: OpSpec, device: torch.device, report: Callable[[Outcome], object] | None = None
) -> tuple[Outcome, ...]:
    """Run every check of ``spec`` on ``device``; a check that fails raises nothing.

    Args:
        spec: The contract. SpecError is raised if it is incomplete or contradicts itself.
        device: The device of the op.
        report: Called with each outcome, as soon as its check has run.

    Returns:
        One outcome for each check and dtype.
    """
    found = []
    for case in cases([spec], device):
        found.append(outcome(case))
        if report is not None:
            report(found[-1])
    return tuple(found)


def write(outcomes: Iterable[Outcome], environment: dict[str, Any], path: Path) -> None:
    """Write a file with the machine and date of the run, and the results of its checks.

    A line lists all checks of an op with the same status, reason and dtypes.
    """
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        cells.setdefault((one.op, one.check), []).append(one)
    lines: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
    for (op, check), found in sorted(cells.items()):
        first = min(found, key=lambda one: ORDER.index(one.status))
        dtypes = tuple(sorted(one.dtype for one in found))
        lines.setdefault((op, first.status, first.reason, dtypes), []).append(check)
    names = ("op", "status", "reason", "dtypes")
    results = [dict(zip(names, key, strict=True)) | {"checks": lines[key]} for key in lines]
    content = {"schema": SCHEMA, "environment": environment, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json_lines(content))
