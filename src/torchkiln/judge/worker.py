"""The process of a candidate: takes inputs from the judge, returns outputs.

A candidate can change everything in its process, this module too. So nothing here decides: the
clock, the truth, the random numbers and the verdict are in the judge's process. The probe of this
module only names tricks; whether a candidate is right and fast does not depend on it.

``python -m torchkiln.judge.worker FD`` is a zygote, which forks a process for each candidate.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.judge.blocks import (
    ALIGNMENT,
    POISON,
    Block,
    flat,
    mapped,
    receive_bytes,
    send_bytes,
)
from torchkiln.judge.probe import Probe
from torchkiln.judge.problem import spec_of
from torchkiln.testing.data import contiguous_strides

POISONED = 4
"""Blocks of the size of each output that are poisoned and freed: a new output takes one."""
M_PERTURB = -6
"""Parameter of glibc's mallopt: new memory is filled with the complement of the lowest byte."""
DELAY_CYCLES = 20_000_000
"""Sleep of a GPU before late inputs arrive: about 10 ms."""


class Worker:
    """One candidate: the object that is called, and the arenas of inputs and outputs."""

    def __init__(self, channel: socket.socket, read: Tensor, write: Tensor) -> None:
        self.channel, self.read, self.write = channel, read, write
        self.module: Any = None
        self.callee: Any = None
        self.run: Any = None
        self.held: list[Tensor] = []
        self.probe = Probe()
        self.synchronize = torch.cuda.synchronize
        self.device, self.is_cuda = torch.device("cpu"), False

    def load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Import the candidate, or make a new instance of it."""
        self.device = torch.device(message["device"])
        self.is_cuda = self.device.type == "cuda"
        if message["file"] is None:  # a baseline has no file
            self.run = spec_of(message["name"], message["specs"]).composite
            return {"state": []}
        if self.module is None:
            file = Path(message["file"])
            sys.path.insert(0, str(file.parent))
            spec = spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            self.module = module_from_spec(spec)
            sys.modules[file.stem] = self.module
            spec.loader.exec_module(self.module)
        found = getattr(self.module, message["name"])
        if message["init"] is None:
            self.run = found
            return {"state": []}
        torch.manual_seed(message["seed"])
        self.callee = found(*message["init"]).to(device=self.device, dtype=message["dtype"])
        shapes = [[n, list(t.shape)] for n, t in self.tensors().items()]
        self.run = torch.compile(self.callee) if message["compiled"] else self.callee
        return {"state": shapes}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        if not isinstance(self.callee, nn.Module):
            return {}
        return {**dict(self.callee.named_parameters()), **dict(self.callee.named_buffers())}

    def handles(self, message: dict[str, Any]) -> dict[str, Any]:
        """Open the arenas in GPU memory that the judge shares with this process."""
        self.read, self.write = (make(*args) for make, args in pickle.loads(message["arenas"]))
        return {}

    def set_weights(self, message: dict[str, Any]) -> None:
        """Copy the weights of a message, if it has any."""
        own = self.tensors()
        with torch.no_grad():
            for name, block in message["state"].items():
                own[name].copy_(block.view(self.read))

    def calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Make calls one after the other; each writes its outputs to the arena."""
        self.set_weights(message)
        at, results, kinds = 0, [], set()
        for call in message["calls"]:
            outputs = self.one(call)
            kinds |= {type(y).__name__ for y in outputs if type(y) not in (Tensor, nn.Parameter)}
            rows, at = self.store(outputs, at)
            results.append(rows)
        if self.is_cuda:
            self.synchronize()
        return {"results": results, "kinds": sorted(kinds)}

    def at(self, block: Block) -> Tensor:
        """An input on the device of the candidate."""
        return block.view(self.read).to(self.device)

    def one(self, call: dict[str, Any]) -> list[Tensor]:
        """Make one call; returns its outputs, or its gradients."""
        args, kwargs = mapped((call["args"], call["kwargs"]), Block, self.at)
        if call["late"]:
            args = mapped(args, Tensor, torch.empty_like)
            torch.cuda._sleep(DELAY_CYCLES)
            for mine, block in zip(flat(args), flat(call["args"]), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(self.at(block))
        wanted = call["wanted"]
        if wanted:
            args = tuple(
                a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)
            )
        waste = [
            torch.full((n,), POISON, dtype=torch.uint8, device=self.device)
            for n in call["poison"] * POISONED
        ]
        del waste
        if seed := call["seed"]:
            torch.manual_seed(seed)
        with torch.set_grad_enabled(bool(wanted)), poisoned_memory(call["hold"]):
            result = self.run(*args, **kwargs)
        outputs = [y for y in flat(result) if isinstance(y, Tensor)]
        if call["hold"]:
            self.held = outputs
        if not wanted:
            return outputs
        own = self.tensors()
        leaves = [args[i] for i in wanted] + [own[name] for name in call["weights"]]
        grads = [self.at(block) for block in call["grads"]]
        used = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
        if not used:
            return []
        found = torch.autograd.grad(
            [y for y, _ in used],
            leaves,
            [g for _, g in used],
            allow_unused=True,
            materialize_grads=True,
        )
        return list(found)

    def store(self, outputs: list[Tensor], at: int) -> tuple[list[Any], int]:
        """Copy outputs to the arena, and describe them."""
        rows = []
        for y in outputs:
            shape = tuple(y.shape)
            block = Block(at, shape, tuple(contiguous_strides(shape)), y.dtype)
            with torch.no_grad():
                block.view(self.write).copy_(y.detach())
            rows.append([at, list(shape), str(y.dtype).removeprefix("torch.")])
            at += -(-block.nbytes // ALIGNMENT) * ALIGNMENT
        return rows, at

    def again(self, message: dict[str, Any]) -> dict[str, Any]:
        """Wait, then store the outputs of a held call a second time."""
        time.sleep(message["seconds"])
        if self.is_cuda:
            self.synchronize()
        rows, _ = self.store(self.held, 0)
        if self.is_cuda:
            self.synchronize()
        return {"results": [rows], "kinds": []}

    def capture(self, message: dict[str, Any]) -> dict[str, Any]:
        """Capture a call in a CUDA graph, and replay it on the inputs of a second call."""
        self.set_weights(message)
        args, _ = mapped((message["calls"][0]["args"], ()), Block, self.at)
        fresh, _ = mapped((message["calls"][1]["args"], ()), Block, self.at)
        static = mapped(args, Tensor, torch.clone)
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.run(*static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self.run(*static)
            for mine, value in zip(flat(static), flat(fresh), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(value)
            graph.replay()
        rows, _ = self.store([y for y in flat(result) if isinstance(y, Tensor)], 0)
        self.synchronize()
        return {"results": [rows], "kinds": []}

    def compare(self, _message: dict[str, Any]) -> dict[str, Any]:
        """The findings of the probe."""
        return {"findings": self.probe.findings()}

    def serve(self) -> None:
        """Answer messages until the judge closes the channel."""
        dump, send = json.dumps, send_bytes
        while True:
            try:
                message = pickle.loads(receive_bytes(self.channel))
            except (EOFError, OSError):
                return
            try:
                answer = getattr(self, message["do"])(message)
            except BaseException as error:
                lines = traceback.format_exception_only(error)
                answer = {"error": "".join(lines).strip()[-2000:]}
            send(self.channel, dump({**answer, "token": message["token"]}).encode())


@contextmanager
def poisoned_memory(wanted: bool) -> Iterator[None]:
    """Let the C library poison all memory that it hands out, which takes time.

    A new output takes a block of ``POISONED`` only if no other free block is as near.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if wanted else None
    if mallopt is None:  # another C library than glibc
        yield
        return
    mallopt(M_PERTURB, 1 << 8 | (POISON ^ 0xFF))  # a parameter of 0 would switch it off
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)


def arena(fd: int) -> Tensor:
    """The memory behind a file descriptor."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def start(control: socket.socket, fds: list[int]) -> None:
    """Set up a forked process, and serve the judge until it closes the channel."""
    control.close()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel, read, write, log = fds
    for stream in (1, 2):
        os.dup2(log, stream)
    Worker(socket.socket(fileno=channel), arena(read), arena(write)).serve()


def main(control_fd: int) -> None:
    """Fork a process for each request of the judge."""
    # Torch imports it at the first gradient of each process, in 0.6 s.
    import_module("torch.fx.experimental.symbolic_shapes")

    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.sendall(os.getpid().to_bytes(8, "little"))
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 4)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            try:
                start(control, fds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        control.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
