"""Types of arguments, for annotations in code that passes such arguments to torchkiln."""

from typing import Literal, TypeAlias, TypedDict

import torch

__all__ = [
    "Activation",
    "BuildInfo",
    "Device",
    "Direction",
    "Gate",
    "Head",
    "Kind",
    "Precision",
    "Reduction",
    "Rounding",
    "Saved",
    "TorchBuild",
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

Direction: TypeAlias = Literal["forward", "reverse", "js"]
"""Divergences, as for :func:`torchkiln.linear_kl`."""

Kind: TypeAlias = Literal[
    "norm",
    "residual",
    "activation",
    "glu",
    "linear",
    "mlp",
    "rope",
    "softmax",
    "loss",
    "batch_norm",
    "channels_last",
    "attention",
    "registered",
]
"""Kinds of replacements, as for ``torchkiln.replace``."""

Head: TypeAlias = bool | Literal["loss", "fp8"]
"""The treatment of heads by ``torchkiln.replace``, as for its ``head``."""

Precision: TypeAlias = Literal["fp8"]
"""Precisions of matrix products other than that of their tensors: float8_e4m3fn."""

Device: TypeAlias = torch.device | str | int
"""A device as torch's functions take it."""


class TorchBuild(TypedDict):
    """The module for one minor version of torch."""

    version: str
    cuda: str | None
    folder: str
    """The folder of the module, below the package."""


class BuildInfo(TypedDict):
    """The versions of the build, as :func:`torchkiln.build_info` returns them."""

    version: str
    """The version of torchkiln."""
    torch: str
    """The torch of the module that this process has loaded."""
    torch_cuda: str | None
    torches: list[TorchBuild]
    """All modules of the package."""
    cpu_instructions: list[str]
    """``baseline``, ``avx2``, ``avx512``: the CPU kernels that were compiled."""
    cuda: str | None
    """The CUDA version of the kernels; None for a build without them."""
    cuda_architectures: list[str]
    cuda_ptx: list[str]
    """Architectures whose intermediate code newer GPUs compile."""
    python: str
    platform: str
    compiler: str
