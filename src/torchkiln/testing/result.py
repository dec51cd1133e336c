"""Results of checks, which can be printed, saved in a file and shown in tables."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
"""The status of a check in several dtypes is the first of these."""


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    op: str
    check: str
    device: str
    dtype: str
    status: Status
    reason: str
    """The reason of a failure, of an exclusion, or of what this machine is missing."""
    seconds: float

    @classmethod
    def of(cls, case: Case, status: Status, reason: str, seconds: float) -> Outcome:
        """The outcome of a case, with its names."""
        dtype = str(case.dtype).removeprefix("torch.")
        names = (case.spec.name, case.check.name, case.device.type, dtype)
        return cls(*names, status, reason, round(seconds, 3))

    def as_dict(self) -> dict[str, Any]:
        """The fields in types that JSON has."""
        return dataclasses.asdict(self)


def outcome(case: Case) -> Outcome:
    """Run the case."""
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
    """Write a file with a cell for each op and check, and the machine and date of the run."""
    ops: dict[str, dict[str, Any]] = {}
    for one in outcomes:
        cell = ops.setdefault(one.op, {}).setdefault(
            one.check, {"status": one.status, "reason": one.reason, "dtypes": [], "seconds": 0.0}
        )
        cell["dtypes"].append(one.dtype)
        cell["seconds"] = round(cell["seconds"] + one.seconds, 3)
        if ORDER.index(one.status) < ORDER.index(cell["status"]):
            cell |= {"status": one.status, "reason": one.reason}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "environment": environment, "ops": ops}
    path.write_text(json.dumps(content, indent=1) + "\n")
