"""Tensors in memory that judge and candidate share, and the messages between the two processes.

Messages to a candidate are pickled. Messages from a candidate are JSON: unpickling runs code.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POISON = 0xFF
"""The value of each byte that a candidate has not written: a NaN that no arithmetic produces."""

ALIGNMENT = 256
LENGTH = struct.Struct("<Q")
LONGEST = 1 << 24
"""Maximum number of bytes per message from a candidate."""


@dataclass(frozen=True)
class Block:
    """The position and layout of a tensor in an arena, which is a tensor of bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        return reach(self.shape, self.strides) * self.dtype.itemsize

    def view(self, arena: Tensor) -> Tensor:
        """The tensor that the block describes in an arena."""
        part = arena[self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).as_strided(self.shape, self.strides)

    def fill(self, arena: Tensor, values: Tensor) -> None:
        """Write values; a stride of 0 takes the value of its first element."""
        first = tuple(slice(1) if s == 0 else slice(None) for s in self.strides)
        self.view(arena)[first].copy_(values.detach()[first])


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The nested arguments with a function applied to each value of one type."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(one, kind, function) for one in value)
    if isinstance(value, dict):
        return {name: mapped(one, kind, function) for name, one in value.items()}
    return value


def flat(value: Any) -> Iterator[Any]:
    """The values of nested sequences."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from flat(one)
    else:
        yield value


def send_bytes(channel: socket.socket, data: bytes) -> None:
    """Send one message."""
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive_bytes(channel: socket.socket, longest: int | None = None) -> bytes:
    """Receive one message; EOFError if the other end is gone."""
    (count,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
    if longest is not None and count > longest:
        raise ValueError(f"got a message of {count} bytes, expected at most {longest}")
    return _exactly(channel, count)


def _exactly(channel: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = channel.recv(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError("the other process has ended")
        found += part
    return bytes(found)


def to_candidate(channel: socket.socket, message: object) -> None:
    """Send a message that the judge has written."""
    send_bytes(channel, pickle.dumps(message))


def from_candidate(channel: socket.socket) -> dict[str, Any]:
    """Receive a message that the candidate may have written."""
    found = json.loads(receive_bytes(channel, LONGEST))
    if not isinstance(found, dict):
        raise ValueError(f"got {type(found).__name__}, expected a dictionary")
    return found
