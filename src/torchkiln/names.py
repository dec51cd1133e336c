"""Ops by their names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from torchkiln.testing import SPECS, OpSpec


def find(where: str, argument: str, name: str, specs: Sequence[OpSpec] = SPECS) -> OpSpec:
    """The spec of an op; the error of an unknown one offers close names."""
    known = {spec.name: spec for spec in specs}
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"{where}: {argument}: got {name!r}, expected one of {', '.join(known)}{hint}")


def specs_of(where: str, argument: str, module: str) -> tuple[OpSpec, ...]:
    """The specs of another package: SPECS of one of its modules."""
    try:
        found = tuple(import_module(module).SPECS)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{where}: {argument}: got {module!r} ({type(error).__name__}: {error}), expected a "
            "module with SPECS, a tuple of torchkiln.testing.OpSpec"
        ) from error
    if not found or not all(isinstance(spec, OpSpec) for spec in found):
        raise ValueError(
            f"{where}: {argument}: got {module!r} with SPECS = {found!r}, expected a tuple of "
            "torchkiln.testing.OpSpec"
        )
    return found
