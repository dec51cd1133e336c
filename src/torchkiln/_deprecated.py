"""Former names, which work for one minor version with a warning; docs/stability.md has the rule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.compiler import is_compiling


@dataclass(frozen=True)
class Renamed:
    """A name that has changed."""

    now: str
    """The present name, in the same module."""
    since: str
    """The minor version with both names, such as 0.2."""
    gone: str
    """The first minor version without the former one."""


Renamed.__module__ = "torchkiln.extend"  # the module from which packages import it


def warn(place: str, old: str, renamed: Renamed) -> None:
    """Warns of a former name, at the line that uses it; not in a graph of torch.compile."""
    if is_compiling():  # a warning would break the graph
        return
    warnings.warn(
        f"{place}: {old} is {renamed.now} since version {renamed.since}; {old} is gone in version "
        f"{renamed.gone}",
        FutureWarning,
        stacklevel=4,
    )


def argument(op: str, options: dict[str, Any], old: str, renamed: Renamed) -> None:
    """Moves a keyword argument to its present name; TypeError if both are given."""
    if old not in options:
        return
    if renamed.now in options:
        refuse(op, old, renamed)
    warn(f"torchkiln.{op}", old, renamed)
    options[renamed.now] = options.pop(old)


def value(op: str, old: str, renamed: Renamed, given: object, *, is_alone: bool) -> object:
    """The value of an argument given by its former name; TypeError if both names are given."""
    if not is_alone:
        refuse(op, old, renamed)
    warn(f"torchkiln.{op}", old, renamed)
    return given


def refuse(op: str, old: str, renamed: Renamed) -> NoReturn:
    """Refuses a value by both names."""
    raise TypeError(
        f"torchkiln.{op}: {old}: got a value beside {renamed.now}, which is its present name; "
        f"leave {old} out"
    )


def attribute(module: Any, name: str, former: Mapping[str, Renamed]) -> Any:
    """The value of a former name of a module, for its ``__getattr__``."""
    if name not in former:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    warn(module.__name__, name, former[name])
    return getattr(module, former[name].now)
