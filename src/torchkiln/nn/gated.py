"""Modules of the gated linear units."""

from typing import Literal

from torch import Tensor, nn

from torchkiln.ops.activation import is_tanh
from torchkiln.ops.gated import geglu, swiglu


class SwiGLU(nn.Module):
    """``silu(gate) * up``.

    Shape:
        gate, up and output of one shape. Without up, gate is ``[..., 2 * columns]``: the first
        half of its last dimension is the gate, the second half is up.
    """

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Applies the op."""
        return swiglu(gate, up)


class GEGLU(nn.Module):
    """``gelu(gate) * up``.

    Args:
        approximate: ``"none"``, or ``"tanh"`` for the approximation by a hyperbolic tangent.

    Shape:
        as for :class:`SwiGLU`.
    """

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        is_tanh(approximate, "nn.GEGLU")
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Applies the op."""
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"approximate={self.approximate!r}"
