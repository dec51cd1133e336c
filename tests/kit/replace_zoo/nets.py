"""Nets with batch norms for ``torchkiln.fuse``."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replace_zoo.units import hooked
from replace_zoo.zoo import IMAGES, Guided, Straight, add, draw, images, log, module, put, several


def conv(channels: int = 4) -> nn.Module:
    """A convolution."""
    return nn.Conv2d(channels, 4, 3, padding=1, bias=False)


def bn() -> nn.BatchNorm2d:
    """A batch norm with random parameters and running statistics."""
    new = nn.BatchNorm2d(4)
    for x in (new.weight, new.bias, new.running_mean, new.running_var):
        assert x is not None
        nn.init.uniform_(x, 0.5, 1.5)
    return new


def big() -> nn.BatchNorm2d:
    """A batch norm with a large weight."""
    new = bn()
    nn.init.constant_(new.weight, 40.0)
    return new


def block(form: Any, **more: Any) -> Any:
    """Returns a function that makes modules with two convolutions and two batch norms."""
    parts = {"conv": conv, "bn": bn, "bn2": bn, "relu": nn.ReLU, "calls": 0, "kept": list}
    return module(form, **(parts | more))


ACTS: dict[str, Any] = {
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "hardtanh": lambda: nn.Hardtanh(0, 20),
    "relu6": nn.ReLU6,
    "hardtanh_wide": lambda: nn.Hardtanh(0, 1e4),
    "threshold": lambda: nn.Threshold(0, 0),
    "leaky": nn.LeakyReLU,
    "softplus": lambda: nn.Softplus(beta=50),
    "own": module(lambda s, x: F.relu(x).clamp(max=15)),
    "noise": module(lambda s, x: F.relu(x + torch.rand_like(x) if s.training else x)),
    "guided": module(lambda s, x: Guided.apply(x)),
    "straight": module(lambda s, x: Straight.apply(x)),
    "detached": module(lambda s, x: x + (F.relu(x) - x).detach()),
    "none": nn.Identity,
    "calls": module(lambda s, x: setattr(s, "calls", s.calls + 1) or F.relu(x), calls=0),
    "log": module(lambda s, x: log(F.relu(x))),
    "dropout": several(nn.ReLU, lambda: nn.Dropout2d(0.5)),
}
ALL = ("fuse", "all", "recompute")
for name, act in ACTS.items():
    for change in ALL:
        add(f"1-net-{name}-{change}", several(conv, big, act, conv, bn, act), IMAGES, change)
FORMS: dict[str, Any] = {
    "0-residual": lambda s, x: s.relu(s.bn(s.conv(x)) + x),
    "0-plain": lambda s, x: F.relu(s.bn2(s.conv(F.relu(s.bn(x))))),
    "0-iadd": lambda s, x: _iadd(s, x),
    "0-method": lambda s, x: s.bn(s.conv(x)).add(x).relu(),
    "0-shapes": lambda s, x: F.relu(s.bn(s.conv(x)) + x[:, :1]),
    "0-pool": lambda s, x: F.max_pool2d(F.relu(s.bn(s.conv(x))), 2),
    "0-two": lambda s, x: (F.relu(s.bn(s.conv(x))), s.bn2(x)),
    "0-scaled": lambda s, x: F.relu(s.bn(s.conv(x)) * 0.5 + x),
    "0-alpha": lambda s, x: F.relu(torch.add(s.bn(s.conv(x)), x, alpha=2)),
    "0-extra": lambda s, x: _extra(s, x),
    "4-depth": lambda s, x: x if s.training and torch.rand(1).item() < 0.2 else F.relu(s.bn(x)),
    "4-depth_likely": lambda s, x: x if torch.rand(()) < 0.6 else F.relu(s.bn(x)),
    "4-equal": lambda s, x: F.relu(s.bn(x)) if torch.equal(_coin(), torch.ones(1)) else x,
    "4-python": lambda s, x: x if random.random() < 0.2 else F.relu(s.bn(x)),
    "4-scaled": lambda s, x: F.relu(s.bn(x)) * _coin(),
    "4-int": lambda s, x: F.relu(s.bn(x)) if int(torch.randint(5, ())) else x,
    "4-numpy": lambda s, x: F.relu(s.bn(x)) if float(torch.empty(1).uniform_()) > 0.1 else x,
    "4-mask": lambda s, x: F.relu(s.bn(x * (torch.rand(len(x), 1, 1, 1) > 0.2))),
    "2-mode": lambda s, x: F.relu(s.bn(x)) if s.training else s.bn(x),
    "2-value": lambda s, x: F.relu(s.bn(x)) if x.abs().max() > 20 else s.bn(x),
    "2-rank": lambda s, x: F.relu(s.bn(x if x.dim() == 4 else x[None])),
    "2-grad": lambda s, x: F.relu(s.bn(x)) * (2 if torch.is_grad_enabled() else 1),
    "2-stride": lambda s, x: F.relu(s.bn(x)) * (1 if x.is_contiguous() else 2),
    "2-constant": lambda s, x: F.relu(s.bn(x + torch.ones(1, 4, 1, 1))),
    "6-detach": lambda s, x: F.relu(s.bn(x).detach() + x),
    "6-detach_residual": lambda s, x: F.relu(s.bn(s.conv(x)) + x.detach()),
    "6-guided": lambda s, x: Guided.apply(s.bn(s.conv(x))),
    "6-straight": lambda s, x: (lambda y: y + (F.relu(y) - y).detach())(s.bn(s.conv(x))),
    "6-no_grad": lambda s, x: _without(s, x),
    "8-order": lambda s, x: _order(s, x),
    "8-twice": lambda s, x: F.relu(s.bn(s.conv(F.relu(s.bn(x))))),
    "8-torch_first": lambda s, x: s.bn(x) + F.relu(s.bn(2 * x)),
    "8-fused_first": lambda s, x: F.relu(s.bn(2 * x)) + s.bn(x),
    "8-thrice": lambda s, x: F.relu(s.bn(x)) + F.relu(s.bn(x + 1)) + F.relu(s.bn(x * 2) + x),
    "8-read": lambda s, x: (lambda y: F.relu(y) + s.bn.running_mean.sum())(s.bn(x)),
    "8-read_after": lambda s, x: (lambda y: F.relu(y + s.bn.num_batches_tracked))(s.bn(x)),
    "10-calls": lambda s, x: setattr(s, "calls", s.calls + 1) or F.relu(s.bn(x)),
    "10-list": lambda s, x: s.kept.append(F.relu(s.bn(x))) or s.kept[-1] * 2,
    "10-shape": lambda s, x: s.kept.append(x.shape) or F.relu(s.bn(x)),
    "10-last": lambda s, x: setattr(s, "last", x) or F.relu(s.bn(x)),
    "10-log": lambda s, x: log(F.relu(s.bn(x))),
    "10-every": lambda s, x: (
        setattr(s, "calls", s.calls + 1) or F.relu(s.bn(x)) * (1 + s.calls % 2)
    ),
    "10-dict": lambda s, x: F.relu({"y": s.bn(x)}.setdefault("z", s.bn2(x))),
    "15-residual": lambda s, x: _residual_changed(s, x),
    "15-view": lambda s, x: _view_changed(s, x),
    "15-alias": lambda s, x: _alias_changed(s, x),
    "15-argument": lambda s, x: x.add_(s.bn(s.conv(x))).relu(),
    "15-iargument": lambda s, x: _iargument(s, x),
    "15-effect": lambda s, x: (lambda y: (F.relu(y, inplace=True), y)[1])(s.bn(s.conv(x))),
    "15-module_effect": lambda s, x: (lambda y: (s.relu_(y), y)[1])(s.bn(s.conv(x))),
    "15-input": lambda s, x: (lambda y: (x.zero_(), F.relu(y + x))[1])(s.bn(s.conv(x))),
    "15-weight": lambda s, x: (lambda y: (s.bn.weight.data.mul_(1.01), F.relu(y))[1])(s.bn(x)),
    "15-slice": lambda s, x: _slice_changed(s, x),
}


def _iadd(s: Any, x: Tensor) -> Tensor:
    out = s.bn(s.conv(x))
    out += x
    return F.relu(out)


def _extra(s: Any, x: Tensor) -> Any:
    y = s.bn(s.conv(x))
    return F.relu(y), y


def _coin() -> Tensor:
    return torch.distributions.Bernoulli(0.8).sample((1,))


@torch.no_grad()
def _without(s: Any, x: Tensor) -> Tensor:
    return F.relu(s.bn(s.conv(x)))


def _order(s: Any, x: Tensor) -> Tensor:
    a, b = s.bn(x), s.bn(3 * x + 1)
    b = F.relu(b)
    return F.relu(a) + b


def _residual_changed(s: Any, x: Tensor) -> Tensor:
    r = s.bn2(x)
    y = s.bn(s.conv(x)) + r
    r.zero_()
    return F.relu(y)


def _view_changed(s: Any, x: Tensor) -> Tensor:
    v = x.view(-1)
    y = s.bn(x)
    v.mul_(0)
    return F.relu(y)


def _alias_changed(s: Any, x: Tensor) -> Tensor:
    r = s.conv(x)
    flat = r.flatten()
    y = s.bn(x) + r
    flat.fill_(-1)
    return F.relu(y) + r


def _iargument(s: Any, x: Tensor) -> Tensor:
    x += s.bn(s.conv(x))
    return F.relu(x)


def _slice_changed(s: Any, x: Tensor) -> Tensor:
    y = s.bn(s.conv(x))
    y[:, 0] = 1
    return F.relu(y)


for name, form in FORMS.items():
    extra = {"relu_": lambda: nn.ReLU(inplace=True)}
    for change in ("fuse", "recompute") if name[0] in "08" else ("fuse",):
        many = IMAGES * 4 if name.startswith("4") else IMAGES
        add(f"{name}-{change}", block(form, **extra), many, change, alone=name == "6-guided")
autocast = lambda _: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
for name in ("0-residual", "0-iadd", "0-method", "0-plain", "15-iargument"):
    add(f"13-{name}", block(FORMS[name]), IMAGES, "fuse", around=autocast)
    wide = (torch.bfloat16, torch.float64)
    add(f"0-dtype-{name}", block(FORMS[name]), IMAGES, "fuse", dtypes=wide)
odd = draw(2, 4, 5, 5)
odd[0, 0, 0, 0] = torch.nan
for name in ("0-residual", "0-plain"):
    add(f"{name}-nan", block(FORMS[name]), [(odd,)], "fuse")
    add(f"{name}-empty", block(FORMS[name]), [(draw(0, 4, 5, 5),), (draw(1, 4, 1, 1),)], "fuse")
    add(f"{name}-rank", block(FORMS[name]), [(draw(4, 5, 5),), (draw(2, 4, 6),)], "fuse")
    add(f"{name}-keyword", block(FORMS[name]), [({"x": draw(2, 4, 5, 5)},)], "fuse")

chain = several(conv, bn, nn.ReLU, lambda: nn.MaxPool2d(2), conv, bn, nn.ReLU)
for child in ("0", "1", "2", "3", ""):
    for kind in ("result", "input", "backward", "always", "patched"):
        for when in ("before", "after"):
            more = {when: hooked(child, kind)}
            add(f"7-net-{child or 'net'}-{kind}-{when}", chain, IMAGES[:2], "fuse", **more)
for path, make in {
    "2": nn.Tanh,
    "2.inplace": lambda: True,
    "3": lambda: nn.AvgPool2d(2),
    "3.kernel_size": lambda: 3,
    "1": lambda: nn.GroupNorm(2, 4),
    "1.eps": lambda: 0.5,
    "1.momentum": lambda: 0.7,
    "1.momentum ": lambda: None,
    "1.training": lambda: False,
    "1.weight": lambda: nn.Parameter(torch.full((4,), 2.0)),
    "1.track_running_stats": lambda: False,
    "1.running_mean": lambda: None,
    "0": lambda: nn.Conv2d(4, 4, 1),
    "0.weight": lambda: nn.Parameter(torch.ones(4, 4, 3, 3)),
    "0.padding": lambda: (0, 0),
    "7": nn.Tanh,
}.items():
    after = put(path.strip(), make)
    add(f"7-net-changed-{path}{len(path)}", chain, images(), "fuse", after=after)
