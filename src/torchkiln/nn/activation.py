"""Modules of the activations, with the names and arguments of :mod:`torch.nn` where it has them."""

from typing import Literal

from torch import Tensor, nn

from torchkiln.ops.activation import (
    gelu,
    is_tanh,
    quick_gelu,
    relu,
    relu2,
    relu_,
    sigmoid,
    silu,
    silu_,
    tanh,
)


class ReLU(nn.ReLU):
    """``max(x, 0)``.

    Args:
        inplace: whether the input is overwritten.

    Shape:
        any.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return relu_(input) if self.inplace else relu(input)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return "inplace=True" if self.inplace else ""


class ReLU2(nn.Module):
    """``max(x, 0)**2``, of any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Applies the op to ``x``."""
        return relu2(x)


class SiLU(nn.SiLU):
    """``x / (1 + exp(-x))``.

    Args:
        inplace: whether the input is overwritten.

    Shape:
        any.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return silu_(input) if self.inplace else silu(input)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return "inplace=True" if self.inplace else ""


class GELU(nn.GELU):
    """``x * F(x)``, where ``F`` is the cumulative normal distribution.

    Args:
        approximate: ``"none"``, or ``"tanh"`` for the approximation by a hyperbolic tangent.

    Shape:
        any.
    """

    approximate: Literal["none", "tanh"]

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        is_tanh(approximate, "nn.GELU")
        super().__init__(approximate)

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return gelu(input, self.approximate)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"approximate={self.approximate!r}"


class QuickGELU(nn.Module):
    """``x / (1 + exp(-1.702 * x))``, of any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Applies the op to ``x``."""
        return quick_gelu(x)


class Sigmoid(nn.Sigmoid):
    """``1 / (1 + exp(-x))``, of any shape."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return sigmoid(input)


class Tanh(nn.Tanh):
    """The hyperbolic tangent, of any shape."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return tanh(input)
