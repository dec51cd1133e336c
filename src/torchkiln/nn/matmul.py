"""The linear layer."""

import torch
from torch import Tensor, nn

from torchkiln.ops.matmul import linear


class Linear(nn.Linear):
    """``act(x @ weight.T * scale + bias) + residual``, fused.

    Parameters, initial values and ``state_dict`` are the same as in :class:`torch.nn.Linear`.

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
        act: str = "none",
        scale: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.act = act
        self.scale = scale

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``input``."""
        return linear(input, self.weight, self.bias, self.act, self.scale, residual)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{super().extra_repr()}, act={self.act!r}, scale={self.scale}"
