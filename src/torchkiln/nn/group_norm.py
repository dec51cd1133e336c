"""The module of group norm: a subclass of torch's that replaces ``forward``."""

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_act, check_eps
from torchkiln.ops.group_norm import group_norm
from torchkiln.typing import Activation, Device


class GroupNorm(nn.GroupNorm):
    """``act(group_norm(x))``; a :class:`torch.nn.GroupNorm` with its ``state_dict``.

    Args:
        num_groups: a divisor of ``num_channels``.
        num_channels: the channels of the input.
        eps: a number of at least 0.
        affine: whether the module has a weight, initially 1, and a bias, initially 0.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether an affine module has a bias.
        act: an activation, or none.

    Shape:
        input and output ``[batch, num_channels, ...]``.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        act: Activation = "none",
    ) -> None:
        eps = check_eps("nn.GroupNorm", eps)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:  # older versions of torch have no such argument
            self.register_parameter("bias", None)
        self.act = check_act("nn.GroupNorm", act)

    def forward(self, input: Tensor) -> Tensor:
        """Applies the op to ``input``."""
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, act=self.act)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{super().extra_repr()}, act={self.act!r}"
