"""The model of tests/data/exported.pt2. Running this file writes that one.

Write it again only for a new minor version, after removing the file of the previous version.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import torchkiln

FILE = Path(__file__).parents[1] / "data" / "exported.pt2"


class Step(nn.Module):
    """A model whose public ops leave helper ops in the graph of ``torch.export``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torchkiln.nn.BatchNormAct2d(4)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        y = self.norm(x).flatten(2)
        y = torchkiln.dropout_add(y, y, 0.0)
        y = torchkiln.rms_norm(torchkiln.gelu(y), (16,))
        return torchkiln.cross_entropy(
            self.head(y).flatten(0, 1),
            target,
            z_loss=1e-3,
            return_z_loss=True,
            return_accuracy=True,
        )


def example() -> tuple[Tensor, Tensor]:
    """The arguments of the program."""
    x = torch.linspace(-2, 3, 2 * 4 * 4 * 4).reshape(2, 4, 4, 4)
    return x, torch.arange(8) % 7


def model() -> Step:
    """The model, with the same parameters in each call."""
    torch.manual_seed(0)
    return Step()


if __name__ == "__main__":
    torch.export.save(torch.export.export(model(), example()), FILE)
