"""RMS norm with a gate, as in state-space models and linear attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager
from torchkiln.ops.norm import as_sizes


@eager(_C.gated_rms_norm)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    gate_first: bool = False,
    groups: int = 1,
    offset: float = 0.0,
) -> Tensor:
    """Returns ``rms_norm(x) * silu(gate)``, or with ``gate_first`` ``rms_norm(x * silu(gate))``.

    Here ``rms_norm(z)`` is ``z / sqrt(mean(z**2) + eps) * (offset + weight)``. All is computed in
    float32 (float64 for float64) and rounded once; the result is contiguous. Forward and backward
    are one pass each if the registers of a block hold a group; longer groups are composed of
    :func:`swiglu` and :func:`rms_norm`. Backward keeps ``x``, ``gate`` and a number per group. The
    gradient of ``weight`` is bitwise reproducible.

    Args:
        x: ``[..., *normalized_shape]``; float32, float64, float16 or bfloat16.
        gate: of the shape of ``x``. If the dtypes differ, all tensors are cast to the wider one.
        normalized_shape: the last sizes of ``x``, or the last one.
        weight: of that shape; of the dtype of ``x``, or float32 if ``x`` has half precision.
        eps: a number of at least 0; None for ``torch.finfo(torch.float32).eps``, or for
            ``torch.finfo(torch.float64).eps`` if ``x`` is float64.
        gate_first: whether the gate is applied before the norm, as in Mamba2, and not after it, as
            in Qwen3-Next.
        groups: number of equal parts of the last dimension whose means are taken separately; more
            than 1 only if one dimension is normalized.
        offset: a number that is added to ``weight``: 1.0 for models that store ``weight - 1``.
            Ignored without a weight.
    """
    return torch.ops.torchkiln.gated_rms_norm.default(
        x,
        gate,
        as_sizes(normalized_shape),
        weight,
        eps,
        gate_first=gate_first,
        groups=groups,
        offset=offset,
    )
