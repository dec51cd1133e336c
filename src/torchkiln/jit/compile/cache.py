"""Compiled code on disk, shared by all processes of a user.

A file holds one binary under a name made of all that it was made from. Files are written beside
their place and moved there, so that readers see a whole one or none; there are no locks, hence none
that a killed process could leave. Two processes that compile the same write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

FORMAT = "1"  # of the files
STALE_SECONDS = 3600  # an unfinished file that old has no writer any more
_warned: set[Path] = set()


@dataclass(frozen=True)
class Binary:
    """Machine code of one architecture."""

    code: bytes
    names: dict[str, str]
    """C++ names of kernels, and as they are in the code."""


def folder() -> Path:
    """TORCHKILN_CACHE, else a folder among the user's other caches."""
    if given := os.environ.get("TORCHKILN_CACHE"):
        return Path(given) / "jit"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchkiln" / "jit"


def key(*parts: object) -> str:
    """A name for what is made from ``parts``."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], default=str).encode()).hexdigest()


def _path(name: str) -> Path:
    return folder() / name[:2] / name[2:]


def read(name: str) -> Binary | None:
    """The binary of that name; None where there is none, or a damaged one."""
    try:
        data = _path(name).read_bytes()
    except OSError:
        return None
    digest, payload = data[:32], data[32:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    names, _, code = payload.partition(b"\n")
    return Binary(code, json.loads(names))


def write(name: str, binary: Binary) -> None:
    """Keeps a binary; a warning, once a folder, where that is not possible."""
    path = _path(name)
    payload = json.dumps(binary.names).encode() + b"\n" + binary.code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix="unfinished-", dir=path.parent)
        try:
            with open(handle, "wb") as file:  # noqa: PTH123  a handle has no path
                file.write(hashlib.sha256(payload).digest() + payload)
            Path(unfinished).replace(path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
    except OSError as error:
        if folder() not in _warned:
            _warned.add(folder())
            warnings.warn(
                f"torchkiln.jit: cache folder: {folder()} cannot be written ({error.strerror});"
                " kernels are compiled anew in every process. TORCHKILN_CACHE names another",
                stacklevel=2,
            )
        return
    _remove_unfinished(path.parent)


def _remove_unfinished(parent: Path) -> None:
    """What killed processes have left."""
    for path in parent.glob("unfinished-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
