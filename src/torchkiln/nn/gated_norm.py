"""The module of the gated RMS norm: a subclass of torch's RMS norm with a second argument."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_eps
from torchkiln.nn.norm import reset_weight
from torchkiln.ops.gated_norm import gated_rms_norm
from torchkiln.typing import Device


class GatedRMSNorm(nn.RMSNorm):
    """``rms_norm(x) * silu(gate)``, or ``rms_norm(x * silu(gate))``; a :class:`torch.nn.RMSNorm`.

    Args:
        normalized_shape: the last sizes of the input, or the last one.
        eps: a number of at least 0; None for the machine epsilon of the dtype of computation.
        elementwise_affine: whether the module has a weight, initially ``1 - offset``.
        device: of the parameters.
        dtype: of the parameters.
        gate_first: whether the gate is applied before the norm.
        groups: number of equal parts of the last dimension that are normalized separately.
        offset: a number that is added to the weight.

    Shape:
        x, gate and output ``[..., *normalized_shape]``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        gate_first: bool = False,
        groups: int = 1,
        offset: float = 0.0,
    ) -> None:
        check_eps("nn.GatedRMSNorm", eps)
        self.gate_first, self.groups, self.offset = gate_first, groups, offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Sets ``offset + weight`` to 1."""
        super().reset_parameters()
        reset_weight(self.weight, self.offset)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Applies the op."""
        return gated_rms_norm(
            x,
            gate,
            self.normalized_shape,
            self.weight,
            self.eps,
            gate_first=self.gate_first,
            groups=self.groups,
            offset=self.offset,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        said = super().extra_repr()
        said += ", gate_first=True" if self.gate_first else ""
        said += f", groups={self.groups}" if self.groups != 1 else ""
        return said + (f", offset={self.offset}" if self.offset else "")
