"""Dropout and the following residual sum, in one pass over memory."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from torchkiln import _C
from torchkiln.ops.eager import eager


@eager(_C.dropout_add)
def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Returns ``x * mask / (1 - p) + residual``, contiguous; ``x + residual`` unless ``training``.

    Each element of ``mask`` is 0 with probability ``p``, else 1. It depends only on the state of
    torch's generator for the device, on ``p``, and on the row-major index of the element. Backward
    computes the mask again instead of reading it from memory.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. Half precision is computed in float32
            and rounded once.
        residual: of the shape of ``x``. The result has the wider dtype of the two; half precision
            and float32 are read together, without a copy.
        p: the probability that an element is dropped, between 0 and 1.
        training: whether to drop elements.
    """
    return _traced(x, None, residual, p, training)


@eager(_C.bias_dropout_add)
def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
) -> Tensor:
    """Returns ``(x + bias) * mask / (1 - p) + residual``, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. Half precision is computed in
            float32 and rounded once.
        bias: ``[columns]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        residual: of the shape of ``x``. The result has the wider dtype of the two; half precision
            and float32 are read together, without a copy.
        p: the probability that an element is dropped, between 0 and 1.
        training: whether to drop elements.
    """
    return _traced(x, bias, residual, p, training)


def _traced(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool) -> Tensor:
    """The op in a graph: draws a state of two numbers, from which the mask can be computed again.

    An eager call draws the same state, so equal seeds give equal masks.
    """
    state = torch.ops.torchkiln._dropout_state.default(x) if training and 0 < p < 1 else None
    if training and p == 1:
        state = torch.zeros(2, dtype=torch.int64, device=x.device)
    return torch.ops.torchkiln._dropout_add_with_state.default(x, bias, residual, state, p)


def _save_state(mode: Any, x: Tensor) -> Tensor:
    """Draws a state under a mode that traces, and marks the state as saved for backward.

    An activation checkpoint would otherwise draw it again in backward. On a GPU torch would then
    also draw the forward state from another generator, which ignores ``torch.manual_seed``.
    """
    op = torch.ops.torchkiln._dropout_state.default
    state: Tensor = mode.__torch_dispatch__(op, (), (x,), {})
    tracing = mode if isinstance(mode, ProxyTorchDispatchMode) else get_proxy_mode()
    if tracing is not None:
        draws = tracing.tracer.graph.find_nodes(op="call_function", target=op)
        draws[-1].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return state


for _mode in (ProxyTorchDispatchMode, _CachingTorchDispatchMode):  # tracing, checkpoints
    _op = torch.ops.torchkiln._dropout_state.default
    _op.python_key_table.pop(_mode, None)  # set if an earlier import was dropped from sys.modules
    _op.py_impl(_mode)(_save_state)
