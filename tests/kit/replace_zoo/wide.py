"""Wide linear layers that share an input, losses and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replace_zoo.layers import LAYERS
from replace_zoo.seen import MODES
from replace_zoo.units import hooked
from replace_zoo.zoo import ROWS, SIZE, add, draw, log

WIDTH = 512


class Wide(nn.Module):
    """Layers for query, key and value that read the same variable."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.requires_grad_(requires_grad=not type(self).__name__.startswith("Frozen"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k.tanh() + v


class FrozenWide(Wide):
    """The input is zeroed before backward. Frozen layers save no input, so backward works."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        x.mul_(0)
        return q + k


class SpoiledWide(Wide):
    """The input is zeroed before backward, which therefore raises."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        x.mul_(0)
        return q + k


class Alias(Wide):
    """The input is changed through a view between the calls of two layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = x[..., 0]
        q = self.q(x)
        h[:] = 0
        return q + self.k(x)


class Chosen(Wide):
    """Two layers are exchanged between the calls."""

    def choose(self) -> None:
        self.k, self.v = self.v, self.k

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        self.choose()
        return q + self.k(x)


class Checked(Wide):
    """A single row raises an error between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        q = log(self.q(x))
        if q.shape[0] == 1:
            raise ValueError("one row")
        return q + self.k(x)


for cls in (Wide, FrozenWide, SpoiledWide, Alias, Chosen, Checked):
    add(f"16-{cls.__name__}", cls, [(draw(2048, WIDTH),), (draw(1, WIDTH),)], modes=MODES[:2])
    add(f"16-{cls.__name__}-hook", cls, [(draw(4, WIDTH),)], after=hooked("k", "always"))


class Loss(nn.Module):
    """A model that computes a loss in forward, with a temperature and options."""

    def __init__(self, scale: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.head, self.scale, self.options = nn.Linear(SIZE, 7), scale, options

    def forward(self, x: Tensor) -> Any:
        logits = self.head(x) / self.scale
        labels = (x.detach().sum(-1) > 0).long()
        return F.cross_entropy(logits.view(-1, 7), labels.view(-1), **self.options), logits


for name, options in {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smooth": {"label_smoothing": 0.1},
    "ignore": {"ignore_index": 1},
    "none": {"reduction": "none"},
    "weight": {"weight": torch.linspace(1, 2, 7)},
    "scaled": {"scale": 0.01},
}.items():
    add(f"0-loss-{name}", lambda o=options: Loss(**o), LAYERS)
for name, make in {
    "softmax": lambda: nn.Softmax(-1),
    "softmax_dim": lambda: nn.Softmax(0),
    "softmax_none": lambda: nn.Softmax(),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "encoder": lambda: nn.TransformerEncoderLayer(SIZE, 2, 32, 0.0, batch_first=True),
}.items():
    add(f"0-{name}", make, [(x,) for (x,) in ROWS if x.dim() == 3])
