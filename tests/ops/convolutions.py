"""Layers and tolerances of the tests of conv_bn_act."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.ops import _folding

conv_bn_act: Any = torchkiln.conv_bn_act
TORCHS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "square": torch.square,
    "relu": torch.relu,
    "relu2": lambda y: F.relu(y).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def moved(bn: Any) -> Any:
    """Draws running statistics and parameters of a batch norm, as if it had been trained."""
    for tensor in (bn.running_mean, bn.weight.data, bn.bias.data):
        tensor.normal_()
    bn.running_var.uniform_(0.5, 2.0)
    return bn


def layer(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A ConvBNAct2d in eval mode, with random statistics and parameters of its batch norm."""
    settings: dict[str, Any] = {"kernel_size": 3, "padding": 1, **options}
    made = torchkiln.nn.ConvBNAct2d(8, 16, **settings)
    moved(made.bn)
    return made.to(device, dtype).eval()


def exact(module: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The result in float64 by torch's modules."""
    wide = copy.deepcopy(module).double()
    y = wide.bn(wide.conv(x.double()))
    y = y if residual is None else y + residual.double()
    return TORCHS[module.act](y)


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    return {
        torch.float64: {"atol": 1e-10, "rtol": 1e-10},
        torch.float32: {"atol": 2e-4, "rtol": 1e-4},
        torch.float16: {"atol": 2e-2, "rtol": 1e-2},
        torch.bfloat16: {"atol": 1.5e-1, "rtol": 3e-2},
    }[dtype]


def close(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    limits = tolerance(dtype or found.dtype)
    torch.testing.assert_close(found.double(), expected.double(), **limits)


def count() -> int:
    return len(_folding.FOLDS)


def notes(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, ...]:
    return torchkiln.explain(call, *args, **kwargs).forward.notes
