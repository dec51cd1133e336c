"""Accesses to files while a candidate runs, as the kernel of the system reports them."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

IN_MODIFY, IN_CLOSE_WRITE, IN_OPEN = 0x2, 0x8, 0x20
IN_DELETE_SELF, IN_MOVE_SELF = 0x400, 0x800
WRITES = IN_MODIFY | IN_CLOSE_WRITE | IN_DELETE_SELF | IN_MOVE_SELF
EVENT = struct.Struct("iIII")


class Watched:
    """Reports which files were opened, and which were changed."""

    def __init__(self, secret: Iterable[Path], fixed: Iterable[Path]) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.files: dict[int, Path] = {}
        for path in fixed:
            self._add(path, WRITES)
        for path in secret:
            self._add(path, WRITES | IN_OPEN)

    def _add(self, path: Path, mask: int) -> None:
        number = self.libc.inotify_add_watch(self.fd, os.fsencode(path), mask)
        if number < 0:
            reason = os.strerror(ctypes.get_errno())
            raise ValueError(f"torchkiln.judge: inotify: got {reason}, expected to watch {path}")
        self.files[number] = path

    def seen(self) -> tuple[list[Path], list[Path]]:
        """Files opened and files changed since the last call."""
        opened, changed, data = set(), set(), b""
        with suppress(BlockingIOError):
            while part := os.read(self.fd, 1 << 16):
                data += part
        at = 0
        while at < len(data):
            number, mask, _, length = EVENT.unpack_from(data, at)
            at += EVENT.size + length
            path = self.files.get(number)
            if path is not None and mask & IN_OPEN:
                opened.add(path)
            if path is not None and mask & WRITES:
                changed.add(path)
        return sorted(opened), sorted(changed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
