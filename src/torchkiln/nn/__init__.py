"""Modules, in the manner of :mod:`torch.nn`."""

from torchkiln.nn.activation import GELU, ReLU, Sigmoid, SiLU, Tanh
from torchkiln.nn.bias_act import BiasAct, ScaleBiasReLU
from torchkiln.nn.dropout import BiasDropoutAdd, DropoutAdd
from torchkiln.nn.gated import GEGLU, SwiGLU
from torchkiln.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

__all__ = [
    "GEGLU",
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "BiasAct",
    "BiasDropoutAdd",
    "DropoutAdd",
    "LayerNorm",
    "RMSNorm",
    "ReLU",
    "ScaleBiasReLU",
    "SiLU",
    "Sigmoid",
    "SwiGLU",
    "Tanh",
]
