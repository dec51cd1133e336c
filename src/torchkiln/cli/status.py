"""Exit statuses of all commands."""

from __future__ import annotations

import sys
from enum import IntEnum


class Status(IntEnum):
    """The exit statuses, with one meaning in all commands."""

    DONE = 0
    FOUND = 1
    """The command ran and found something: a problem, a wrong result, a slower call."""
    WRONG_CALL = 2
    """Arguments that the command does not take, or a file that it cannot read or write."""
    CANNOT_RUN = 3
    """This machine lacks something: a torch that fits, a GPU, memory, a compiler."""
    INTERRUPTED = 130
    """Ctrl-C: 128 + SIGINT."""
    CLOSED_PIPE = 141
    """The reader of a pipe is gone, as in ``| head -1``: 128 + SIGPIPE."""


class CannotRun(ValueError):  # noqa: N818 - a state of the machine
    """This machine lacks something that the command needs."""


def refused(error: Exception) -> Status:
    """Print why a command does not run; returns the exit status."""
    print(error, file=sys.stderr)
    return Status.CANNOT_RUN if isinstance(error, CannotRun) else Status.WRONG_CALL
