"""Findings about libraries of which a process must have one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.finding import Finding, note, ok, problem

# Wheels are given copies with a hash in the name: libgomp-a34b3233.so.1.
OPENMP = re.compile(r"^lib(gomp|iomp5|omp)(-[0-9a-f]+)?\.so")
CUDA_RUNTIME = re.compile(r"^libcudart(-[0-9a-f]+)?\.so")


def find_runtimes(environment: Environment, facts: Facts) -> list[Finding]:
    """How many of OpenMP and of CUDA's runtime a process loads, and how many could be loaded."""
    found = []
    for topic, name, why in (
        ("OpenMP", OPENMP, "each has its threads, and they take the cores from each other"),
        ("CUDA runtime", CUDA_RUNTIME, "what fails in one is no error to the other"),
    ):
        loaded = _matching(name, map(Path, facts.trial.libraries))
        present = _matching(name, _in_environment(environment))
        if len(loaded) > 1:
            words = f"{_list(loaded)} are loaded at once: {why}"
            found.append(problem(topic, words, *_remedies(environment, loaded)))
        elif len(present) > 1:
            words = f"{_list(present)}: do not load them in one process, {why}"
            found.append(note(topic, words))
        elif loaded or present:
            found.append(ok(topic, _list(loaded or present)))
    return found


def _list(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


def _matching(name: re.Pattern[str], paths: Iterable[Path]) -> list[Path]:
    """One path a file, in the order of their names."""
    files = {path.resolve(): None for path in paths if name.match(path.name)}
    return sorted(files)


def _in_environment(environment: Environment) -> list[Path]:
    patterns = ("*.libs/lib*omp*", "*/lib/lib*omp*", "*/.libs/lib*omp*", "*/*/lib/libcudart*")
    found = [path for pattern in patterns for path in environment.in_site(pattern)]
    found += environment.in_site("*/lib/libcudart*")
    # Conda's packages share the folder of libraries of the environment.
    prefix = Path(environment.python).parent.parent / "lib"
    return found + sorted(prefix.glob("lib*omp*.so*")) + sorted(prefix.glob("libcudart.so*"))


def _remedies(environment: Environment, loaded: list[Path]) -> list[str]:
    """The variables by which the one beside torch's was brought in."""
    outside = [path for path in loaded if not any(path.is_relative_to(s) for s in environment.site)]
    found = []
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        folders = re.split("[: ]", environment.variables.get(variable, ""))
        named = {str(Path(folder).resolve()) for folder in folders if folder}
        if any({str(path), str(path.parent)} & named for path in outside or loaded):
            found.append(f"unset {variable}")
    return found or [f"{environment.python} -m pip list     (and uninstall what brings the second)"]
