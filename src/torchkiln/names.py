"""Ops by their names."""

from __future__ import annotations

from difflib import get_close_matches

from torchkiln.testing import SPECS, OpSpec


def find(where: str, argument: str, name: str) -> OpSpec:
    """The spec of an op; the error of an unknown one offers close names."""
    known = {spec.name: spec for spec in SPECS}
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"{where}: {argument}: got {name!r}, expected one of {', '.join(known)}{hint}")
