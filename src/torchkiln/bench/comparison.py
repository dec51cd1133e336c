"""Times of any two functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchkiln._report import Report
from torchkiln.bench.clock import Times, device_clock, in_turns
from torchkiln.bench.report import Table, duration, plain, rich_table, size
from torchkiln.bench.roofline import Work, ceilings, written
from torchkiln.testing.compare import outputs
from torchkiln.testing.environment import Environment, environment

SECONDS = 1.0


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """The times of two functions, and their ceiling."""

    schema: ClassVar[str] = "torchkiln.comparison/1"

    environment: Environment
    names: tuple[str, str]
    times: tuple[Times, Times]
    bytes: int
    """Bytes of arguments and results: the minimum that must be moved."""
    ceiling: float
    """Seconds of a copy, or of a pure read, of these bytes."""

    @property
    def speedup(self) -> float:
        """Time of the second function divided by the time of the first."""
        return self.times[1].seconds / self.times[0].seconds

    @property
    def is_certain(self) -> bool:
        """Whether the interquartile ranges of the measurements do not overlap."""
        first, second = self.times
        return first.high < second.low or second.high < first.low

    def as_dict(self) -> dict[str, Any]:
        """All fields and the speed-up, in JSON types."""
        derived = {"speedup": self.speedup, "is_certain": self.is_certain}
        return {"schema": self.schema, **asdict(self), **derived}

    def table(self) -> Table:
        """A table with a line for each function."""
        lines = [
            (
                name,
                duration(times.seconds),
                f"{times.spread:.1%}",
                f"{self.ceiling / times.seconds:.1%}",
                f"{self.bytes / times.seconds / 1e9:.4g}",
            )
            for name, times in zip(self.names, self.times, strict=True)
        ]
        certain = "" if self.is_certain else ", which may be noise"
        note = f"{self.names[0]} is {self.speedup:.2f} x as fast as {self.names[1]}{certain}"
        ceiling = duration(self.ceiling)
        return Table(
            f"Median time of one call, {size(self.bytes)} in and out, ceiling {ceiling}",
            ("function", "time", "spread", "of ceiling", "GB/s"),
            (False, True, True, True, True),
            tuple(lines),
            (note, str(self.environment)),
        )

    def __str__(self) -> str:
        """The table in plain text."""
        return plain(self.table())

    __repr__ = __str__

    def __rich__(self) -> Any:
        """The table for rich's console."""
        from rich.console import Group  # noqa: PLC0415

        table = self.table()
        return Group(table.title, rich_table(table), *table.notes)


def compare(
    function: Callable[..., Any], baseline: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Comparison:
    """Time ``function(*args, **kwargs)`` and ``baseline(*args, **kwargs)`` in turns, for a second.

    On a GPU the device time is measured, with a cold L2 cache; on a CPU the duration of the call.
    Bind different arguments with :func:`functools.partial`.
    """
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if not given:
        raise ValueError(
            "torchkiln.bench.compare: args: got no tensor, expected at least one, on the device to "
            "be timed"
        )
    device = next((t.device for t in given if t.device.type != "cpu"), torch.device("cpu"))
    with torch.no_grad():
        results = outputs(function(*args, **kwargs))
        made = written(tuple(results), given)
        moved = sum(t.numel() * t.element_size() for t in [*given, *results])
        calls = {
            "function": lambda: function(*args, **kwargs),
            "baseline": lambda: baseline(*args, **kwargs),
        }
        references = ceilings(Work(moved, 0, torch.float32), made, device)
        found = in_turns(device_clock(device), calls | references, SECONDS)
    times = {name: Times.of(values) for name, values in found.items()}
    ceiling = min(times[name].seconds for name in references)
    names = [getattr(f, "__name__", repr(f)) for f in (function, baseline)]
    if names[0] == names[1]:
        names = [f"{f.__module__}.{n}" for f, n in zip((function, baseline), names, strict=True)]
    if names[0] == names[1]:
        names[1] += " (baseline)"
    return Comparison(
        environment(device),
        (names[0], names[1]),
        (times["function"], times["baseline"]),
        moved,
        ceiling,
    )
