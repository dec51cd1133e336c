"""Layers whose source ``replace`` rewrites, modules that hold graphs, and later changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from replace_zoo.units import hooked
from replace_zoo.zoo import ROWS, SIZE, add, draw, linear, log, norm, put, rms, several

LAYERS = [(x,) for (x,) in ROWS if 1 <= x.abs().max() < 1e3]
Rms = norm(lambda s, x: rms(x, s.eps) * s.weight, eps=lambda: 1e-6)


class Layer(nn.Module):
    """The submodules of a decoder layer, and a pre-norm forward."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.mix, self.fc1, self.fc2 = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.norm, self.norm2 = nn.LayerNorm(SIZE), Rms()
        self.drop, self.act, self.calls = nn.Dropout(p), nn.GELU(), 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(x))
        y = self.norm(x)
        x = x + self.fc2(self.act(self.fc1(y)))
        return x + self.norm2(x)


class InPlace(Layer):
    """The sum is changed in place after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        y = self.norm(total)
        total.mul_(2)
        return total + y


class Between(Layer):
    """The sum is changed in place before the norm, through a second variable."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        other = total
        other.add_(1)
        return self.norm(total) + total


class Summand(Layer):
    """A summand is changed in place between the sum and the norm."""

    def forward(self, x: Tensor) -> Tensor:
        part = self.mix(x)
        total = x + part
        part.zero_()
        return self.norm(total) + part


class SumInPlace(Layer):
    """The sum is added to the argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.mix(x)
        return self.norm(x) + x


class Counted(Layer):
    """The forward sets attributes and writes to ``EVENTS`` between the sum and the norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        self.calls += 1
        self.total = log(total)
        return self.norm(total) * self.calls


class Random(Layer):
    """In training, about half of the calls return before the sum; the others add noise to it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()).item() < 0.5:
            return x
        total = x + self.mix(x)
        return self.norm(total + 0.1 * torch.randn_like(total) if self.training else total)


class Broadcast(Layer):
    """The first sum broadcasts a summand, the next one adds a number."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x).mean(0)
        one = self.norm(total)
        total = one + 1.0
        return self.norm2(total)


class Detached(Layer):
    """A summand is detached, and the result of the sum is detached after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach() + self.mix(x)
        y = self.norm(total)
        return y + total.detach()


class Half(Layer):
    """The summands have two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x).bfloat16()
        return self.norm(total.to(x.dtype)) + self.norm2(total)


class Post(Layer):
    """A layer as in BERT: dropout, sum, norm; then dense layers with an activation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.mix(x)) + x)
        return self.norm2(self.act(self.fc1(x)) + F.gelu(self.fc2(x), approximate="tanh"))


class Hidden(Layer):
    """The result of a dense layer is used after its activation, which may be in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return F.relu(h, inplace=True) + h + self.act(self.fc2(h)) * h


class Exchanged(Layer):
    """Each call exchanges the two norms between the sum and the norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        self.norm, self.norm2 = self.norm2, self.norm
        return self.norm(total)


class Refused(Layer):
    """A matrix raises an error between the sum and the norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        if total.dim() == 2:
            raise ValueError("two dimensions")
        return self.norm(total)


KINDS = (Layer, InPlace, Between, Summand, SumInPlace, Counted, Random, Broadcast, Detached, Half,
         Post, Hidden, Exchanged, Refused)  # fmt: skip
autocast = lambda _: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
for cls in KINDS:
    add(f"15-layer-{cls.__name__}", cls, LAYERS, dtypes=(torch.float32, torch.bfloat16))
    add(f"13-layer-{cls.__name__}-autocast", cls, LAYERS, around=autocast)
    add(f"3-layer-{cls.__name__}-dropout", lambda cls=cls: cls(0.4), LAYERS)
for child in ("norm", "act", "fc1", "mix", "drop"):
    for kind in ("result", "input", "backward", "always", "patched"):
        for when in ("before", "after"):
            add(f"7-layer-{child}-{kind}-{when}", Post, LAYERS, **{when: hooked(child, kind)})
for path, make in {
    "norm": Rms,
    "norm ": nn.Tanh,
    "norm.eps": lambda: 0.5,
    "norm.bias": lambda: None,
    "norm.normalized_shape": lambda: (3, SIZE),
    "norm2.eps": lambda: 0.5,
    "norm2.weight": lambda: nn.Parameter(torch.full((SIZE,), 2.0)),
    "norm2.eps ": lambda: torch.tensor(0.5),
    "act": nn.Tanh,
    "act.approximate": lambda: "tanh",
    "drop": lambda: nn.AlphaDropout(0.5),
    "drop.p": lambda: 0.5,
    "drop.training": lambda: True,
    "fc1": linear(bias=False),
    "fc1.bias": lambda: None,
    "fc1 ": several(linear(), nn.Tanh),
}.items():
    after = put(path.strip(), make)
    add(f"7-layer-changed-{path}{len(path)}", Post, LAYERS, after=after)


class Doubled(nn.Module):
    """The parametrization of a weight by twice its value."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def keep(model: Any) -> None:
    """Keep a result with its graph by a hook, and a product of parameters as an attribute."""
    model[1].register_forward_hook(lambda m, a, y: setattr(m, "features", y))
    model(draw(2, SIZE).to(model[0].weight.dtype))
    model[1].extra = [model[1].weight * 2]


for name, make in {"layer": lambda: nn.LayerNorm(SIZE), "rms": Rms, "torch": nn.GELU}.items():
    pair = several(linear(), make, linear())
    if name != "torch":
        for when in ("before", "after"):
            for kind, action in {
                "features": keep,
                "pruned": lambda m: prune.l1_unstructured(m[1], "weight", 3),
                "parametrized": lambda m: parametrize.register_parametrization(
                    m[1], "weight", Doubled()
                ),
                "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
                "frozen": lambda m: m[1].weight.requires_grad_(requires_grad=False),
                "tied": lambda m: setattr(m[2], "bias", m[1].weight),
                "product": lambda m: setattr(m[1], "held", m[1].weight.exp()),
            }.items():
                add(f"9-{name}-{kind}-{when}", pair, LAYERS, **{when: action})
    for kind in ("result", "input", "backward", "always", "patched"):
        for when in ("before", "after"):
            add(f"7-{name}-{kind}-{when}", pair, LAYERS, **{when: hooked("1", kind)})
