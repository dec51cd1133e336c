"""The linear layer."""

from typing import cast

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import ACTIVATIONS, check_act
from torchkiln.ops.matmul import linear


class Linear(nn.Linear):
    """``act(x @ weight.T * scale + bias) + residual``, fused.

    Parameters, initial values and ``state_dict`` are the same as in :class:`torch.nn.Linear`, and
    so is the order of positional arguments: a device and a dtype may follow ``bias``.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether the layer has a bias.
        act: one of none, square, relu, gelu, gelu_tanh, silu, sigmoid, tanh.
        scale: a fixed factor.

    Shape:
        input ``[..., in_features]``; output and optional residual ``[..., out_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act: str | torch.device | None = "none",
        scale: float | torch.dtype | None = 1.0,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if is_device(act):
            device, act = cast("torch.device | str | int | None", act), "none"
        if scale is None or isinstance(scale, torch.dtype):
            dtype, scale = scale or dtype, 1.0
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.act = check_act("nn.Linear", act)
        self.scale = scale

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``input``."""
        return linear(input, self.weight, self.bias, self.act, self.scale, residual)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{super().extra_repr()}, act={self.act!r}, scale={self.scale}"


def is_device(value: object) -> bool:
    """Whether the fourth argument is a device, as in torch, and not an activation."""
    if isinstance(value, str) and value not in ACTIVATIONS:
        try:
            torch.device(value)
        except RuntimeError:
            return False
        return True
    return value is None or isinstance(value, (int, torch.device))
