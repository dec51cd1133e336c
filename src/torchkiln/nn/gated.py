"""Modules of the gated linear units."""

from torch import Tensor, nn

from torchkiln.ops.activation import is_tanh
from torchkiln.ops.gated import geglu, swiglu


class SwiGLU(nn.Module):
    """``silu(gate) * up``.

    Shape:
        gate and up of any one shape, which is the output's; or gate alone, ``[..., 2 * columns]``,
        whose halves along the last dimension are gate and up.
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

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        is_tanh(approximate, "nn.GEGLU")
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Applies the op."""
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"approximate={self.approximate!r}"
