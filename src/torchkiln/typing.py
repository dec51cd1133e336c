"""Types of arguments, for annotations in code that passes such arguments to torchkiln."""

from typing import Literal, TypeAlias

import torch

__all__ = [
    "Activation",
    "Device",
    "Gate",
    "Kind",
    "Reduction",
    "Rounding",
    "Saved",
]

Activation: TypeAlias = Literal[
    "none",
    "square",
    "relu",
    "relu2",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "silu",
    "sigmoid",
    "tanh",
]
"""Functions that ops apply to their result."""

Gate: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
"""Activations of a gate."""

Rounding: TypeAlias = Literal["once", "input"]
"""The rounding of a norm, as for :func:`torchkiln.layer_norm`."""

Saved: TypeAlias = Literal["preact", "none"]
"""The tensors that a pair of layers keeps for backward, as for :func:`torchkiln.mlp`."""

Reduction: TypeAlias = Literal["none", "mean", "sum"]
"""Reductions of losses."""

Kind: TypeAlias = Literal[
    "norm",
    "residual",
    "activation",
    "glu",
    "linear",
    "mlp",
    "softmax",
    "loss",
    "batch_norm",
    "registered",
]
"""Kinds of replacements, as for :func:`torchkiln.replace`."""

Device: TypeAlias = torch.device | str | int
"""A device as torch's functions take it."""
