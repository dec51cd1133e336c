"""The linear layer, and pairs of layers with an activation or a gate between them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import (
    check_act,
    check_gate,
    check_precision,
    check_save,
    check_unquantized,
)
from torchkiln.nn.quantize import product, weight_of
from torchkiln.ops._pair_fp8 import activated, gated, pair
from torchkiln.ops.matmul import gated_mlp, linear, mlp
from torchkiln.ops.quantize import Quantized
from torchkiln.typing import Activation, Device, Gate, Precision, Saved


class Linear(nn.Linear):
    """``act(x @ weight.T * scale + bias) + residual``, fused.

    A :class:`torch.nn.Linear`, with its parameters, initial values and ``state_dict``.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether the layer has a bias.
        device: of the parameters.
        dtype: of the parameters.
        act: an activation of :data:`torchkiln.typing.Activation`.
        scale: a fixed factor.

    Shape:
        input ``[..., in_features]``; output and optional residual ``[..., out_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: Activation = "none",
        scale: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.act = check_act("nn.Linear", act)
        self.scale = scale

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``input``."""
        return linear(
            input, self.weight, self.bias, act=self.act, scale=self.scale, residual=residual
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{super().extra_repr()}, act={self.act!r}, scale={self.scale}"


class MLP(nn.Module):
    """``act(x @ up.weight.T + up.bias) @ down.weight.T + down.bias`` as one op of autograd.

    ``up`` and ``down`` are :class:`torch.nn.Linear` and hold the parameters; forward and hooks of
    these submodules are not called.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size between the layers; None for 4 times ``in_features``.
        out_features: size of the last dimension of the output; None for ``in_features``.
        bias: whether the layers have a bias.
        act: an activation, or none.
        save: as for :func:`torchkiln.mlp`.
        precision: as for :func:`torchkiln.mlp`, with weights quantised once per version.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        input ``[..., in_features]``, with ``precision`` a tensor or quantised; output
        ``[..., out_features]``.
    """

    precision: Precision | None = None

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias: bool = True,
        *,
        act: Activation = "gelu",
        save: Saved = "preact",
        precision: Precision | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.act = check_act("nn.MLP", act)
        self.save = check_save("nn.MLP", save)
        self.precision = check_precision("nn.MLP", precision)
        self.up = nn.Linear(in_features, hidden, bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, out, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor | Quantized) -> Tensor:
        """Applies the op to ``input``."""
        if self.precision is not None:
            return pair_in_fp8(self, input)
        x = check_unquantized("nn.MLP", "input", input)
        up, down = self.up, self.down
        return mlp(x, up.weight, down.weight, up.bias, down.bias, act=self.act, save=self.save)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return settings(self)


class GatedMLP(nn.Module):
    """``(act(g) * u) @ down.weight.T + down.bias`` as one op of autograd.

    ``g`` and ``u`` are the halves of ``x @ gate_up.weight.T + gate_up.bias``. ``gate_up`` and
    ``down`` are :class:`torch.nn.Linear` and hold the parameters; forward and hooks of these
    submodules are not called.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size of gate and of up.
        out_features: size of the last dimension of the output; None for ``in_features``.
        bias: whether the layers have a bias.
        act: one of silu, gelu, gelu_tanh.
        save: as for :func:`torchkiln.gated_mlp`.
        precision: as for :func:`torchkiln.gated_mlp`, with weights quantised once per version.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        input ``[..., in_features]``, with ``precision`` a tensor or quantised; output
        ``[..., out_features]``.
    """

    precision: Precision | None = None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        *,
        act: Gate = "silu",
        save: Saved = "preact",
        precision: Precision | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out = in_features if out_features is None else out_features
        self.act = check_gate("nn.GatedMLP", act)
        self.save = check_save("nn.GatedMLP", save)
        self.precision = check_precision("nn.GatedMLP", precision)
        self.gate_up = nn.Linear(in_features, 2 * hidden_features, bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden_features, out, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor | Quantized) -> Tensor:
        """Applies the op to ``input``."""
        if self.precision is not None:
            return pair_in_fp8(self, input)
        x = check_unquantized("nn.GatedMLP", "input", input)
        first, down = self.gate_up, self.down
        return gated_mlp(
            x, first.weight, down.weight, first.bias, down.bias, act=self.act, save=self.save
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return settings(self)


def settings(module: MLP | GatedMLP) -> str:
    """The settings, for ``repr``."""
    words = f"act={module.act!r}, save={module.save!r}"
    return words if module.precision is None else f"{words}, precision={module.precision!r}"


def pair_in_fp8(module: MLP | GatedMLP, x: Tensor | Quantized) -> Tensor:
    """The output of a module with its products in float8_e4m3fn."""
    down = partial(product, module.down)
    if isinstance(module, MLP):
        act, up = module.act, module.up
        return pair(lambda x: activated(act, product(up, x)), down, x, module.save)
    gate, layer = module.act, module.gate_up
    quantized = weight_of(layer)
    first = partial(gated, gate, layer.weight, layer.bias, quantized=quantized)
    return pair(first, down, x, module.save)
