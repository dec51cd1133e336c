"""The judge's side of a candidate's process: sends inputs, receives outputs, reads the clock."""

from __future__ import annotations

import math
import os
import pickle
import random
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from torchkiln.bench.clock import synchronize
from torchkiln.judge.blocks import (
    ALIGNMENT,
    POISON,
    Block,
    flat,
    from_candidate,
    mapped,
    to_candidate,
)
from torchkiln.judge.worker import arena
from torchkiln.judge.zygote import CandidateError, Zygote, first_line
from torchkiln.testing.compare import bits
from torchkiln.testing.data import contiguous_strides
from torchkiln.testing.sample import Sample

SLACK = 1 << 20
"""Bytes of an arena beyond the largest call, for random addresses."""


class ForgedError(CandidateError):
    """An answer was not sent by the judge's module in the process of the candidate."""


@dataclass(frozen=True)
class Reply:
    """Outputs of calls, copied into the judge's memory, and the seconds until they were there."""

    outputs: list[list[Tensor]]
    kinds: tuple[str, ...]
    """Types of outputs that are not plain tensors."""
    seconds: float
    changed: tuple[int, ...] = ()
    """The inputs whose bytes are not those sent, by number among the tensors of the calls."""


@dataclass(frozen=True)
class Call:
    """One call of a candidate with the arguments of a sample."""

    sample: Sample
    expected: Sequence[tuple[tuple[int, ...], torch.dtype]]
    """Shapes and dtypes of the outputs."""
    wanted: tuple[int, ...] = ()
    """Arguments whose gradients are the outputs."""
    weights: tuple[str, ...] = ()
    grads: tuple[Tensor, ...] = ()
    hold: bool = False
    late: bool = False
    """Whether inputs arrive on a GPU's stream after the call has begun."""


@dataclass
class Candidate:
    """A process that runs one candidate."""

    zygote: Zygote
    device: torch.device
    in_bytes: int
    out_bytes: int
    timeout: float = 120.0
    addresses: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        sizes = (self.in_bytes + SLACK, self.out_bytes + SLACK, SLACK)
        fds = [os.memfd_create("torchkiln-judge") for _ in sizes]
        for fd, size in zip(fds, sizes, strict=True):
            os.ftruncate(fd, size)
        self.log = fds[2]
        self.pid = self.zygote.fork([theirs.fileno(), *fds])
        theirs.close()
        self.inputs, self.outputs = arena(fds[0]), arena(fds[1])
        for fd in fds[:2]:
            os.close(fd)
        self.channel.settimeout(self.timeout)
        self.is_open, self.on_gpu, self.first = True, False, 0

    def use_gpu_memory(self) -> str:
        """Share memory of the GPU in place of the host's, after the candidate was loaded.

        Returns why that is not possible; empty if it is. The exchange then goes through the host.
        """
        if self.device.type != "cuda" or self.on_gpu:
            return ""
        try:
            arenas = [torch.empty_like(t, device=self.device) for t in (self.inputs, self.outputs)]
            shared = [reduce_tensor(t) for t in arenas]
            self.ask({"do": "handles", "arenas": pickle.dumps(shared)})
        except (CandidateError, RuntimeError) as error:
            return first_line(error)
        self.inputs, self.outputs = arenas
        self.on_gpu = True
        return ""

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, wait for the answer; CandidateError if it is an error."""
        if not self.is_open:
            raise CandidateError("the process has ended")
        try:
            token = secret()
            to_candidate(self.channel, {**message, "token": token})
            answer = from_candidate(self.channel)
        except TimeoutError as error:
            self.close()
            raise CandidateError(f"no answer within {self.timeout:.0f} s") from error
        except (EOFError, OSError, ValueError) as error:
            self.close()
            raise CandidateError(f"the process ended: {error}; {self.tail()}") from error
        if answer.get("token") != token:
            self.close()
            raise ForgedError("an answer to no question of the judge")
        if text := answer.get("error"):
            raise CandidateError(str(text))
        return answer

    def load(
        self,
        file: Path | None,
        name: str,
        init: Sequence[Any] | None,
        seed: int,
        dtype: torch.dtype,
        *,
        compiled: bool = False,
        specs: str | None = None,
    ) -> dict[str, tuple[int, ...]]:
        """Make an instance of a class, or find a function; returns the shapes of the weights."""
        words = {"file": file and str(file), "name": name, "init": init, "seed": seed}
        place = {"device": str(self.device), "dtype": dtype, "compiled": compiled, "specs": specs}
        answer = self.ask({"do": "load", **place, **words})
        return {str(n): tuple(shape) for n, shape in answer["state"]}

    def call(
        self,
        calls: Sequence[Call],
        state: Mapping[str, Tensor] | None = None,
        *,
        do: str = "calls",
        same_place: bool = False,
    ) -> Reply:
        """Make calls with inputs at new addresses.

        The clock starts before the first input can be read, and stops when the judge holds a copy
        of all outputs. So all work is inside of the measured time, and no function in the
        candidate's process measures it.
        """
        room = self.inputs.numel() - SLACK
        if not same_place:
            self.first = self.addresses.randrange(SLACK // 2 // ALIGNMENT) * ALIGNMENT
        at = self.first
        placed: list[tuple[Block, Tensor]] = []

        def place(tensor: Tensor) -> Block:
            nonlocal at
            shift = tensor.storage_offset() % (ALIGNMENT // tensor.itemsize) * tensor.itemsize
            block = Block(int(at + shift), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            at += -(-(block.nbytes + shift) // ALIGNMENT) * ALIGNMENT
            if at > room + SLACK:
                raise ValueError("torchkiln.judge: inputs: more bytes than the arena has")
            placed.append((block, tensor))
            return block

        first = at
        message = {
            "do": do,
            "calls": [self._words(call, place) for call in calls],
            "state": {n: place(t) for n, t in (state or {}).items()},
        }
        expected = sum(size_of(one) for call in calls for one in call.expected)
        self.inputs[first:at].fill_(POISON)
        self.outputs[: expected + SLACK // 2].fill_(POISON)
        synchronize(self.device)
        start = time.perf_counter()
        for block, tensor in placed:
            block.fill(self.inputs, tensor)
        synchronize(self.device)
        answer = self.ask(message)
        outputs = self.results(answer)
        synchronize(self.device)
        seconds = time.perf_counter() - start
        changed = tuple(
            i for i, (b, t) in enumerate(placed) if not _same(b.view(self.inputs), b, t)
        )
        return Reply(outputs, tuple(map(str, answer["kinds"])), seconds, changed)

    def _words(self, call: Call, place: Any) -> dict[str, Any]:
        args, kwargs = mapped((call.sample.args, dict(call.sample.kwargs)), Tensor, place)
        return {
            "args": args,
            "kwargs": kwargs,
            "seed": call.sample.seed,
            "wanted": call.wanted,
            "weights": call.weights,
            "grads": [place(g) for g in call.grads],
            "poison": [size_of(one) for one in call.expected],
            "hold": call.hold,
            "late": call.late,
        }

    def again(self, seconds: float) -> list[Tensor]:
        """The outputs of the last held call, read a second time."""
        return self.results(self.ask({"do": "again", "seconds": seconds}))[0]

    def results(self, answer: Mapping[str, Any]) -> list[list[Tensor]]:
        """Copies of the outputs that an answer describes."""
        found: list[list[Tensor]] = []
        for rows in answer["results"]:
            found.append([])
            for at, shape, name in rows:
                dtype = getattr(torch, str(name), None)
                sizes = tuple(int(n) for n in shape)
                if not isinstance(dtype, torch.dtype) or at % ALIGNMENT or at < 0:
                    raise ForgedError(f"got an answer with {name!r} at {at}")
                block = Block(int(at), sizes, tuple(contiguous_strides(sizes)), dtype)
                if min(sizes, default=0) < 0 or at + block.nbytes > self.outputs.numel():
                    raise ForgedError(f"got an output of shape {sizes}, which has no room")
                found[-1].append(block.view(self.outputs).clone().to(self.device))
        return found

    def cpu_seconds(self) -> float:
        """CPU time of the process, its threads, and the processes that it has started."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # the process has ended
                words = path.read_text().rpartition(")")[2].split()
                if int(words[3]) == self.pid:  # a process of this session
                    ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process, and those that it has started, until the block ends."""
        os.killpg(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGCONT)

    def tail(self) -> str:
        """The last lines that the candidate has printed."""
        text = os.pread(self.log, SLACK, 0).rstrip(b"\0").decode(errors="replace")
        return " ".join(line for line in text.splitlines()[-3:] if line.isprintable())

    def close(self) -> None:
        """End the process and those that it has started."""
        if self.is_open:
            self.is_open = False
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        with suppress(OSError):
            os.close(self.log)


def size_of(output: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Bytes of an output in an arena."""
    shape, dtype = output
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def total_bytes(value: Any) -> int:
    """Bytes that tensors among arguments need in an arena, at their strides."""
    tensors = [t for t in flat(value) if isinstance(t, Tensor)]
    blocks = [Block(0, tuple(t.shape), t.stride(), t.dtype) for t in tensors]
    return sum(2 * ALIGNMENT + block.nbytes for block in blocks)


def _same(found: Tensor, block: Block, sent: Tensor) -> bool:
    first = tuple(slice(1) if s == 0 else slice(None) for s in block.strides)
    return torch.equal(bits(found[first]), bits(sent[first]).to(found.device))


def secret() -> int:
    """A seed that no candidate can compute."""
    return secrets.randbits(62)
