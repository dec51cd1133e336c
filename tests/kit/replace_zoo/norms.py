"""Norms that differ slightly from torchkiln's."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import Tensor, nn

from replace_zoo.zoo import (
    ROWS,
    SIZE,
    ClippedGradient,
    add,
    bias,
    centre,
    draw,
    linear,
    log,
    module,
    norm,
    ranks,
    rms,
    several,
    weight,
)


@dataclasses.dataclass
class Config:
    """A configuration that holds the eps of a norm."""

    eps: float


FORMS = {
    "rms": lambda s, x: rms(x) * s.weight,
    "rms_plain": lambda s, x: rms(x),
    "rms_division": lambda s, x: s.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    "rms_wide": lambda s, x: s.weight * rms(x.float()).to(x.dtype),
    "rms_offset": lambda s, x: (rms(x.float()) * (1 + s.weight.float())).to(x.dtype),
    "rms_norm_of_x": lambda s, x: x / (x.norm(dim=-1, keepdim=True) * SIZE**-0.5 + 1e-8) * s.weight,
    "layer": lambda s, x: centre(x) * s.weight + s.bias,
    "layer_var": lambda s, x: (
        s.weight * (x - x.mean(-1, True)) / (x.var(-1, True, False) + 1e-5).sqrt() + s.bias
    ),
    "functional": lambda s, x: nn.functional.layer_norm(x, (SIZE,), s.weight, s.bias, 1e-5),
    "layer_sample_var": lambda s, x: (
        s.weight * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-6) + s.bias
    ),
}
LOW = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
for name, form in FORMS.items():
    add(f"0-norm-{name}", norm(form), [*ROWS, (draw(0, SIZE),)], dtypes=LOW)
    cold = {"weight": lambda: weight().detach(), "bias": lambda: bias().detach()}  # no Parameters
    add(f"0-norm-{name}-buffers", module(form, **cold))
    turned = draw(2, SIZE, 3).transpose(1, 2), draw(2, 3, 4, SIZE).permute(0, 2, 1, 3)
    sliced = draw(2, 3, 2 * SIZE)[..., ::2]
    add(f"14-norm-{name}-strides", norm(form), [(x,) for x in (*turned, sliced)])
    strange = draw(3, SIZE)
    strange[0, 1], strange[1, 2], strange[2, 3] = torch.inf, -torch.inf, torch.nan
    add(f"0-norm-{name}-strange", norm(form), [(strange,)])
    bfloat = lambda _: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    add(f"12-norm-{name}-autocast", several(linear(), norm(form)), around=bfloat)
    add(f"0-norm-{name}-mixed", several(lambda: Half(), norm(form)))

for name, make in {
    "layer": lambda: nn.LayerNorm(SIZE),
    "rms": lambda: nn.RMSNorm(SIZE),
    "plain": lambda: nn.LayerNorm(SIZE, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(4, SIZE),
    "two": lambda: nn.LayerNorm((3, SIZE)),
}.items():
    rows = [(draw(2, SIZE, 3),), (draw(4, SIZE),)] if name == "group" else ROWS
    add(f"0-torch-norm-{name}", make, rows, dtypes=LOW)


class Half(nn.Module):
    """Casts to bfloat16, before a norm of another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class Float32(nn.Module):
    """A norm without a weight that computes and returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return rms(x.float())


add("12-returns-float32", several(linear(), Float32), around=bfloat)
add("12-returns-float32-mixed", several(Half, Float32))

CLAMPS = {
    "wide": lambda s, x: rms(x.clamp(-1e3, 1e3)) * s.weight,
    "near": lambda s, x: rms(x.clamp(-40, 40)) * s.weight,
    "result": lambda s, x: (rms(x) * s.weight).clamp(-3.9, 3.9),
    "variance": lambda s, x: (
        x / x.pow(2).mean(-1, True).clamp(min=1e-12, max=1e8).sqrt() * s.weight
    ),
    "nan_to_num": lambda s, x: rms(torch.nan_to_num(x, 0.0, 1e4, -1e4)) * s.weight,
    "where": lambda s, x: rms(torch.where(x.abs() > 900, 900.0, x)) * s.weight,
    "minimum": lambda s, x: rms(x.minimum(x.new_tensor(500.0))) * s.weight,
    "layer": lambda s, x: centre(x.clamp(-1e3, 1e3)) * s.weight + s.bias,
    "layer_result": lambda s, x: (centre(x) * s.weight + s.bias).clamp(max=1.5),
    "tanh": lambda s, x: rms(1e7 * torch.tanh(x / 1e7)) * s.weight,
    "branch_on_value": lambda s, x: rms(x) * s.weight * (2 if x.abs().max() > 20 else 1),
    "branch_on_item": lambda s, x: rms(x) * s.weight if x.sum().item() > -50 else x,
    "branch_on_nan": lambda s, x: x if torch.isnan(x).any() or x.max() > 1e4 else rms(x) * s.weight,
    "large_weight": lambda s, x: (1e4 * rms(x) * s.weight).clamp(-3e4, 3e4) / 1e4,
}
for name, form in CLAMPS.items():
    add(f"1-norm-{name}", norm(form))

NOISY = {
    "noise": lambda s, x: rms(x + torch.randn_like(x) if s.training else x) * s.weight,
    "scaled": lambda s, x: rms(x) * s.weight * (1.5 if s.training else 1),
    "in_eval": lambda s, x: rms(x) * (s.weight if s.training else 2 * s.weight),
    "dropout": lambda s, x: nn.functional.dropout(rms(x), 0.3, s.training) * s.weight,
    "grad_mode": lambda s, x: rms(x) * s.weight * (2 if torch.is_grad_enabled() else 1),
    "autocast": lambda s, x: rms(x) * s.weight * (2 if torch.is_autocast_enabled("cpu") else 1),
    "requires_grad": lambda s, x: rms(x) * s.weight * (2 if x.requires_grad else 1),
    "always": lambda s, x: rms(x) * s.weight + 1e-9 * torch.rand(()),
    "unused": lambda s, x: (torch.rand(1), rms(x) * s.weight)[1],
}
for name, form in NOISY.items():
    around = (lambda _: torch.autocast("cpu", torch.bfloat16)) if name == "autocast" else None
    add(f"2-norm-{name}", norm(form), **({"around": around} if around else {}))


def by_config(s: Any, x: Tensor) -> Tensor:
    return rms(x, s.config.eps) * s.weight


def by_key(s: Any, x: Tensor) -> Tensor:
    return rms(x, s.config["eps"]) * s.weight


HOLDERS: dict[str, Any] = {
    "namespace": (by_config, lambda e: types.SimpleNamespace(eps=e)),
    "dataclass": (by_config, Config),
    "class": (by_config, lambda e: type("Settings", (), {"eps": e})),
    "dict": (by_key, lambda e: {"eps": e}),
    "nested": (lambda s, x: rms(x, s.config["norm"][0]) * s.weight, lambda e: {"norm": [e]}),
    "list": (lambda s, x: rms(x, s.config[0]) * s.weight, lambda e: [e]),
    "tensor": (lambda s, x: rms(x, s.config) * s.weight, torch.tensor),
    "closure": (lambda s, x: rms(x, s.config()) * s.weight, lambda e: lambda: lambda: e),
    "attribute": (lambda s, x: rms(x, s.config) * s.weight, float),
    "none": (lambda s, x: rms(x, s.config or 1e-6) * s.weight, lambda e: e if e > 1e-5 else None),
}
for name, (form, holder) in HOLDERS.items():
    pair = [norm(form, config=lambda h=holder, e=e: h(e)) for e in (1e-4, 1e-6)]
    if name == "closure":
        pair = [norm(form, config=holder(e)) for e in (1e-4, 1e-6)]
    tiny = ranks()[3:4] + [(draw(4, SIZE, scale=1e-2),)]
    for order in (1, -1):
        add(f"5-norm-{name}-{order}", several(*pair[::order]), tiny)

DETACHED = {
    "variance": lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6).detach() * s.weight,
    "weight": lambda s, x: rms(x) * s.weight.detach(),
    "input": lambda s, x: rms(x.detach()) * s.weight,
    "mean": lambda s, x: centre(x - x.mean(-1, True).detach()) * s.weight,
    "straight": lambda s, x: (x + (rms(x) - x).detach()) * s.weight,
    "clipped": lambda s, x: ClippedGradient.apply(rms(x)) * s.weight,
    "no_grad": lambda s, x: rms(x) * s.weight if s.training else _without(s, x),
    "half_weight": lambda s, x: rms(x) * (0.5 * s.weight + 0.5 * s.weight.detach()),
    "hook": lambda s, x: _hooked(rms(x)) * s.weight,
}


@torch.no_grad()
def _without(s: Any, x: Tensor) -> Tensor:
    return rms(x) * s.weight


def _hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: 2 * g)
    return x


for name, form in DETACHED.items():
    add(f"6-norm-{name}", norm(form))


def counts(s: Any, x: Tensor) -> Tensor:
    s.calls += 1
    return rms(x) * s.weight


def remembers(s: Any, x: Tensor) -> Tensor:
    s.last = y = rms(x) * s.weight
    return y


def appends(s: Any, x: Tensor) -> Tensor:
    s.kept.append(x.shape)
    return rms(x) * s.weight


def running(s: Any, x: Tensor) -> Tensor:
    s.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
    return rms(x) * s.weight


def in_place(s: Any, x: Tensor) -> Tensor:
    return x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).mul_(s.weight)


def spoils(s: Any, x: Tensor) -> Tensor:
    y = rms(x) * s.weight
    x.mul_(0)
    return y


EFFECTS: dict[str, Any] = {
    "calls": (counts, {"calls": 0}),
    "last": (remembers, {}),
    "list": (appends, {"kept": list}),
    "buffer": (running, {"mean": lambda: nn.Parameter(torch.zeros(()), requires_grad=False)}),
    "in_place": (in_place, {}),
    "spoils": (spoils, {}),
    "log": (lambda s, x: log(rms(x) * s.weight), {}),
    "every_third": (lambda s, x: counts(s, x) * (1 if s.calls % 3 else 2), {"calls": 0}),
    "raises": (lambda s, x: _refuse(x) * s.weight, {}),
}


def _refuse(x: Tensor) -> Tensor:
    if x.dim() == 2:
        raise ValueError("two dimensions")
    return rms(x)


for name, (form, given) in EFFECTS.items():
    add(f"10-norm-{name}", norm(form, **given))

RANKS = {
    "permute": lambda s, x: (
        (rms(x.mT).mT if x.dim() == 4 and x.shape[2] == SIZE else rms(x)) * s.weight
    ),
    "2d": lambda s, x: (rms(x) if x.dim() != 2 else rms(x) * 2) * s.weight,
    "1d": lambda s, x: (rms(x) if x.dim() > 1 else x) * s.weight,
    "4d": lambda s, x: rms(x) * s.weight * (x.dim() == 4 or 2),
    "size": lambda s, x: rms(x) * s.weight * (x.shape[0] if x.shape[0] > 3 else 1),
    "contiguous": lambda s, x: rms(x) * s.weight * (1 if x.is_contiguous() else 2),
    "numel": lambda s, x: rms(x) * s.weight if x.numel() < 150 else x,
    "dim_of_mean": lambda s, x: (
        x * (x.pow(2).mean(x.dim() - 1 or -1, True) + 1e-6).rsqrt() * s.weight
    ),
    "last_of_3": lambda s, x: (
        x * (x.pow(2).mean(min(2, x.dim() - 1), True) + 1e-6).rsqrt() * s.weight
    ),
    "dtype": lambda s, x: rms(x) * s.weight * (1 if x.dtype == torch.float64 else 2),
}
for name, form in RANKS.items():
    more = [(draw(2, SIZE, 3).transpose(1, 2),), (draw(2, 2, SIZE, SIZE),)]
    add(f"11-norm-{name}", norm(form), [*ROWS, *more])
add("11-norm-keyword", norm(lambda s, x, scale=1.0: rms(x) * s.weight * scale),
    [*ROWS[:2], (*ROWS[2], {"scale": 3.0}), (*ROWS[3], 0.5)])  # fmt: skip
add("11-norm-optional", norm(lambda s, x, gate=None: rms(x if gate is None else x * gate) * s.weight),
    [*ROWS[:2], (ROWS[2][0], 2 * ROWS[2][0]), (ROWS[2][0], {"gate": ROWS[2][0] + 1})])  # fmt: skip

GATED = {
    "first": lambda s, x, z: rms(x * nn.functional.silu(z)) * s.weight,
    "second": lambda s, x, z: rms(x) * s.weight * nn.functional.silu(z),
    "clamped": lambda s, x, z: rms(x) * s.weight * nn.functional.silu(z.clamp(-30, 30)),
    "limited": lambda s, x, z: rms(x) * s.weight * nn.functional.silu(z).clamp(max=20),
    "detached": lambda s, x, z: rms(x) * s.weight * nn.functional.silu(z.detach()),
    "noisy": lambda s, x, z: (
        rms(x + torch.rand_like(x) * s.training) * s.weight * nn.functional.silu(z)
    ),
    "remembers": lambda s, x, z: setattr(s, "last", z) or rms(x) * s.weight * nn.functional.silu(z),
    "rank": lambda s, x, z: rms(x) * s.weight * nn.functional.silu(z if z.dim() == 3 else 2 * z),
    "gate_grad": lambda s, x, z: rms(x) * s.weight * ClippedGradient.apply(nn.functional.silu(z)),
}
for name, form in GATED.items():
    add(f"1-gated-norm-{name}", norm(form), [(x, x.flip(-1) * 2) for (x,) in ROWS],
        dtypes=(torch.float32, torch.bfloat16) if name in ("first", "second") else (torch.float32,))  # fmt: skip
