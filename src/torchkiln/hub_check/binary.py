"""A compiled module: Python's limited API, symbols of old systems, known libraries."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torchkiln.hub_check.problem import Problem

MOST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""The newest versions of symbols in manylinux_2_28."""

LIBRARIES = re.compile(
    r"lib(?:torch|c10|aoti|cudart|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|nvrtc|nvToolsExt"
    r"|cuda|amdhip64|sycl|c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)\w*\.so[.\d]*|ld-linux[\w-]*\.so[.\d]*"
)
PRIVATE = {"_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_Dealloc", "_Py_RefTotal"}
PRIVATE |= {"_Py_NotImplementedStruct", "_Py_EllipsisObject", "_Py_NegativeRefcount"}
"""Symbols of the limited API that begin with an underscore."""


def check_module(path: Path) -> Iterator[Problem]:
    """The problems of a shared library, as readelf of binutils shows it."""
    if not path.name.endswith(".abi3.so"):
        yield Problem(path, "got this name, expected NAME.abi3.so: Python's limited API")
    if shutil.which("readelf") is None:
        yield Problem(path, "got no readelf, expected it for the symbols: install binutils")
        return
    given = ["readelf", "--wide", "--dynamic", "--version-info", "--dyn-syms", str(path)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "Dynamic section" not in done.stdout:
        yield Problem(path, "got no shared library, expected one of ELF")
        return
    yield from check_versions(path, done.stdout)
    for library in re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", done.stdout):
        if not LIBRARIES.fullmatch(library):
            yield Problem(path, f"got {library}, expected libraries of torch, CUDA and the system")
    symbols = re.findall(r" (?:UND) (\w+)", done.stdout)
    for symbol in sorted({s for s in symbols if s.startswith("_Py")} - PRIVATE):
        yield Problem(path, f"got {symbol}, expected Python's limited API of 3.9")
    entry = f"PyInit_{path.name.partition('.')[0]}"
    if not re.search(rf" \d+ {entry}\b", done.stdout):
        yield Problem(path, f"got no {entry}, expected it: Python imports the module")


def check_versions(path: Path, text: str) -> Iterator[Problem]:
    """The problems of symbols that need newer systems than manylinux_2_28."""
    newest: dict[str, tuple[int, ...]] = {}
    for kind, number in re.findall(r"\b(GLIBCXX|GLIBC|CXXABI|GCC)_(\d+(?:\.\d+)*)", text):
        version = tuple(map(int, number.split(".")))
        newest[kind] = max(version, newest.get(kind, ()))
    for kind, version in newest.items():
        if version > MOST[kind]:
            found, most = (".".join(map(str, v)) for v in (version, MOST[kind]))
            words = f"got {kind}_{found}, expected at most {most}, of manylinux_2_28"
            yield Problem(path, f"{words}: build it with kernel-builder")
