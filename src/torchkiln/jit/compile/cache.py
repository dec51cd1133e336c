"""Compiled code on disk, shared by all processes of a user.

A file holds one binary; the file name is a hash of everything that the binary was compiled from. A
writer fills a temporary file and renames it, so readers find a complete file or none, and a killed
process leaves no lock. Processes that compile the same source write the same file.

Machine code runs with the rights of the user, so files and folders that other users can write are
not used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from torchkiln._cache_folder import cache_folder, danger, home_folder

FORMAT = "2"  # change it with the layout of the files
STALE_SECONDS = 3600  # older temporary files are removed: their writer is dead
DAY = 24 * 3600
UNUSED_SECONDS = 90 * DAY
"""The age from which a binary that no process has read in this time is removed."""
_warned: set[str] = set()
_swept: set[Path] = set()


@dataclass(frozen=True)
class Binary:
    """Machine code for one architecture."""

    code: bytes
    names: dict[str, str]
    """The mangled name for each C++ name of a kernel."""


def folder() -> Path:
    """The cache folder. Raises an OSError if the user has none."""
    return cache_folder(os.environ, home_folder())


def prepare(path: Path) -> None:
    """Makes a folder in the cache, and its parents. Raises an OSError if one is not private."""
    top = folder()
    for level in reversed((path, *path.parents)):
        if not level.exists():
            level.mkdir(mode=0o700, exist_ok=True)
        if level.is_relative_to(top) and (words := danger(level.stat())):
            raise PermissionError(errno.EPERM, words, str(level))


def key(*parts: object) -> str:
    """The name of a binary that is compiled from ``parts``."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], default=str).encode()).hexdigest()


def _path(name: str) -> Path:
    return folder() / name[:2] / name[2:]


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + payload).digest()


def read(name: str) -> Binary | None:
    """The binary of that name; None if it is missing, damaged, or writable for another user."""
    try:
        if danger(folder().stat()):
            return None
        handle = os.open(_path(name), os.O_RDONLY | os.O_NOFOLLOW)
        with open(handle, "rb") as file:  # noqa: PTH123  a descriptor, not a path
            facts = os.fstat(handle)
            if danger(facts):
                return None
            data = file.read()
            if time.time() - facts.st_mtime > DAY:  # clean-up keeps files in use, by their time
                with contextlib.suppress(OSError):
                    os.utime(handle)
    except OSError:
        return None
    digest, payload = data[:32], data[32:]
    if _digest(name, payload) != digest:
        return None
    names, _, code = payload.partition(b"\n")
    try:
        return Binary(code, dict(json.loads(names)))
    except (ValueError, TypeError):
        return None


def write(name: str, binary: Binary) -> None:
    """Stores a binary; warns once if that fails."""
    payload = json.dumps(binary.names).encode() + b"\n" + binary.code
    try:
        path = _path(name)
        prepare(path.parent)
        handle, unfinished = tempfile.mkstemp(prefix="unfinished-", dir=path.parent)
        try:
            with open(handle, "wb") as file:  # noqa: PTH123  a descriptor, not a path
                file.write(_digest(name, payload) + payload)
            Path(unfinished).replace(path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        _sweep(folder())
    except OSError as error:
        _warn(error)


def _warn(error: OSError) -> None:
    try:
        place = f"{folder()} cannot be used ({error.strerror})"
    except OSError:
        place = f"got none ({error.strerror})"
    if place not in _warned:
        _warned.add(place)
        warnings.warn(
            f"torchkiln.jit: cache folder: {place}; every process compiles anew."
            " Set TORCHKILN_CACHE to a folder that only you can write to",
            stacklevel=3,
        )


def _sweep(top: Path) -> None:
    """Removes unused binaries, and temporary files of killed processes; once in a process."""
    if top in _swept:
        return
    _swept.add(top)
    for path in top.glob("??/*"):
        limit = STALE_SECONDS if path.name.startswith("unfinished-") else UNUSED_SECONDS
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > limit:
                path.unlink()
