"""Compile a file of kernels and run its test at every save, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from torchkiln.cli.watch_run import attempt, for_pytest
from torchkiln.jit.compile import nvrtc, toolkit
from torchkiln.jit.compile.reload import Files

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 1.0
"""How long a process that is told to end may take, before it is killed."""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="torchkiln watch", description=__doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="FILE", help="CUDA kernels, as for torchkiln.jit.load")
    add("--test", type=Path, metavar="FILE", help="Python: tests for pytest, or a script")
    words = "a folder with headers; more than once for more"
    add("--include", type=Path, action="append", default=[], metavar="FOLDER", help=words)
    return parser.parse_args(given)


class Attempt:
    """An attempt in a process of its own.

    It is forked: torch is imported already, CUDA is started in it alone, and a kernel that hangs
    or destroys its context ends with it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid: int | None = os.fork()
        if self._pid:
            return
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without words
            status = attempt(options.source, options.test, options.include)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def running(self) -> bool:
        """Whether it has not ended; tells once if it was killed by other hands."""
        if self._pid is None:
            return False
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0:
            return True
        self._pid = None
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            print(f"  FAILED: the process of the test ended by {name}", flush=True)
        return False

    def stop(self) -> None:
        """Ends it, whatever it does."""
        if self._pid is None:
            return
        os.kill(self._pid, signal.SIGTERM)
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                break
            time.sleep(0.01)
        else:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = None


def saved(watched: Sequence[Files]) -> bool:
    """Whether something is to be tried again."""
    try:
        # All are looked at, so that files that are saved together are one save.
        changes = [files.changed() for files in watched]
    except FileNotFoundError:
        return False  # its next save is heard
    return any(changes)


def watch(options: argparse.Namespace) -> None:
    """Tries, waits for a save, and tries again; Ctrl-C is the end."""
    watched = [Files(options.source.resolve(), options.include)]
    if options.test:
        watched.append(Files(options.test.resolve()))
    running = None
    try:
        while True:
            running = Attempt(options)
            told = False
            while not saved(watched):
                if not told and not running.running():
                    print("waiting for the next save; Ctrl-C ends", flush=True)
                    told = True
                time.sleep(POLL_SECONDS)
            running.stop()
    finally:
        if running is not None:
            running.stop()


def main(given: Sequence[str] | None = None) -> int:
    """Watch until Ctrl-C."""
    options = arguments(given)
    for name, file in (("FILE", options.source), ("--test", options.test)):
        if file is not None and not file.is_file():
            print(f"torchkiln.watch: {name}: got {file}, expected a file", file=sys.stderr)
            return 2
    try:
        nvrtc.load(toolkit.find().library)  # once, for all processes
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if options.test and for_pytest(options.test):
        # Once, for all processes. Hypothesis, where it is installed, imports itself at the end of
        # every run of pytest, which takes longer than the test.
        for name in ("pytest", "hypothesis"):
            if find_spec(name):
                import_module(name)
    try:
        watch(options)
    except KeyboardInterrupt:
        print()
    return 0
