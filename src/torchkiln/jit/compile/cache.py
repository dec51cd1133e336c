"""Compiled code on disk, shared by all processes of a user.

A file holds one binary; its name is a hash of everything that the binary was compiled from. A
writer fills a temporary file and renames it, so readers see a whole file or none, and no lock can
outlive a killed process. Processes that compile the same source write the same file.
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

FORMAT = "1"  # changes when the layout of the files does
STALE_SECONDS = 3600  # the writer of an older temporary file is dead
_warned: set[Path] = set()


@dataclass(frozen=True)
class Binary:
    """Machine code for one architecture."""

    code: bytes
    names: dict[str, str]
    """The mangled name for each C++ name of a kernel."""


def folder() -> Path:
    """The cache folder: below TORCHKILN_CACHE, else below the user's cache folder."""
    if given := os.environ.get("TORCHKILN_CACHE"):
        return Path(given) / "jit"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchkiln" / "jit"


def key(*parts: object) -> str:
    """The name of a binary that is compiled from ``parts``."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], default=str).encode()).hexdigest()


def _path(name: str) -> Path:
    return folder() / name[:2] / name[2:]


def read(name: str) -> Binary | None:
    """The binary of that name; None if it is missing or damaged."""
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
    """Stores a binary; warns once per folder that cannot be written."""
    path = _path(name)
    payload = json.dumps(binary.names).encode() + b"\n" + binary.code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix="unfinished-", dir=path.parent)
        try:
            with open(handle, "wb") as file:  # noqa: PTH123  a descriptor, not a path
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
                " every process compiles anew. Set TORCHKILN_CACHE to a writable folder",
                stacklevel=2,
            )
        return
    _remove_unfinished(path.parent)


def _remove_unfinished(parent: Path) -> None:
    """Removes temporary files that killed processes left."""
    for path in parent.glob("unfinished-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
