"""Operation counts of matrix products for :class:`torch.utils.flop_counter.FlopCounterMode`.

The module of that class takes time to import, and warns if a CUDA torch has no Triton. So the
formulas are registered when that module is imported, not when torchkiln is.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULE = "torch.utils.flop_counter"


def matmul_flops(a: Tensor, _b: Tensor, *, out_val: Tensor) -> int:
    """Operations of a product."""
    return 2 * out_val.numel() * a.shape[-1]


def linear_flops(x: Tensor, weight: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Operations of the product of a linear layer; as in torch, a bias does not count."""
    return 2 * x.numel() * weight.shape[0]


def mlp_flops(x: Tensor, up: Tensor, down: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Operations of the two products of a feed-forward layer."""
    return 2 * x[..., 0].numel() * (up.numel() + down.numel())


def chunk_flops(x: Tensor, weight: Tensor, *args: Any, **_kwargs: Any) -> int:
    """Operations of the logits, and of the gradients of x and weight if they are needed."""
    wanted = next((each for each in args if isinstance(each, (list, tuple))), ())
    return 2 * x.numel() * weight.shape[0] * (1 + sum(wanted[:2]))


def two_chunk_flops(x: Tensor, weight: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> int:
    """Operations of both layers' logits, and of the student's gradients if they are needed."""
    classes = weight.shape[0]
    own = chunk_flops(x, weight, *args, **kwargs)
    differentiates = any(each is True for each in args)
    return own + 2 * classes * (y.numel() + x.numel() * differentiates)


def register_flops(module: ModuleType) -> None:
    """Registers the formulas with torch's module."""
    ops = torch.ops.torchkiln
    module.register_flop_formula(ops.matmul, get_raw=True)(matmul_flops)
    module.register_flop_formula([ops.linear, ops._linear_forward], get_raw=True)(linear_flops)
    module.register_flop_formula([ops.mlp, ops.gated_mlp], get_raw=True)(mlp_flops)
    losses = [
        ops.linear_cross_entropy,
        ops._linear_cross_entropy_with_metrics,
        ops._linear_cross_entropy_forward,
        ops._linear_cross_entropy_backward,
        ops.linear_logprob,
        ops._linear_logprob_forward,
        ops._linear_logprob_backward,
    ]
    module.register_flop_formula(losses, get_raw=True)(chunk_flops)
    divergences = [ops.linear_kl, ops._linear_kl_forward, ops._linear_kl_backward]
    module.register_flop_formula(divergences, get_raw=True)(two_chunk_flops)
