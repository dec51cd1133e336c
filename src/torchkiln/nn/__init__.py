"""Modules of the ops, with the interface of :mod:`torch.nn`."""

from torchkiln.nn.activation import GELU, QuickGELU, ReLU, ReLU2, Sigmoid, SiLU, Tanh
from torchkiln.nn.attention import Attention
from torchkiln.nn.batch_norm import (
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
    SyncBatchNormAct,
)
from torchkiln.nn.bias_act import BiasAct
from torchkiln.nn.convolution import ConvBNAct1d, ConvBNAct2d, ConvBNAct3d
from torchkiln.nn.cross_entropy import (
    CrossEntropyLoss,
    LinearCrossEntropyLoss,
    LinearKL,
    LinearLogprob,
    Logprob,
)
from torchkiln.nn.dropout import BiasDropoutAdd, DropoutAdd
from torchkiln.nn.gated import GEGLU, SwiGLU
from torchkiln.nn.gated_norm import GatedRMSNorm
from torchkiln.nn.group_norm import GroupNorm
from torchkiln.nn.kv_cache import KVCache
from torchkiln.nn.matmul import MLP, GatedMLP, Linear
from torchkiln.nn.multihead import MultiheadAttention
from torchkiln.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from torchkiln.nn.quantize import LinearFP8
from torchkiln.nn.rope import RotaryEmbedding
from torchkiln.nn.softmax import LogSoftmax, Softmax
from torchkiln.nn.spmm import SparseLinear
from torchkiln.nn.torch_layers import TransformerDecoderLayer, TransformerEncoderLayer
from torchkiln.nn.transformer import TransformerBlock

__all__ = [
    "GEGLU",
    "GELU",
    "MLP",
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "BiasAct",
    "BiasDropoutAdd",
    "ConvBNAct1d",
    "ConvBNAct2d",
    "ConvBNAct3d",
    "CrossEntropyLoss",
    "DropoutAdd",
    "GatedMLP",
    "GatedRMSNorm",
    "GroupNorm",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "LinearFP8",
    "LinearKL",
    "LinearLogprob",
    "LogSoftmax",
    "Logprob",
    "MultiheadAttention",
    "QuickGELU",
    "RMSNorm",
    "ReLU",
    "ReLU2",
    "RotaryEmbedding",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SparseLinear",
    "SwiGLU",
    "SyncBatchNormAct",
    "Tanh",
    "TransformerBlock",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
