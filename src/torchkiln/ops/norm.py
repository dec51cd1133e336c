"""Layer norm and RMS norm, alone or after a residual sum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import check_no_gradient
from torchkiln.ops.eager import eager
from torchkiln.ops.quantize import Quantized
from torchkiln.typing import Rounding


def as_sizes(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    """The sizes as a sequence: torch.ops does not accept a single number."""
    return (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape


@eager(_C.layer_norm, beside=("out",), input="x")
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``(x - mean) / sqrt(variance + eps) * (offset + weight) + bias``, contiguous.

    Mean and variance are taken over the last dimensions of ``x``. All are computed in float32
    (float64 for float64), and the result is rounded once. If a row fits in registers, one pass
    computes all gradients. The gradients of ``weight`` and ``bias`` are bitwise reproducible.

    Args:
        x: ``[..., *normalized_shape]``; float32, float64, float16 or bfloat16.
        normalized_shape: the last sizes of ``x``, or the last one.
        weight: of that shape; of the dtype of ``x``, or float32 if ``x`` has half precision.
        bias: of the shape and dtype of ``weight``.
        eps: a number of at least 0.
        offset: a number that is added to ``weight``: 1.0 for models that store ``weight - 1``.
            Ignored without a weight.
        round: ``"once"``, or ``"input"`` to round the normalized rows to the dtype of ``x`` also
            before ``weight`` is applied, as models of Hugging Face and vLLM do. The gradients
            ignore this rounding.
        out: a contiguous tensor of the shape and dtype of ``x`` for the result, which may be ``x``;
            for inference: the call has no gradient.
    """
    shape = as_sizes(normalized_shape)
    if out is not None:
        check_no_gradient("layer_norm", "out", x, weight, bias, out)
        torch.ops.torchkiln._layer_norm_out.default(x, shape, weight, bias, eps, offset, round, out)
        return out
    return torch.ops.torchkiln.layer_norm.default(
        x, shape, weight, bias, eps, offset=offset, round=round
    )


@eager(_C.rms_norm, beside=("out",), input="x")
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``x / sqrt(mean(x**2) + eps) * (offset + weight)``, contiguous.

    The mean is taken over the last dimensions of ``x``. All is computed in float32 (float64 for
    float64), and the result is rounded once. If a row fits in registers, one pass computes all
    gradients. The gradient of ``weight`` is bitwise reproducible.

    Args:
        x: ``[..., *normalized_shape]``; float32, float64, float16 or bfloat16.
        normalized_shape: the last sizes of ``x``, or the last one.
        weight: of that shape; of the dtype of ``x``, or float32 if ``x`` has half precision.
        eps: a number of at least 0; None for ``torch.finfo(torch.float32).eps``, or for
            ``torch.finfo(torch.float64).eps`` if ``x`` is float64.
        offset: as for :func:`layer_norm`.
        round: as for :func:`layer_norm`.
        out: as for :func:`layer_norm`.
    """
    shape = as_sizes(normalized_shape)
    if out is not None:
        check_no_gradient("rms_norm", "out", x, weight, out)
        torch.ops.torchkiln._rms_norm_out.default(x, shape, weight, eps, offset, round, out)
        return out
    return torch.ops.torchkiln.rms_norm.default(x, shape, weight, eps, offset=offset, round=round)


@eager(_C.add_layer_norm)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> tuple[Tensor, Tensor]:
    """Returns ``(layer_norm(total), total)`` with ``total = x + residual``, in one pass.

    The sum is rounded to its dtype before it is normalized. Both results are differentiable.

    ``x`` and ``residual`` are ``[..., *normalized_shape]``, float32, float64, float16 or bfloat16.
    Both results have the wider dtype of the two; half precision and float32 are read together,
    without a copy. The other arguments are those of :func:`layer_norm`, for the sum in place of
    ``x``.
    """
    return torch.ops.torchkiln.add_layer_norm.default(
        x, residual, as_sizes(normalized_shape), weight, bias, eps, offset=offset, round=round
    )


@eager(_C.add_rms_norm)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> tuple[Tensor, Tensor]:
    """Returns ``(rms_norm(total), total)`` with ``total = x + residual``, in one pass.

    The sum is rounded to its dtype before it is normalized. Both results are differentiable.

    ``x`` and ``residual`` are ``[..., *normalized_shape]``, float32, float64, float16 or bfloat16.
    Both results have the wider dtype of the two; half precision and float32 are read together,
    without a copy. The other arguments are those of :func:`rms_norm`, for the sum in place of
    ``x``.
    """
    return torch.ops.torchkiln.add_rms_norm.default(
        x, residual, as_sizes(normalized_shape), weight, eps, offset=offset, round=round
    )


def add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> tuple[Tensor, Tensor]:
    """Writes :func:`add_layer_norm` into its inputs, as :func:`add_rms_norm_` does.

    The arguments are those of :func:`add_layer_norm`.
    """
    check_no_gradient("add_layer_norm_", "x", x, residual, weight, bias)
    torch.ops.torchkiln.add_layer_norm_.default(
        x, residual, as_sizes(normalized_shape), weight, bias, eps, offset=offset, round=round
    )
    return x, residual


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> tuple[Tensor, Tensor]:
    """Writes :func:`add_rms_norm` into its inputs: the norm into ``x``, the sum into ``residual``.

    For inference: the call has no gradient. Only rows that are split among blocks need a workspace.

    ``x`` and ``residual`` are contiguous, of one dtype. The other arguments are those of
    :func:`add_rms_norm`.
    """
    check_no_gradient("add_rms_norm_", "x", x, residual, weight)
    torch.ops.torchkiln.add_rms_norm_.default(
        x, residual, as_sizes(normalized_shape), weight, eps, offset=offset, round=round
    )
    return x, residual


def layer_norm_fp8(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> Quantized:
    """Returns ``quantize(layer_norm(x))`` in one pass, as :func:`rms_norm_fp8` does.

    The arguments are those of :func:`layer_norm`.
    """
    return Quantized(
        *torch.ops.torchkiln.layer_norm_fp8.default(
            x, as_sizes(normalized_shape), weight, bias, eps, offset=offset, round=round
        )
    )


def rms_norm_fp8(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> Quantized:
    """Returns ``quantize(rms_norm(x))`` in one pass, for :func:`linear_fp8`.

    The norm is first rounded to its dtype, then quantised. A CPU gives the bits of the
    two functions; on a GPU the norm before this rounding may differ in its last bit. The gradient
    passes straight through to :func:`rms_norm`, whose backward this is. Rows that are not whole
    16-byte vectors, or that no team of threads holds, take two passes on a GPU.

    Args:
        x: ``[..., columns]``; float32, float16 or bfloat16.
        normalized_shape: ``columns``: scales are of 128 elements of the last dimension.
        weight: as for :func:`rms_norm`.
        eps: as for :func:`rms_norm`.
        offset: as for :func:`rms_norm`.
        round: as for :func:`rms_norm`.
    """
    return Quantized(
        *torch.ops.torchkiln.rms_norm_fp8.default(
            x, as_sizes(normalized_shape), weight, eps, offset=offset, round=round
        )
    )


def add_layer_norm_fp8(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> tuple[Quantized, Tensor]:
    """Returns ``(quantize(layer_norm(total)), total)`` with ``total = x + residual``, in one pass.

    The norm is quantised as by :func:`rms_norm_fp8`; the sum stays in its dtype. The arguments are
    those of :func:`add_layer_norm`.
    """
    *quantized, total = torch.ops.torchkiln.add_layer_norm_fp8.default(
        x, residual, as_sizes(normalized_shape), weight, bias, eps, offset=offset, round=round
    )
    return Quantized(*quantized), total


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round: Rounding = "once",
) -> tuple[Quantized, Tensor]:
    """Returns ``(quantize(rms_norm(total)), total)`` with ``total = x + residual``, in one pass.

    The norm is quantised as by :func:`rms_norm_fp8`; the sum stays in its dtype. The arguments are
    those of :func:`add_rms_norm`.
    """
    *quantized, total = torch.ops.torchkiln.add_rms_norm_fp8.default(
        x, residual, as_sizes(normalized_shape), weight, eps, offset=offset, round=round
    )
    return Quantized(*quantized), total
