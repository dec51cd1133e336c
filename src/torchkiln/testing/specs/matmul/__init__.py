"""The contracts of products, of linear layers, and of pairs of layers."""

from torchkiln.testing.specs.matmul.layers import LINEAR, MATMUL
from torchkiln.testing.specs.matmul.mlp import GATED_MLP, MLP

__all__ = ["GATED_MLP", "LINEAR", "MATMUL", "MLP"]
