"""The command ``torchkiln``: one word a tool, which alone is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "bench": ("torchkiln.bench.__main__", "time ops beside their peers and the device's limits"),
    "demo": ("torchkiln.demo.__main__", "errors, times and a training run on this machine"),
    "doctor": ("torchkiln.doctor.__main__", "what works here, what does not, and what to type"),
    "explain": ("torchkiln.cli.explain", "which kernels a call runs, and what else, and why"),
    "new": ("torchkiln.new.__main__", "a package with an operator of your own, ready to build"),
    "profile": ("torchkiln.profile.__main__", "what the GPU's counters say of one kernel"),
    "watch": ("torchkiln.cli.watch", "compile and test a file of kernels at every save"),
}
"""Modules with a ``main(arguments)`` that returns the exit status."""


def usage() -> str:
    """What there is to type."""
    lines = [f"  {name:<8} {words}" for name, (_, words) in COMMANDS.items()]
    return "\n".join(["usage: torchkiln COMMAND ...", "", *lines, "", "COMMAND --help says more."])


def main(given: Sequence[str] | None = None) -> int:
    """Run one command; 2 where there is none of that name."""
    words = list(sys.argv[1:] if given is None else given)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        import torchkiln  # noqa: PLC0415

        print(torchkiln.__version__)
        return 0
    if words[0] not in COMMANDS:
        close = get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(
            f"torchkiln: COMMAND: got {words[0]!r}, expected one of {', '.join(COMMANDS)}{hint}",
            file=sys.stderr,
        )
        return 2
    status: int = import_module(COMMANDS[words[0]][0]).main(words[1:])
    return status
