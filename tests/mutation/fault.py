"""The fields of a planted fault."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One change to a copy of the sources."""

    name: str
    device: str
    """Devices needed to detect it: cpu, cuda, or 2 x cuda."""
    file: str
    old: str
    new: str
    op: str
    checks: str
    """Tests of which at least one must fail, separated by `or`: checks of that op's contract, with
    `@dtype` for a single dtype, or functions of tests/ops: `test_norm_rows.py::test_long_rows`.
    """
    unit: str = ""
    """The source file to compile again, in the tree or generated in the build folder. Empty for
    Python, and if it is the changed file itself."""
    times: int = 1
    """Number of occurrences of the old text, all of which are replaced."""
