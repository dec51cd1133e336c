import torch
from torch import Tensor

def add(a: Tensor, b: Tensor) -> Tensor: ...
def scale_bias_relu(x: Tensor, bias: Tensor, scale: float) -> Tensor: ...
def sum(
    x: Tensor,
    dim: int | tuple[int, ...] | list[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Tensor: ...
def mean(
    x: Tensor,
    dim: int | tuple[int, ...] | list[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Tensor: ...
