"""One planted fault."""

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
    """Tests of which one at least has to fail, `or` between them: checks of that op's contract,
    with `@dtype` where one will do, or functions of tests/ops: `test_norm_rows.py::test_long_rows`.
    """
    unit: str = ""
    """The source file that is compiled again, of the tree or made in the build folder; none for
    Python, the file itself where it is one."""
    times: int = 1
    """Number of occurrences of the old text, all of which are replaced."""
