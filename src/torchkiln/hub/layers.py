"""Layers without a state: Hugging Face's ``kernels`` puts their forward into a model's modules.

A forward reads the attributes of the module that it is put into. A layer has a forward and two
flags, and nothing else: ``kernels`` refuses other members.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchkiln.ops.activation import gelu, quick_gelu, silu
from torchkiln.ops.gated import geglu, swiglu
from torchkiln.ops.norm import rms_norm


class Layer(nn.Module):
    """The flags of all layers, for ``kernels``."""

    can_torch_compile = True
    has_backward = True


class RMSNorm(Layer):
    """``x / sqrt(mean(x**2) + variance_epsilon) * weight``, as in models of Llama's family.

    As in these models, normalized rows are rounded to half precision before the weight is applied,
    and half precision rows with a float32 weight give float32.
    """

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The norm of the last dimension."""
        shape, eps = self.weight.shape, self.variance_epsilon
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        if dtype != hidden_states.dtype:
            return rms_norm(hidden_states, shape, None, eps).to(dtype) * self.weight
        return rms_norm(hidden_states, shape, self.weight, eps, round="input")


class SiluAndMul(Layer):
    """``silu(gate) * up`` of the halves of the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """The gated unit of the halves of ``x``."""
        return swiglu(x)


class GeluAndMul(Layer):
    """``gelu(gate) * up`` of the halves of the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """The gated unit of the halves of ``x``."""
        return geglu(x)


class GeluTanhAndMul(Layer):
    """:class:`GeluAndMul` with the approximation by a hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """The gated unit of the halves of ``x``."""
        return geglu(x, approximate="tanh")


class SiLU(Layer):
    """``x / (1 + exp(-x))``."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each element."""
        return silu(x)


class GeLU(Layer):
    """``x`` times the cumulative normal distribution."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each element."""
        return gelu(x)


class GeluTanh(Layer):
    """:class:`GeLU` with the approximation by a hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each element."""
        return gelu(x, approximate="tanh")


class QuickGELU(Layer):
    """``x / (1 + exp(-1.702 * x))``."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each element."""
        return quick_gelu(x)


class NewGELU(GeluTanh):
    """Another name of :class:`GeluTanh`."""


class FastGELU(GeluTanh):
    """Another name of :class:`GeluTanh`."""


__all__ = [
    "FastGELU",
    "GeLU",
    "GeluAndMul",
    "GeluTanh",
    "GeluTanhAndMul",
    "NewGELU",
    "QuickGELU",
    "RMSNorm",
    "SiLU",
    "SiluAndMul",
]
