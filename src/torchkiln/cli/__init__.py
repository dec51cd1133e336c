"""The command ``torchkiln``: a table of commands, each imported only when it is called.

Parsers are in :mod:`torchkiln.cli.parsers` and :mod:`torchkiln.cli.bench_parser`. They need no
torch, so ``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from torchkiln import _loader
from torchkiln.cli import bench_parser, parsers
from torchkiln.cli.status import Status


class Command(NamedTuple):
    """A command: its module, description and example."""

    words: str
    example: str
    module: str
    """The module whose ``run(options)``, or ``main(words)`` without a parser, is called."""
    parser: Callable[[Sequence[str]], Namespace] | None = None


COMMANDS = {
    "bench": Command(
        "time ops beside their peers and their ceiling",
        "torchkiln bench rms_norm --dtype bf16",
        "torchkiln.bench.__main__",
        bench_parser.bench,
    ),
    "check-hub": Command(
        "what Hugging Face's hub requires of a kernel",
        "torchkiln check-hub my_kernel",
        "torchkiln.hub_check.__main__",
    ),
    "demo": Command(
        "errors, times and a training run on this machine",
        "torchkiln demo --quick",
        "torchkiln.demo.__main__",
        parsers.demo,
    ),
    "doctor": Command(
        "what works here, what does not, and what to type",
        "torchkiln doctor",
        "torchkiln.doctor.__main__",
    ),
    "explain": Command(
        "the kernels, copies and casts of one call, with reasons",
        "torchkiln explain softmax --shape 64x256",
        "torchkiln.cli.explain",
        parsers.explain,
    ),
    "judge": Command(
        "is a kernel right, fast and honest",
        "torchkiln judge candidate.py reference.py",
        "torchkiln.judge.__main__",
        parsers.judge,
    ),
    "new": Command(
        "a package with an op of your own, ready to build",
        "torchkiln new my_op",
        "torchkiln.new.__main__",
    ),
    "profile": Command(
        "the GPU's hardware counters for one call",
        "torchkiln profile rms_norm --shape 4096x4096 --dtype bf16",
        "torchkiln.profile.__main__",
        parsers.profile,
    ),
    "replace": Command(
        "which modules of a model get a forward of torchkiln",
        "torchkiln replace torchvision.models:resnet50",
        "torchkiln.patch.__main__",
        parsers.replace,
    ),
    "watch": Command(
        "compile and test a file of kernels at every save",
        "torchkiln watch my.cu --test test_my.py",
        "torchkiln.cli.watch",
        parsers.watch,
    ),
}
WITHOUT_TORCH = ("check-hub", "doctor", "new")


def usage() -> str:
    """All commands, with an example each."""
    lines = [
        line
        for name, command in COMMANDS.items()
        for line in (f"  {name:<11}{command.words}", f"{'':13}{command.example}")
    ]
    return "\n".join(
        ["usage: torchkiln COMMAND ...", "", *lines, "", "torchkiln COMMAND --help lists options."]
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, one of :class:`torchkiln.cli.status.Status`."""
    try:
        try:
            return run(list(sys.argv[1:] if given is None else given))
        finally:
            print(end="", flush=True)  # a closed pipe raises here, not at exit
    except KeyboardInterrupt:
        return Status.INTERRUPTED
    except BrokenPipeError:
        # Python flushes both streams again at exit, and would print another error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return Status.CLOSED_PIPE


def run(words: list[str]) -> int:
    """Run the command that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return Status.DONE if words else Status.WRONG_CALL
    name, *rest = words
    if name == "--version":
        return print_version()
    command = COMMANDS.get(name)
    if command is None:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = ", ".join(COMMANDS)
        print(f"torchkiln: COMMAND: got {name!r}, expected one of {known}{hint}", file=sys.stderr)
        return Status.WRONG_CALL
    options = command.parser(rest) if command.parser else None
    if name not in WITHOUT_TORCH:
        try:
            load_package()
        except (ImportError, OSError) as error:
            return print_import_error(error)
    module = import_module(command.module)
    status: int = module.main(rest) if options is None else module.run(options)
    return status


def print_version() -> int:
    """Print the version in the build record."""
    try:
        folder = _loader.find_package(sys.modules["torchkiln"].__path__)
    except ImportError as error:
        return print_import_error(error)
    print(_loader.read_record(folder)["version"])
    return Status.DONE


def print_import_error(error: Exception) -> int:
    """Print why the package cannot be used, and what to type."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if "doctor" not in str(error):
        doctor = f"{_loader.PYTHON} -m torchkiln_command doctor"
        print(f"For the reason, and what to do, type\n  {doctor}", file=sys.stderr)
    return Status.CANNOT_RUN


def load_package() -> None:
    """Execute torchkiln/__init__.py, if torchkiln_command has created the package without it."""
    package = sys.modules["torchkiln"]
    if "build_info" not in vars(package):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        # Torch's module aborts the process if Ctrl-C raises an exception in its initialisation.
        before = signal.signal(signal.SIGINT, lambda *_: os._exit(Status.INTERRUPTED))
        try:
            package.__spec__.loader.exec_module(package)
        finally:
            signal.signal(signal.SIGINT, before)
