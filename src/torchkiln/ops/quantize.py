"""E4M3 tensors with scales that are powers of two, and the linear layer that multiplies them."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from torchkiln import _C
from torchkiln.ops.activation import is_tanh
from torchkiln.ops.eager import eager


class Quantized(NamedTuple):
    """A tensor in float8_e4m3fn: each 128 elements of a row are ``data * scale``.

    With ``square=True``, a transposed matrix has a scale for each 128 x 128 elements instead,
    ``[ceil(n / 128), ceil(k / 128)]``: for :func:`dequantize` and torch's scaled product. Layers
    refuse it.
    """

    data: Tensor
    """``[..., k]``, float8_e4m3fn."""
    scale: Tensor
    """``[..., ceil(k / 128)]``, float32 powers of two. The scales of a block column are adjacent in
    memory, as torch's scaled product reads them."""
    source: Tensor | None = None
    """The tensor that was quantised, if it requires a gradient: :func:`linear_fp8` passes the
    gradient of the product to it. If that tensor was never stored, as in :func:`rms_norm_fp8`: a
    stand-in of its shape and dtype, without memory and with undefined values."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.data.shape


class QuantizedWeight(NamedTuple):
    """A weight in float8_e4m3fn: each 128 x 128 elements are ``data * scale``."""

    data: Tensor
    """``[n, k]``, float8_e4m3fn."""
    scale: Tensor
    """``[ceil(n / 128), ceil(k / 128)]``, float32 powers of two."""
    transposed: Tensor
    """``[k, n]``, the same numbers transposed, for the gradient of the input."""
    transposed_scale: Tensor
    """``[ceil(k / 128), ceil(n / 128)]``."""


# With this, torch.export can save programs that return these classes.
_register_namedtuple(Quantized, serialized_type_name="torchkiln.Quantized")
_register_namedtuple(QuantizedWeight, serialized_type_name="torchkiln.QuantizedWeight")


def quantize(x: Tensor) -> Quantized:
    """Returns ``x`` in float8_e4m3fn, with a scale for each 128 elements of a row.

    A scale is the smallest power of two that brings the finite elements to at most 448; 1 if all
    are 0. Elements are rounded to the nearest number, ties to even. NaN and infinities become NaN
    and do not change the scale. CPU and GPU give the same bits.

    Args:
        x: ``[..., k]``; float32, float16 or bfloat16.
    """
    data, scale = _quantize(x)
    return Quantized(data, scale, source_of(x))


@eager(_C.quantize)
def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.torchkiln.quantize.default(x)


def quantize_both(x: Tensor, square: bool = False) -> tuple[Quantized, Quantized]:
    """Returns :func:`quantize` of ``x`` and of ``x.reshape(-1, k).T``, in one read of ``x``.

    Args:
        x: ``[..., k]``, as for :func:`quantize`.
        square: the transposed matrix has a scale for each 128 x 128 elements, as a weight has.
    """
    data, scale, transposed, transposed_scale = _quantize_both(x, square)
    return Quantized(data, scale, source_of(x)), Quantized(transposed, transposed_scale)


@eager(_C.quantize_both)
def _quantize_both(x: Tensor, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.torchkiln.quantize_both.default(x, square)


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Returns a weight in float8_e4m3fn, with a scale for each 128 x 128 elements.

    Scales and rounding are those of :func:`quantize`.

    Args:
        weight: ``[n, k]``; float32, float16 or bfloat16.
    """
    return QuantizedWeight(*_quantize_weight(weight))


@eager(_C.quantize_weight)
def _quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.torchkiln.quantize_weight.default(weight)


def transpose_quantized(x: Quantized, square: bool = False) -> Quantized:
    """Returns the transposed matrix of ``x``, with a scale for each 128 elements of its rows.

    Scales are powers of two, so that numbers stay as they are. Only a number of less than
    ``2**-13`` of the largest one in its new block may be rounded again.

    Args:
        x: the result of :func:`quantize` for ``[..., k]``: one matrix ``[rows, k]``.
        square: a scale for each 128 x 128 elements instead, as a weight has.
    """
    return Quantized(*_transpose_quantized(x.data, x.scale, square))


@eager(_C.transpose_quantized)
def _transpose_quantized(data: Tensor, scale: Tensor, square: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.torchkiln.transpose_quantized.default(data, scale, square)


def dequantize(x: Quantized | QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns ``x.data * x.scale``, a contiguous tensor.

    Args:
        x: a result of :func:`quantize` or of :func:`quantize_weight`.
        dtype: float32, float64, float16 or bfloat16. float32 holds every value but one: quantised,
            its largest numbers become 256 * 2^120, which is infinity in float32.
    """
    return _dequantize(x.data, x.scale, dtype)


@eager(_C.dequantize)
def _dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.torchkiln.dequantize.default(data, scale, dtype)


def linear_fp8(
    x: Tensor | Quantized,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    quantized: QuantizedWeight | None = None,
) -> Tensor:
    """Returns ``x @ weight.T + bias``, contiguous, as a product in float8_e4m3fn.

    Both factors are quantised, as by :func:`quantize` and :func:`quantize_weight`, and products are
    accumulated in float32. Backward quantises the gradient and computes two more such products; the
    gradients of ``x`` and ``weight`` pass straight through the rounding. That of ``bias`` is not
    quantised. Forward keeps ``x`` for backward in float8_e4m3fn. Second derivatives, torch.func and
    forward mode raise an error.

    Products are those of ``torch.nn.functional.scaled_mm``, which needs compute capability 9.0. A
    CPU multiplies the dequantised factors in float32, for tests.

    Args:
        x: ``[..., k]``; float32, float16 or bfloat16, or quantised: several layers can then share
            it. The result has the dtype of ``x``. If ``x`` is quantised, it has the dtype of the
            tensor that was quantised if autograd records that tensor, else the dtype of ``weight``.
        weight: ``[n, k]``; float32, float16 or bfloat16, whatever the dtype of ``x``.
        bias: ``[n]``; of the dtype of the result, or float32 if that has half precision; a GPU
            rounds it to the dtype of the result.
        quantized: :func:`quantize_weight` of ``weight``, which forward and backward then use.
    """
    prepared = (None, None, None, None) if quantized is None else quantized
    if isinstance(x, Quantized):
        return _linear_fp8(x.data, weight, bias, x.scale, x.source, *prepared)
    return _linear_fp8(x, weight, bias, None, None, *prepared)


@eager(_C.linear_fp8)
def _linear_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    source: Tensor | None,
    weight_data: Tensor | None,
    weight_scale: Tensor | None,
    weight_transposed: Tensor | None,
    weight_transposed_scale: Tensor | None,
) -> Tensor:
    return torch.ops.torchkiln.linear_fp8.default(
        x,
        weight,
        bias,
        scale,
        source,
        weight_data,
        weight_scale,
        weight_transposed,
        weight_transposed_scale,
    )


def gated_linear_fp8(
    x: Tensor | Quantized,
    weight: Tensor,
    act: Literal["silu", "gelu", "gelu_tanh"] = "silu",
    *,
    quantized: QuantizedWeight | None = None,
) -> Quantized:
    """Returns ``quantize(act(gate) * up)`` for ``[gate, up] = linear_fp8(x, weight)``.

    The first half of a feed-forward layer; :func:`linear_fp8` of the result is the second.
    Backward writes the gradients of gate and up in E4M3 only, in both orientations, from one read
    of gate, up and the gradient of the result, and computes the two products of :func:`linear_fp8`.
    Gate and up are kept in the dtype of the result.

    Args:
        x: as for :func:`linear_fp8`.
        weight: ``[2 * n, k]``: the rows of gate, then those of up.
        act: the activation.
        quantized: :func:`quantize_weight` of ``weight``, which forward and backward then use.
    """
    prepared = (None, None, None, None) if quantized is None else quantized
    data, scale, source = (
        (x.data, x.scale, x.source) if isinstance(x, Quantized) else (x, None, None)
    )
    found = torch.ops.torchkiln.gated_linear_fp8.default(
        data, weight, act, scale, source, *prepared
    )
    return Quantized(*found)


def swiglu_fp8(gate: Tensor, up: Tensor | None = None) -> Quantized:
    """Returns ``quantize(swiglu(gate, up))`` in one pass, for :func:`linear_fp8`.

    The gate is rounded to its dtype before it is quantised: the bits are those of the two
    functions. The gradient passes straight through to :func:`swiglu`. Rows that are not whole
    vectors of 8 elements from a 16-byte boundary on take two passes on a GPU.

    Args:
        gate: as for :func:`swiglu`; float32, float16 or bfloat16.
        up: as for :func:`swiglu`.
    """
    return Quantized(*torch.ops.torchkiln._gated_fp8.default(gate, up, "silu"))


def geglu_fp8(
    gate: Tensor, up: Tensor | None = None, approximate: Literal["none", "tanh"] = "none"
) -> Quantized:
    """Returns ``quantize(geglu(gate, up, approximate))`` in one pass, as :func:`swiglu_fp8` does.

    The arguments are those of :func:`geglu`; float32, float16 or bfloat16.
    """
    act = "gelu_tanh" if is_tanh(approximate, "geglu_fp8") else "gelu"
    return Quantized(*torch.ops.torchkiln._gated_fp8.default(gate, up, act))


def source_of(x: Tensor) -> Tensor | None:
    """The tensor, if autograd records what is computed from it."""
    return x if torch.is_grad_enabled() and x.requires_grad else None
