"""Ops by their names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torchkiln.testing import SPECS, OpSpec


def find(where: str, argument: str, name: str, specs: Sequence[OpSpec] = SPECS) -> OpSpec:
    """The spec of an op; the error of an unknown one offers close names."""
    known = {spec.name: spec for spec in specs}
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"{where}: {argument}: got {name!r}, expected one of {', '.join(known)}{hint}")


def _imported(module: str) -> ModuleType:
    """A module by its name, which may lie in the current folder, or by its file."""
    file = Path(module)
    folder, name = (file.parent, file.stem) if file.suffix == ".py" else (Path(), module)
    sys.path.insert(0, str(folder.resolve()))
    try:
        return import_module(name)
    finally:
        sys.path.pop(0)


def specs_of(where: str, argument: str, module: str) -> tuple[OpSpec, ...]:
    """The specs of another package: SPECS of one of its modules, by its name or its file."""
    try:
        found = tuple(_imported(module).SPECS)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{where}: {argument}: got {module!r} ({type(error).__name__}: {error}), expected a "
            "module or its .py file with SPECS, a tuple of torchkiln.testing.OpSpec"
        ) from error
    if not found or not all(isinstance(spec, OpSpec) for spec in found):
        raise ValueError(
            f"{where}: {argument}: got {module!r} with SPECS = {found!r}, expected a tuple of "
            "torchkiln.testing.OpSpec"
        )
    return found
