"""A small classifier, trained with the fused module and with plain torch in turns."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchkiln.nn import BiasAct

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES = 3
WIDTH = 128
SCALE = 1.4
BATCH = 512

TOLERANCE = 0.02
"""Largest allowed difference of the losses in one step. The two models round in a different order,
and training amplifies this; a wrong gradient would differ far more."""


class PlainBiasAct(nn.Module):
    """The layer as three ops of torch."""

    def __init__(self, features: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """relu(x * scale + bias)."""
        return torch.relu(x * self.scale + self.bias)


def network(activation: type[nn.Module]) -> nn.Sequential:
    """Three hidden layers; equal seeds give equal weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 2
    for _ in range(3):
        layers += [nn.Linear(width, WIDTH, bias=False), activation(WIDTH, scale=SCALE)]
        width = WIDTH
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def spirals(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points on interleaved spiral arms, and the arm of each point."""
    arm = torch.arange(count) % CLASSES
    radius = torch.rand(count).sqrt()
    angle = 7.0 * radius + arm * (2 * math.pi / CLASSES) + 0.2 * torch.randn(count)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points.to(device), arm.to(device)


@dataclass
class Run:
    """One of the two models, its losses, and the seconds of its training."""

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Outcome:
    """Both runs, on the same points."""

    runs: tuple[Run, Run]
    points: Tensor
    labels: Tensor
    total: int

    @property
    def difference(self) -> float:
        """The largest difference of the losses in one step."""
        pairs = zip(self.runs[0].losses, self.runs[1].losses, strict=True)
        return max(abs(a - b) for a, b in pairs)

    @property
    def agree(self) -> bool:
        """Whether the losses agree within the tolerance, and the model has learned."""
        first, *_, last = self.runs[0].losses
        return self.difference <= TOLERANCE and last < first / 2

    @torch.no_grad()
    def accuracy(self, run: Run) -> float:
        """The fraction of points whose arm is right."""
        return float((run.model(self.points).argmax(1) == self.labels).float().mean())

    def as_dict(self) -> dict[str, Any]:
        """Losses and accuracies, in types of JSON."""
        runs = [
            {
                "name": run.name,
                "losses": run.losses,
                "accuracy": self.accuracy(run),
                "seconds": run.seconds,
            }
            for run in self.runs
        ]
        return {"runs": runs, "difference": self.difference, "agree": self.agree}


def train_both(device: torch.device, steps: int) -> Iterator[Outcome]:
    """Yield the outcome so far after each step of both models."""
    torch.manual_seed(1)
    points, labels = spirals(8 * BATCH, device)
    runs = (
        Run("torchkiln", network(BiasAct).to(device)),
        Run("plain torch", network(PlainBiasAct).to(device)),
    )
    outcome = Outcome(runs, points, labels, total=steps)
    optimisers = [torch.optim.SGD(r.model.parameters(), lr=0.1, momentum=0.9) for r in runs]
    for _ in range(outcome.total):
        chosen = torch.randint(len(points), (BATCH,), device=device)
        x, y = points[chosen], labels[chosen]
        for run, optimiser in zip(runs, optimisers, strict=True):
            start = time.perf_counter()
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(run.model(x), y)
            loss.backward()
            optimiser.step()
            run.losses.append(loss.item())  # synchronizes
            # The first step is not timed: it loads libraries, which slows only the first model.
            if len(run.losses) > 1:
                run.seconds += time.perf_counter() - start
        yield outcome
