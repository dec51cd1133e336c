"""``torchkiln watch``: compile a file of kernels and run its test at every save, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

from torchkiln.cli.status import CannotRun, Status, refused
from torchkiln.cli.watch_run import compile_and_test, has_tests
from torchkiln.jit.compile import nvrtc, toolkit
from torchkiln.jit.compile.reload import Files

POLL_SECONDS = 0.1
STOP_SECONDS = 1.0
"""Seconds from SIGTERM until a process is killed."""


class Run:
    """Compiles and tests once, in a forked process.

    Torch is imported before the fork, CUDA is initialised after it. So a kernel that hangs or
    destroys its context ends with the process.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid: int | None = os.fork()
        if self._pid:
            return
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
            status = compile_and_test(options.source, options.test, options.include)
        except BrokenPipeError:
            pass  # the reader of the output has ended, so the parent ends, too
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BrokenPipeError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def is_running(self) -> bool:
        """Whether the process is alive; prints once if a signal has killed it."""
        if self._pid is None:
            return False
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0:
            return True
        self._pid = None
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            print(f"  FAILED: the process of the test was killed by {name}", flush=True)
        return False

    def stop(self) -> None:
        """End the process."""
        if self._pid is None:
            return
        os.kill(self._pid, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while time.monotonic() < until:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                break
            time.sleep(0.01)
        else:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = None


def any_saved(watched: Sequence[Files]) -> bool:
    """Whether a file has changed since the last call."""
    try:
        # A list, so that files saved together count as one save.
        changes = [files.changed() for files in watched]
    except FileNotFoundError:
        return False  # an editor is replacing the file: the next poll sees the new one
    return any(changes)


def watch(options: argparse.Namespace) -> None:
    """Run, wait for a save, run again; ends with KeyboardInterrupt."""
    watched = [Files(options.source.resolve(), options.include)]
    if options.test:
        watched.append(Files(options.test.resolve()))
    current = None
    try:
        while True:
            current = Run(options)
            is_idle = False
            while not any_saved(watched):
                if not is_idle and not current.is_running():
                    print("waiting for the next save; Ctrl-C ends", flush=True)
                    is_idle = True
                time.sleep(POLL_SECONDS)
            current.stop()
    finally:
        if current is not None:
            current.stop()


def run(options: argparse.Namespace) -> int:
    """Watch until Ctrl-C, which is the normal end: exit status 0."""
    for name, file in (("FILE", options.source), ("--test", options.test)):
        if file is not None and not file.is_file():
            return refused(ValueError(f"torchkiln.watch: {name}: got {file}, expected a file"))
    try:
        nvrtc.load(toolkit.find().library)  # once, for all forks
    except RuntimeError as error:
        return refused(CannotRun(error))
    if options.test and has_tests(options.test):
        # Imported once, before forking. If hypothesis is installed, pytest imports it at the end of
        # each run, which takes longer than the test.
        for name in ("pytest", "hypothesis"):
            if find_spec(name):
                import_module(name)
    try:
        watch(options)
    except KeyboardInterrupt:
        print()
    return Status.DONE
