"""Host times of small modules before and after ``torchkiln.replace``: the table of docs/models.md.

Forms take turns, and a time is the shortest of five rounds of many calls: interruptions only add
to it. The tensors are so small that the host is the bound. With gradients, the forward is timed
that builds a graph.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.bench.clock import synchronize
from torchkiln.typing import Kind

ROUNDS = 5
SIZE = 64
IMAGE = (2, 8, 8, 8)


class Rms(nn.Module):
    """The norm of Hugging Face's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(SIZE)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """Computes in float32."""
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Gated(nn.Module):
    """The gated unit of Hugging Face's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(SIZE, SIZE, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Three products."""
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layers(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Two products."""
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y


class Sum(nn.Module):
    """A residual sum before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.norm = nn.Identity(), nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Sum and norm."""
        x = x + self.part(x)
        y: Tensor = self.norm(x)
        return y


class Tanh(nn.Module):
    """The approximation of GELU, in the operations of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        """Eight operations."""
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """Convolution, batch norm and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """Three operations."""
        return F.relu(self.norm(self.conv(x)))


@dataclass(frozen=True)
class Form:
    """A module to time."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, SIZE)
    training: bool = True


FORMS = (
    Form("`nn.LayerNorm`", lambda: nn.LayerNorm(SIZE)),
    Form("`nn.RMSNorm`", lambda: nn.RMSNorm(SIZE)),
    Form("RMS norm in five operations", Rms),
    Form("sum and `nn.LayerNorm`", Sum),
    Form("gated unit", Gated),
    Form("linear, ReLU, linear", Layers),
    Form("GELU in eight operations", Tanh),
    Form("`nn.Softmax`", lambda: nn.Softmax(-1)),
    Form("`nn.GroupNorm`", lambda: nn.GroupNorm(2, 8), IMAGE),
    Form("convolution, batch norm, ReLU; training", Block, IMAGE),
    Form("convolution, batch norm, ReLU; evaluation", Block, IMAGE, training=False),
)


def times(form: Form, device: torch.device, calls: int, *, gradients: bool) -> list[float] | None:
    """Seconds of a call before and after; None if nothing is replaced."""
    was = form.make().to(device).train(form.training).requires_grad_(gradients)
    now = copy.deepcopy(was)
    kinds = get_args(Kind)
    if not torchkiln.replace(now, only=kinds).changed:
        return None
    x = torch.randn(form.shape, device=device, requires_grad=gradients)
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for index, module in enumerate((was, now)):
            synchronize(device)
            module(x)
            start = time.perf_counter()
            for _ in repeat(None, calls):
                module(x)
            best[index] = min(best[index], (time.perf_counter() - start) / calls)
    return best


def table(device: torch.device, calls: int) -> Iterator[str]:
    """The lines of the table."""
    yield "| module | without gradients, us | | with gradients, us | |"
    yield "|---|---|---|---|---|"
    for form in FORMS:
        cells = []
        for gradients in (False, True):
            found = times(form, device, calls, gradients=gradients)
            cells += (
                ["not replaced", ""]
                if found is None
                else [f"{found[0] * 1e6:.1f} -> {found[1] * 1e6:.1f}", f"{found[1] / found[0]:.2f}"]
            )
        yield f"| {form.name} | {' | '.join(cells)} |"


def main(words: list[str]) -> None:
    """Prints the table, below the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, type=torch.device)
    parser.add_argument("--calls", default=200, type=int, help="calls of a round")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    kind = torch.cuda.get_device_name() if given.device.type == "cuda" else "CPU"
    print(f"{kind}, torch {torch.__version__}\n")
    for line in table(given.device, given.calls):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
