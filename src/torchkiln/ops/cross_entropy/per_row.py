"""Log-probabilities, entropies and divergences per row, for losses of post-training."""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager
from torchkiln.typing import Direction


class LogprobOptions(TypedDict, total=False):
    """Options of :func:`logprob`."""

    temperature: float
    ignore_index: int


class LinearLogprobOptions(LogprobOptions, total=False):
    """Options of :func:`linear_logprob`."""

    softcap: float | None
    rows: Tensor | None
    dtype: torch.dtype | None


@overload
def logprob(
    logits: Tensor,
    target: Tensor,
    *,
    entropy: Literal[False] = False,
    **options: Unpack[LogprobOptions],
) -> Tensor: ...
@overload
def logprob(
    logits: Tensor, target: Tensor, *, entropy: Literal[True], **options: Unpack[LogprobOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def logprob(
    logits: Tensor, target: Tensor, *, entropy: bool, **options: Unpack[LogprobOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@eager(_C.logprob)
def logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns ``log(p[target])`` per row, and the entropy ``-sum(p * log(p))`` if requested.

    ``p = softmax(logits / temperature)`` over the last dimension. Both results are differentiable
    for any incoming gradient: losses of preference and policy optimisation are a few lines of torch
    on them. Forward reads the logits once and saves three numbers per row; backward reads them once
    and writes their gradient. The host never waits for the GPU.

    Args:
        logits: ``[..., classes]``; float32, float64, float16 or bfloat16. Half precision is
            computed in float32. Rows that are not evenly spaced in memory, such as those of
            ``logits[:, :-1]``, are copied; shift the target instead, and fill it with
            ``ignore_index``.
        target: ``[...]``, int64: the class of each row. A class out of range is an error as in
            :func:`cross_entropy`.
        temperature: a number greater than 0 that divides the logits, in float32.
        ignore_index: rows with this target have the results 0 and no gradient.
        entropy: whether to return ``(log-probability, entropy)``.

    Returns:
        Tensors of the shape of ``target``; float32, or float64 for float64 logits.
    """
    logp, other = torch.ops.torchkiln.logprob.default(
        logits, target, temperature=temperature, ignore_index=ignore_index, entropy=entropy
    )
    return (logp, other) if entropy else logp


@overload
def linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    entropy: Literal[False] = False,
    **options: Unpack[LinearLogprobOptions],
) -> Tensor: ...
@overload
def linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    entropy: Literal[True],
    **options: Unpack[LinearLogprobOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    entropy: bool,
    **options: Unpack[LinearLogprobOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@eager(_C.linear_logprob)
def linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    rows: Tensor | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns :func:`logprob` of a linear layer's outputs, without all logits in memory.

    The logits ``x @ weight.T + bias`` are computed for a chunk of rows at a time, as in
    :func:`linear_cross_entropy`: once in forward and again in backward, which turns them into their
    gradient and computes the gradients of ``x``, ``weight`` and ``bias``, each only if it is
    needed. So forward costs one product, and backward three. Three numbers per row are saved. With
    fewer rows than classes, backward computes a chunk of classes at a time: as many as fit in 1 GiB
    with all rows, at least 2048 and at most 16384. The gradient of ``weight`` then needs no sum.
    Second derivatives, ``torch.func`` and forward mode compute all logits with torch's own ops.

    Args:
        x: ``[..., features]``; float32, float64, float16 or bfloat16.
        weight: ``[classes, features]``; of the dtype of ``x``.
        target: ``[...]``, int64: the class of each row.
        bias: ``[classes]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        temperature: a number greater than 0 that divides the logits, after the softcap.
        softcap: a number greater than 0: the logits are ``softcap * tanh(logits / softcap)``.
        rows: the rows that count, such as the completions of prompts: their indices among all rows,
            ``[any]``, int64, each at most once, or a mask, bool, of the shape of ``target``. The
            other rows cost no product, and have the results 0 and no gradient. With a mask the host
            waits for the GPU, and torch.compile breaks the graph, because the number of rows is in
            the mask; indices have neither cost.
        ignore_index: rows with this target have the results 0 and no gradient, but are computed.
        entropy: whether to return ``(log-probability, entropy)``.
        dtype: the dtype of the logits of a chunk; None for that of the results. With the dtype of
            a half-precision ``x``, logits are rounded to it and take a third of the memory.

    Returns:
        Tensors of the shape of ``target``; float32, or float64 for float64 ``x``.
    """
    logp, other = torch.ops.torchkiln.linear_logprob.default(
        x,
        weight,
        target,
        bias,
        temperature=temperature,
        softcap=softcap,
        rows=rows,
        ignore_index=ignore_index,
        entropy=entropy,
        dtype=dtype,
    )
    return (logp, other) if entropy else logp


@eager(_C.linear_kl)
def linear_kl(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    weight_y: Tensor,
    bias: Tensor | None = None,
    bias_y: Tensor | None = None,
    *,
    temperature: float = 1.0,
    direction: Direction = "forward",
    beta: float = 0.5,
    rows: Tensor | None = None,
) -> Tensor:
    """Returns the divergence of a student and a teacher per row, without all logits in memory.

    With ``p`` the softmax of the student's logits ``(x @ weight.T + bias) / temperature``, and
    ``q`` that of the teacher's, ``(y @ weight_y.T + bias_y) / temperature``, it is

    - ``forward``: ``sum(q * log(q / p))``, which distillation minimises;
    - ``reverse``: ``sum(p * log(p / q))``, for a reference model;
    - ``js``: ``beta * sum(q * log(q / m)) + (1 - beta) * sum(p * log(p / m))`` with the mixture
      ``m = beta * q + (1 - beta) * p``.

    The logits of both layers are computed for a chunk of rows at a time: as many rows as fit in
    1 GiB, at least 1024 and at most 8192. They are not rounded to half precision. If only ``x``
    requires a gradient, forward computes it, too: three products, and none in backward. Otherwise
    forward has two products, and backward computes the logits again, in the chunks of
    :func:`linear_logprob`. Gradients of the teacher's
    tensors cost a pass of their own; pass ``y.detach()`` if it needs none. Second derivatives,
    ``torch.func`` and forward mode compute all logits with torch's own ops.

    Args:
        x: ``[..., features]``; float32, float64, float16 or bfloat16.
        weight: ``[classes, features]``; of the dtype of ``x``.
        y: the teacher's states, ``[..., any]`` with the rows of ``x``; of the dtype of ``x``.
        weight_y: ``[classes, any]``; of the dtype of ``x``.
        bias: ``[classes]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        bias_y: as ``bias``.
        temperature: a number greater than 0 that divides the logits of both. The result is not
            multiplied by its square.
        direction: forward, reverse or js.
        beta: the share of the teacher in ``js``, between 0 and 1.
        rows: the rows that count, as for :func:`linear_logprob`. The other rows cost no product,
            and have the result 0 and no gradient.

    Returns:
        A tensor of the shape of ``x`` without its last dimension; float32, or float64 for float64
        ``x``.
    """
    return torch.ops.torchkiln.linear_kl.default(
        x,
        weight,
        y,
        weight_y,
        bias,
        bias_y,
        temperature=temperature,
        direction=direction,
        beta=beta,
        rows=rows,
    )
