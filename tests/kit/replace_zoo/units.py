"""Activations and gated units that differ slightly from torchkiln's."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replace_zoo.zoo import (
    ROWS,
    SIZE,
    ClippedGradient,
    Straight,
    add,
    draw,
    gelu_tanh,
    linear,
    log,
    module,
    put,
    several,
)

LOW = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ACTS: dict[str, Any] = {
    "gelu": lambda s, x: F.gelu(x),
    "gelu_erf": lambda s, x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda s, x: gelu_tanh(x),
    "silu": lambda s, x: x * torch.sigmoid(x),
    "silu_exp": lambda s, x: x / (1 + torch.exp(-x)),
    "quick_gelu": lambda s, x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda s, x: F.relu(x).square(),
    "relu_max": lambda s, x: torch.maximum(x, torch.zeros((), dtype=x.dtype)),
    "nearly_gelu": lambda s, x: x * torch.sigmoid(1.7021 * x),
    "mish": lambda s, x: x * torch.tanh(F.softplus(x)),
}
strange = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 0.0, -0.0, 200.0])
for name, form in ACTS.items():
    turned = draw(3, 5).t()
    add(f"0-act-{name}", module(form), [*ROWS, (turned,), (draw(0, 4),)], dtypes=LOW)
    add(f"0-act-{name}-strange", module(form), [(strange,), (torch.tensor(3.0),)])

for name, form in {
    "clamp": lambda s, x: F.gelu(x).clamp(-30, 30),
    "clamped_gate": lambda s, x: x.clamp(max=25) * torch.sigmoid(x),
    "hardtanh": lambda s, x: F.hardtanh(F.gelu(x), 0, 1e3),
    "relu6": lambda s, x: F.relu(x.clamp(max=600)).square(),
    "value": lambda s, x: F.gelu(x) * (2 if x.abs().max() > 20 else 1),
    "where": lambda s, x: torch.where(x > 50, x * 0, F.gelu(x)),
    "threshold": lambda s, x: F.gelu(F.threshold(x, -100.0, -100.0)),
}.items():
    add(f"1-act-{name}", module(form))
for name, form in {
    "noise": lambda s, x: F.gelu(x + torch.randn_like(x) if s.training else x),
    "mode": lambda s, x: F.gelu(x) if s.training else gelu_tanh(x),
    "rrelu": lambda s, x: F.gelu(F.rrelu(x, 0.9, 1.1, s.training)),
    "dropout": lambda s, x: F.dropout(F.gelu(x), 0.1, s.training),
    "small_dropout": lambda s, x: F.dropout(F.gelu(x), 1e-9, s.training),
}.items():
    add(f"2-act-{name}", module(form))
for name, form in {
    "detach": lambda s, x: x + (F.gelu(x) - x).detach(),
    "straight": lambda s, x: Straight.apply(x),
    "clipped": lambda s, x: ClippedGradient.apply(F.gelu(x)),
    "gate": lambda s, x: x * torch.sigmoid(1.702 * x).detach(),
    "no_grad": lambda s, x: _frozen(x),
    "half": lambda s, x: 0.5 * F.gelu(x) + 0.5 * F.gelu(x.detach()),
    "hook": lambda s, x: _doubled(F.gelu(x)),
}.items():
    add(f"6-act-{name}", module(form))


@torch.no_grad()
def _frozen(x: Tensor) -> Tensor:
    return F.gelu(x)


def _doubled(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: 2 * g)
    return x


def last(s: Any, x: Tensor) -> Tensor:
    s.last = F.gelu(x)
    return s.last


def calls(s: Any, x: Tensor) -> Tensor:
    s.calls += 1
    return F.gelu(x)


for name, form in {
    "last": last,
    "calls": calls,
    "log": lambda s, x: log(F.gelu(x)),
    "in_place": lambda s, x: x.mul_(torch.sigmoid(1.702 * x)),
    "spoils": lambda s, x: (F.gelu(x), x.zero_())[0],
    "two": lambda s, x: (F.gelu(x), x),
    "view": lambda s, x: F.gelu(x).view(x.shape),
}.items():
    add(f"10-act-{name}", module(form, calls=0))
for name, form in {
    "2d": lambda s, x: F.gelu(x) if x.dim() != 2 else gelu_tanh(x),
    "1d": lambda s, x: F.gelu(x) if x.dim() == 1 else torch.relu(x),
    "4d": lambda s, x: torch.tanh(x) if x.dim() == 4 else F.gelu(x),
    "length": lambda s, x: F.gelu(x) * (2 if len(x) < 4 else 1),
    "mean": lambda s, x: F.gelu(x - 1e-9 * x.mean(-1, True)),
}.items():
    add(f"11-act-{name}", module(form))
for order in (("silu", "gelu"), ("gelu", "silu")):
    for name, holder in {
        "namespace": lambda k: types.SimpleNamespace(kind=k),
        "dict": lambda k: {"kind": k},
        "string": lambda k: k,
        "list": lambda k: [k],
    }.items():
        pick = {
            "namespace": lambda s: s.config.kind,
            "dict": lambda s: s.config["kind"],
            "string": lambda s: s.config,
            "list": lambda s: s.config[0],
        }[name]
        form = lambda s, x, pick=pick: _kinds(pick(s), x)  # noqa: E731
        makes = [module(form, config=lambda h=holder, k=k: h(k)) for k in order]
        add(f"5-act-{name}-{order[0]}", several(*makes))


def _kinds(kind: str, x: Tensor) -> Tensor:
    return x * torch.sigmoid(x) if kind == "silu" else gelu_tanh(x)


WIDE = {"gate": linear(), "up": linear(), "down": linear()}
UNIT = [(x,) for (x,) in ROWS if x.abs().max() < 1e3] + [(draw(2, 4, SIZE, scale=100.0),)]


def unit(form: Any, **more: Any) -> Any:
    """Returns a function that makes gated units with this forward."""
    return module(form, **(WIDE | more))


def swish(s: Any, x: Tensor) -> Tensor:
    """Swish-gated unit whose activation and dropouts are submodules."""
    h = s.act(s.gate(x)) * s.up(x)
    return s.out(s.down(s.drop(h)))


PARTS = {"act": nn.SiLU, "out": nn.Identity, "drop": nn.Identity}
UNITS: dict[str, Any] = {
    "swiglu": (lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)), {}),
    "up_first": (lambda s, x: s.down(s.up(x) * F.silu(s.gate(x))), {}),
    "geglu": (lambda s, x: s.down(F.gelu(s.gate(x)) * s.up(x)), {}),
    "tanh": (lambda s, x: s.down(gelu_tanh(s.gate(x)) * s.up(x)), {}),
    "packed": (lambda s, x: _packed(s, x, 0), {"gate": linear(SIZE, 2 * SIZE), "up": None}),
    "swapped": (lambda s, x: _packed(s, x, 1), {"gate": linear(SIZE, 2 * SIZE), "up": None}),
    "modules": (swish, PARTS),
    "adapter": (swish, PARTS | {"up": several(linear(SIZE, 4), linear(4, SIZE))}),
}


def _packed(s: Any, x: Tensor, first: int) -> Tensor:
    halves = s.gate(x).chunk(2, -1)
    return s.down(F.silu(halves[first]) * halves[1 - first])


for name, (form, given) in UNITS.items():
    add(f"0-unit-{name}", unit(form, **given), UNIT, dtypes=LOW)
    around = lambda _: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    add(f"12-unit-{name}-autocast", unit(form, **given), UNIT, around=around)

for limit in (1.0, 7.0, 100.0):
    for name, form in {
        "both": lambda s, g, u, a: F.silu(g.clamp(max=a)) * u.clamp(-a, a),
        "product": lambda s, g, u, a: (F.silu(g) * u).clamp(-a, a),
        "gate": lambda s, g, u, a: F.silu(g).clamp(max=a) * u,
        "branch": lambda s, g, u, a: F.silu(g) * u if u.abs().max() < a else g,
    }.items():
        form = lambda s, x, f=form, a=limit: s.down(f(s, s.gate(x), s.up(x), a))  # noqa: E731
        add(f"1-unit-{name}-{limit}", unit(form), UNIT)


class Dropped(nn.Module):
    """A dropout that is not torch's: it multiplies by a random mask itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x, 0.5)) * 2 if self.training else x


DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    Dropped,
)
for drop in DROPOUTS:
    for place in ("drop", "out", "act"):
        make = drop if drop is Dropped else lambda d=drop: d(0.5)
        if place == "act":
            make = several(nn.SiLU, make)
        add(f"3-unit-{drop.__name__}-{place}", unit(swish, **(PARTS | {place: make})), UNIT)
add("3-unit-noise", unit(lambda s, x: s.down(F.silu(s.gate(x)) * (s.up(x) + s.training))), UNIT)
add(
    "3-unit-functional",
    unit(lambda s, x: s.down(F.dropout(F.silu(s.gate(x)) * s.up(x), 0.5, s.training))),
    UNIT,
)

for name, form in {
    "up": lambda s, g, u: F.silu(g) * u.detach(),
    "gate": lambda s, g, u: F.silu(g.detach()) * u,
    "straight": lambda s, g, u: (g + (F.silu(g) - g).detach()) * u,
    "clipped": lambda s, g, u: ClippedGradient.apply(F.silu(g)) * u,
    "custom": lambda s, g, u: Straight.apply(g) * u,
    "hook": lambda s, g, u: _doubled(F.silu(g)) * u,
    "last": lambda s, g, u: setattr(s, "last", g) or F.silu(g) * u,
    "log": lambda s, g, u: log(F.silu(g)) * u,
    "rank": lambda s, g, u: F.silu(g) * (u if g.dim() != 2 else 2 * u),
    "in_place": lambda s, g, u: F.silu(g, inplace=True) * u + 0 * g,
    "nearly": lambda s, g, u: g * torch.sigmoid(1.0001 * g) * u,
    "offset": lambda s, g, u: F.silu(g) * (u + 1e-7),
}.items():
    add(f"6-unit-{name}", unit(lambda s, x, f=form: s.down(f(s, s.gate(x), s.up(x)))), UNIT)
add("6-unit-again", unit(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)) + 0 * s.up(x)), UNIT)
add("6-unit-spoils", unit(lambda s, x: (s.down(F.silu(s.gate(x)) * s.up(x)), x.zero_())[0]), UNIT)
add("6-unit-between", unit(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x.mul_(2)))), UNIT)
for kinds in (("silu", "gelu"), ("gelu", "silu")):
    form = lambda s, x: s.down(getattr(F, s.config.kind)(s.gate(x)) * s.up(x))  # noqa: E731
    makes = [unit(form, config=lambda k=k: types.SimpleNamespace(kind=k)) for k in kinds]
    add(f"5-unit-{kinds[0]}", several(*makes), UNIT)


def hooked(child: str, kind: str) -> Any:
    """An action that adds a hook to a child. The hook changes a tensor or appends to ``EVENTS``."""

    def act(model: nn.Module) -> None:
        target: Any = model.get_submodule(child)
        if kind == "result":
            target.register_forward_hook(lambda m, a, y: 1.5 * y)
        elif kind == "input":
            target.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
        elif kind == "backward":
            target.register_full_backward_hook(lambda m, g, h: (2 * g[0],))
        elif kind == "always":
            target.register_forward_hook(lambda m, a, o, y: log(None), with_kwargs=True)
        elif kind == "patched":
            target.forward = lambda x: 3 * type(target).forward(target, x)

    return act


for child in ("act", "gate", "down", "drop", ""):
    for kind in ("result", "input", "backward", "always", "patched"):
        for when in ("before", "after"):
            given = PARTS | {"drop": lambda: nn.Dropout(0.0)}
            more = {when: hooked(child, kind)}
            add(f"7-unit-{child or 'unit'}-{kind}-{when}", unit(swish, **given), UNIT[:3], **more)
given = PARTS | {"drop": lambda: nn.Dropout(0.0)}
for child, make in {
    "act": nn.Tanh,
    "act ": lambda: nn.GELU(),
    "gate": linear(bias=False),
    "down": several(linear(), nn.Tanh),
    "up": nn.Identity,
    "drop": nn.Tanh,
    "drop ": lambda: nn.Dropout(0.5),
    "out": nn.Sigmoid,
}.items():
    add(
        f"7-unit-{child}-exchanged{make is nn.Tanh}",
        unit(swish, **given),
        UNIT[:3],
        after=put(child.strip(), make),
    )
add("7-unit-act-p", unit(swish, **given), UNIT[:3], after=put("drop.p", lambda: 0.5))
add("7-unit-act-mode", unit(swish, **(given | {"act": lambda: nn.RReLU(0.1, 0.9)})), UNIT[:3])
