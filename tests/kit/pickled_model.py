"""The model of tests/data/replaced.pt, which names its classes. Running this file writes that one.

Write it again only for a new minor version, after removing the file of the previous version.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.typing import Kind

KINDS: tuple[Kind, ...] = (
    *("norm", "residual", "glu", "activation", "softmax", "batch_norm", "linear", "registered"),
)
FILE = Path(__file__).parents[1] / "data" / "replaced.pt"


class Rms(nn.Module):
    """An RMS norm, which replace() finds by its formula."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Gated(nn.Module):
    """A gated linear unit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A residual sum before a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(size), Gated(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(x)
        return self.norm(x)


class Stem(nn.Module):
    """A chain of convolution, batch norm and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class GatedRms(Rms):
    """A norm of gated elements."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        x = x * nn.functional.silu(gate)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Quick(nn.Module):
    """An activation that replace() finds by its formula."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Doubled(nn.Module):
    """A module whose class has a registered forward: :func:`doubled`."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


def doubled(_: nn.Module, x: Tensor) -> Tensor:
    """The forward that is registered for :class:`Doubled`."""
    return 2 * x


class Net(nn.Module):
    """One module for each kind of plan of replace()."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.body = nn.Sequential(Rms(8), Block(8), nn.GELU(), Quick(), Doubled(), nn.Softmax(-1))
        self.gated = GatedRms(8)
        self.wide = nn.Linear(512, 513)
        # An expanded scalar: the file stores one number instead of 1 MiB.
        self.wide.weight = nn.Parameter(torch.full((1,), 0.5).expand(513, 512))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(self.stem(x).flatten(1)[:, :8])
        return self.wide(nn.functional.pad(self.gated(y, y), (0, 504)))


def example() -> Tensor:
    """The input for which the file stores the output."""
    return torch.linspace(-2, 3, 3 * 5 * 5).reshape(3, 1, 5, 5)


if __name__ == "__main__":
    import pickled_model  # else the pickle would name __main__

    torch.manual_seed(0)
    model = pickled_model.Net().eval()
    torchkiln.replace.register(
        pickled_model.Doubled, pickled_model.doubled, inputs=lambda _: torch.ones(4, 8)
    )
    torchkiln.replace(model, only=pickled_model.KINDS)
    with torch.no_grad():
        torch.save({"model": model, "output": model(example())}, FILE)
