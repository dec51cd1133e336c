"""Modules of the norms: subclasses of torch's modules that replace ``forward`` only."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_eps, check_round
from torchkiln.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torchkiln.typing import Device, Rounding


def reset_weight(weight: Tensor | None, offset: float) -> None:
    """Sets ``offset + weight`` to 1."""
    if weight is not None and offset:
        nn.init.constant_(weight, 1 - offset)


def settings(offset: float, round: Rounding) -> str:
    """Settings that differ from the defaults, for ``repr``."""
    said = f", offset={offset}" if offset else ""
    return said + (f", round={round!r}" if round != "once" else "")


class LayerNorm(nn.LayerNorm):
    """``(x - mean) / sqrt(variance + eps) * (offset + weight) + bias``; a torch.nn.LayerNorm.

    Args:
        normalized_shape: the last sizes of the input, or the last one.
        eps: a number of at least 0.
        elementwise_affine: whether the module has a weight, initially ``1 - offset``, and a bias,
            initially 0.
        bias: whether the module has a bias.
        device: of the parameters.
        dtype: of the parameters.
        offset: a number that is added to the weight.
        round: ``"once"``, or ``"input"``, as for :func:`torchkiln.layer_norm`.

    Shape:
        input and output ``[..., *normalized_shape]``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        round: Rounding = "once",
    ) -> None:
        name = f"nn.{type(self).__name__}"
        self.offset, self.round = offset, check_round(name, round)
        check_eps(name, eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Sets ``offset + weight`` to 1, the bias to 0."""
        super().reset_parameters()
        reset_weight(self.weight, self.offset)

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            offset=self.offset,
            round=self.round,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return super().extra_repr() + settings(self.offset, self.round)


class AddLayerNorm(LayerNorm):
    """``(layer_norm(total), total)`` with ``total = input + residual``.

    The arguments are those of :class:`LayerNorm`.

    Shape:
        input, residual and both outputs ``[..., *normalized_shape]``.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Applies the op."""
        return add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            offset=self.offset,
            round=self.round,
        )


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x**2) + eps) * (offset + weight)``; a :class:`torch.nn.RMSNorm`.

    Args:
        normalized_shape: the last sizes of the input, or the last one.
        eps: a number of at least 0; None for the machine epsilon of the dtype of computation.
        elementwise_affine: whether the module has a weight, initially ``1 - offset``.
        device: of the parameters.
        dtype: of the parameters.
        offset: a number that is added to the weight.
        round: as for :class:`LayerNorm`.

    Shape:
        input and output ``[..., *normalized_shape]``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        round: Rounding = "once",
    ) -> None:
        name = f"nn.{type(self).__name__}"
        self.offset, self.round = offset, check_round(name, round)
        check_eps(name, eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Sets ``offset + weight`` to 1."""
        super().reset_parameters()
        reset_weight(self.weight, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the op to ``x``."""
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            offset=self.offset,
            round=self.round,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return super().extra_repr() + settings(self.offset, self.round)


class AddRMSNorm(RMSNorm):
    """``(rms_norm(total), total)`` with ``total = x + residual``.

    The arguments are those of :class:`RMSNorm`.

    Shape:
        x, residual and both outputs ``[..., *normalized_shape]``.
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Applies the op."""
        return add_rms_norm(
            x,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            offset=self.offset,
            round=self.round,
        )
