"""The process that forks the processes of candidates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

ENVIRONMENT = {
    # Idle threads sleep, so that CPU time between calls is work of the candidate.
    "OMP_WAIT_POLICY": "PASSIVE",
    # No CUDA before a fork: a forked process could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Freed memory is used again, poisoned, rather than returned to the system and zeroed.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class CandidateError(Exception):
    """A candidate raised an error, ended, or did not answer; the message is the candidate's."""


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).splitlines()), "")


class Zygote:
    """A process with torch imported, which forks processes for candidates.

    It is started by exec, so it has no copy of anything in the judge's memory.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="torchkiln-judge-")
        self.control, theirs = socket.socketpair()
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        path = os.pathsep.join([str(Path(__file__).parents[2]), *_python_path()])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "torchkiln.judge.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **ENVIRONMENT, **threads, "PYTHONPATH": path},
            cwd=self.folder.name,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.is_ready = False

    def fork(self, fds: Sequence[int]) -> int:
        """The id of a new process with these file descriptors."""
        try:
            if not self.is_ready:
                _number(self.control)
                self.is_ready = True
            socket.send_fds(self.control, [b"f"], list(fds))
            return _number(self.control)
        except (EOFError, OSError) as error:
            raise CandidateError("the process that starts candidates has ended") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.folder.cleanup()


def _python_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _number(control: socket.socket) -> int:
    """The answer of a zygote, read without running code that a candidate may have sent."""
    data = control.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise EOFError
    return int.from_bytes(data, "little")
