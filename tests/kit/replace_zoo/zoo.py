"""The list of cases, and what the modules of the zoo are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replace_zoo.judge import no_context, same
from replace_zoo.seen import EVENTS, MODES, Action, Inputs, Mode

Make = Callable[[], nn.Module]
Forward = Callable[..., Any]

SIZE = 16


@dataclass(frozen=True)
class Case:
    """A model and how it is changed and called."""

    make: Make
    inputs: Inputs
    change: str = "replace"
    before: Action | None = None
    after: Action | None = None
    around: Action = no_context
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    modes: Sequence[Callable[[], Mode]] = MODES
    alone: bool = False
    """Whether it needs a process of its own, which a fault may crash."""

    def problems(self) -> list[str]:
        """What the change does to the model, by dtype."""
        return [
            f"{dtype}: {text}"
            for dtype in self.dtypes
            for text in same(
                self.make,
                self.inputs,
                self.change,
                dtype=dtype,
                before=self.before,
                after=self.after,
                around=self.around,
                modes=self.modes,
            )
        ]


CASES: dict[str, Case] = {}
"""By names that begin with the number of the fault that they look for."""


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers, always the same ones for a shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(scale).float()


def ranks(size: int = SIZE) -> list[tuple[Tensor]]:
    """Rows of one to four dimensions and magnitudes from 1e-3 to 1e5."""
    scales = {(size,): 1.0, (3, size): 60.0, (2, 3, size): 1.0, (2, 4, size): 1e-3}
    scales |= {(2, 2, 3, size): 1e5, (2, 2, size): 1e3, (4, size): 8.0}
    return [(draw(*shape, scale=scale),) for shape, scale in scales.items()]


def images(channels: int = 4, scale: float = 1.0) -> list[tuple[Tensor]]:
    """Images of both layouts and several magnitudes."""
    x = draw(2, channels, 5, 5, scale=scale)
    return [(x,), (x.to(memory_format=torch.channels_last) * 3 + 1,), (30 * x - 2,)]


ROWS = ranks()
IMAGES = images()


def add(name: str, make: Make, inputs: Inputs = ROWS, change: str = "replace", **more: Any) -> None:
    """Add a case."""
    assert name not in CASES, name
    CASES[name] = Case(make, inputs, change, **more)


def rms(x: Tensor, eps: Any = 1e-6) -> Tensor:
    """An RMS norm without a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def centre(x: Tensor, eps: float = 1e-5) -> Tensor:
    """A layer norm without parameters."""
    d = x - x.mean(-1, keepdim=True)
    return d / (d.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def gelu_tanh(x: Tensor) -> Tensor:
    """The usual approximation by hand."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


def module(forward: Forward, **attributes: Any) -> Make:
    """Makes modules with a forward; tensors and functions without arguments are called or copied.

    An attribute that is a function is called for each module, so that modules share nothing but
    the class, which is that of the forward.
    """

    def made() -> nn.Module:
        new: Any = class_of(forward)()
        for name, value in attributes.items():
            setattr(new, name, value() if callable(value) else value)
        return new

    return made


@functools.cache
def class_of(forward: Forward) -> type[nn.Module]:
    """The class of modules with a forward."""
    return type("Zoo", (nn.Module,), {"forward": forward})


def weight(size: int = SIZE) -> nn.Parameter:
    """A weight near 1."""
    return nn.Parameter(1 + 0.3 * torch.randn(size))


def bias(size: int = SIZE) -> nn.Parameter:
    """A bias."""
    return nn.Parameter(torch.randn(size))


def linear(one: int = SIZE, other: int = SIZE, **options: Any) -> Callable[[], nn.Linear]:
    """Makes linear layers."""
    return lambda: nn.Linear(one, other, **options)


def norm(forward: Forward, **attributes: Any) -> Make:
    """Makes norms with a weight, and with a bias if the forward reads one."""
    given = {"bias": bias} if "bias" in forward.__code__.co_names else {}
    return module(forward, weight=weight, **given, **attributes)


def several(*makes: Make) -> Make:
    """Makes a sequence."""
    return lambda: nn.Sequential(*(make() for make in makes))


def log(x: Any) -> Any:
    """An effect outside of the module."""
    EVENTS.append("log")
    return x


def put(path: str, make: Callable[[], Any]) -> Action:
    """An action that sets an attribute of a submodule."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, make())


class Straight(torch.autograd.Function):
    """GELU with the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0]


class Guided(torch.autograd.Function):
    """Relu whose gradient is that of positive numbers alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(min=0) * (ctx.saved_tensors[0] > 0)


class ClippedGradient(torch.autograd.Function):
    """The identity with a clipped gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0].clamp(-0.1, 0.1)
