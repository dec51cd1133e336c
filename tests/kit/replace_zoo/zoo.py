"""The list of cases, and parts from which modules of the zoo are made."""

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
    """A model, its change, and the calls that are compared."""

    make: Make
    inputs: Inputs
    change: str = "replace"
    before: Action | None = None
    after: Action | None = None
    around: Action = no_context
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    modes: Sequence[Callable[[], Mode]] = MODES
    alone: bool = False
    """Whether the case runs in a process of its own, because a fault may crash it."""

    def problems(self) -> list[str]:
        """Differences between the changed model and the original, each with its dtype."""
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
"""Cases by name. A name begins with the number of the fault that the case would show."""


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers; the same ones for each call with the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(scale).float()


def ranks(size: int = SIZE) -> list[tuple[Tensor]]:
    """Tensors of one to four dimensions, with magnitudes from 1e-3 to 1e5."""
    scales = {(size,): 1.0, (3, size): 60.0, (2, 3, size): 1.0, (2, 4, size): 1e-3}
    scales |= {(2, 2, 3, size): 1e5, (2, 2, size): 1e3, (4, size): 8.0}
    return [(draw(*shape, scale=scale),) for shape, scale in scales.items()]


def images(channels: int = 4, scale: float = 1.0) -> list[tuple[Tensor]]:
    """Images in NCHW and channels-last, with several magnitudes."""
    x = draw(2, channels, 5, 5, scale=scale)
    return [(x,), (x.to(memory_format=torch.channels_last) * 3 + 1,), (30 * x - 2,)]


ROWS = ranks()
IMAGES = images()


def add(name: str, make: Make, inputs: Inputs = ROWS, change: str = "replace", **more: Any) -> None:
    """Add a case to ``CASES``."""
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
    """The tanh approximation of GELU, written out."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


def module(forward: Forward, **attributes: Any) -> Make:
    """Returns a function that makes modules with this forward and these attributes.

    An attribute that can be called is called for each module, so that modules share only their
    class. There is one class per forward.
    """

    def made() -> nn.Module:
        new: Any = class_of(forward)()
        for name, value in attributes.items():
            setattr(new, name, value() if callable(value) else value)
        return new

    return made


@functools.cache
def class_of(forward: Forward) -> type[nn.Module]:
    """A class of modules with this forward; the same one in each call."""
    return type("Zoo", (nn.Module,), {"forward": forward})


def weight(size: int = SIZE) -> nn.Parameter:
    """A weight near 1."""
    return nn.Parameter(1 + 0.3 * torch.randn(size))


def bias(size: int = SIZE) -> nn.Parameter:
    """A bias."""
    return nn.Parameter(torch.randn(size))


def linear(one: int = SIZE, other: int = SIZE, **options: Any) -> Callable[[], nn.Linear]:
    """Returns a function that makes linear layers."""
    return lambda: nn.Linear(one, other, **options)


def norm(forward: Forward, **attributes: Any) -> Make:
    """Returns a function that makes norms with a weight, and a bias if the forward reads one."""
    given = {"bias": bias} if "bias" in forward.__code__.co_names else {}
    return module(forward, weight=weight, **given, **attributes)


def several(*makes: Make) -> Make:
    """Returns a function that makes a sequence of modules."""
    return lambda: nn.Sequential(*(make() for make in makes))


def log(x: Any) -> Any:
    """Returns x and appends to ``EVENTS``, an effect outside of the module."""
    EVENTS.append("log")
    return x


def put(path: str, make: Callable[[], Any]) -> Action:
    """An action that sets the attribute at ``path`` of the model."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, make())


class Straight(torch.autograd.Function):
    """GELU whose backward passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0]


class Guided(torch.autograd.Function):
    """Relu whose backward passes on only positive gradients, where x is positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(min=0) * (ctx.saved_tensors[0] > 0)


class ClippedGradient(torch.autograd.Function):
    """The identity; its backward clips the gradient to +-0.1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0].clamp(-0.1, 0.1)
