"""The ways to compute a convolution with a folded batch norm, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchkiln import _C
from torchkiln.ops._folding import PLAIN, Fold, Form, Parts, fold_of, why_not_now
from torchkiln.ops.activation import gelu, relu_, sigmoid_, silu_, square_, tanh_
from torchkiln.ops.matmul import linear

Sizes = tuple[int, ...]

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "square": square_,
    "relu": relu_,
    "gelu": gelu,
    "gelu_tanh": lambda y: gelu(y, "tanh"),
    "silu": silu_,
    "sigmoid": sigmoid_,
    "tanh": tanh_,
}
"""Activations that may write into their argument."""

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
"""Convolutions by the rank of their input."""

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats with adjacent channels, by rank."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that autocast casts."""


class Geometry(NamedTuple):
    """The settings of a convolution."""

    stride: Sizes
    padding: Sizes | str
    """The same before and after, or ``"same"`` where these differ."""
    dilation: Sizes
    groups: int


def by_steps(
    x: Tensor, fold: Fold, residual: Tensor | None, geometry: Geometry, act: str
) -> Tensor:
    """The convolution with a bias, then the sum and the activation in its memory."""
    y = CONVOLUTIONS[x.dim()](x, fold.weight, fold.bias, *geometry)
    if residual is not None:
        y += residual
    return ACTS[act](y)


def by_product(x: Tensor, fold: Fold, residual: Tensor | None, _: Geometry, act: str) -> Tensor:
    """The pixels as rows of a matrix; a residual is copied if it has another layout."""
    rows, weight = x.movedim(1, -1), fold.weight.flatten(1)
    more = None if residual is None else residual.movedim(1, -1)
    return linear(rows, weight, fold.bias, act, 1.0, more).movedim(-1, 1)


def by_cudnn(
    x: Tensor, fold: Fold, residual: Tensor | None, geometry: Geometry, _: str
) -> Tensor | None:
    """One call of cuDNN, with relu; None if it has no kernel for the call."""
    if fold.refused is not None:
        return None
    stride, padding, dilation, groups = geometry
    assert not isinstance(padding, str)
    settings = (stride, padding, dilation, groups)
    try:
        if residual is None:
            return torch.cudnn_convolution_relu(x, fold.weight, fold.bias, *settings)
        weight, bias = fold.weight, fold.bias
        return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *settings)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        fold.refused = str(error).partition("\n")[0]
        return None


class Route(NamedTuple):
    """A way to compute ``act(batch_norm(convolution(x)) + residual)`` without gradients."""

    words: str
    run: Callable[[Tensor, Fold, Tensor | None, Geometry, str], Tensor | None] | None = None
    """Computes it with a fold; None if it cannot."""


APART = Route("convolution, then bn_act")
STEPS = Route("folded convolution, then sum and activation in place", by_steps)
CUDNN = Route("folded convolution with sum and relu in cuDNN", by_cudnn)
PRODUCT = Route(
    "folded 1x1 convolution as a matrix product with bias, activation and residual", by_product
)


def choose(
    x: Tensor, weight: Tensor, geometry: Geometry, act: str, *, has_residual: bool
) -> tuple[Route, str]:
    """The fastest way that the call allows, and the reason."""
    if not x.is_cuda:
        return STEPS, "on a CPU the bias is part of the convolution, and a pass is saved"
    if act != "relu" and (act == "none" or not has_residual) and is_product(x, weight, geometry):
        return PRODUCT, "a kernel of one element, and channels are adjacent in x"
    if act != "relu":
        why = f"cuDNN computes relu, not {act}"
    elif x.dim() != 4 or geometry.groups != 1:
        why = "cuDNN's fused kernels are for 2 dimensions and 1 group"
    elif x.dtype == torch.float64 or isinstance(geometry.padding, str):
        why = "cuDNN has no fused kernel for float64 and for uneven padding"
    elif not torch.backends.cudnn.enabled or torch.version.cuda is None:
        why = "cuDNN is not available"
    else:
        return CUDNN, "cuDNN computes bias, sum and relu in the convolution"
    return APART, why


def run_folded(
    x: Tensor,
    parts: Parts,
    residual: Tensor | None,
    geometry: Geometry,
    *,
    act: str,
    eps: float,
) -> Tensor | None:
    """The result from a folded batch norm; None if convolution and batch norm are to run apart."""
    dtype = dtype_of(x, parts.weight)
    if dtype is None or not takes(x, parts.weight, residual, geometry, dtype) or not eps >= 0:
        return None  # the convolution or bn_act says what is wrong
    reason = why_not_now(x, parts, residual)
    if reason is not None:
        _C.note(f"{APART.words}: {reason}")
        return None
    if x.dtype != dtype:
        x = x.to(dtype)
    route, why = choose(x, parts.weight, geometry, act, has_residual=residual is not None)
    if route.run is not None:
        found = fold_of(parts, Form(eps, dtype, format_of(x, parts.weight)))
        if isinstance(found, Fold):
            result = route.run(x, found, residual, geometry, act)
            if result is not None:
                _C.note(f"{route.words}: {why}")
                return result
            why = f"cuDNN refused the fused call: {found.refused}"
        else:
            why = found
    _C.note(f"{APART.words}: {why}")
    return None


def geometry_of(
    weight: Tensor,
    stride: int | Sizes,
    padding: int | Sizes | str,
    dilation: int | Sizes,
    groups: int,
) -> Geometry:
    """The settings with one number for each dimension of the kernel."""
    dims = weight.dim() - 2
    every = spread(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        reach = [d * (k - 1) for d, k in zip(every, weight.shape[2:], strict=True)]
        if all(r % 2 == 0 for r in reach):
            padding = tuple(r // 2 for r in reach)
    pads = padding if isinstance(padding, str) else spread(padding, dims)
    return Geometry(spread(stride, dims), pads, every, groups)


def spread(value: int | Sizes, count: int) -> Sizes:
    """A number for each dimension."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def is_product(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether the pixels are rows of a matrix, each of which the kernel reads once."""
    return (
        all(size == 1 for size in weight.shape[2:])
        and geometry.groups == 1
        and not isinstance(geometry.padding, str)
        and all(s == 1 for s in geometry.stride)
        and not any(geometry.padding)
        and x.movedim(1, -1).is_contiguous()
    )


def format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory format in which torch convolves, so that the weight is not copied in each call."""
    last = LAST.get(x.dim())
    if last is None or (x.is_contiguous() and weight.is_contiguous()):
        return torch.contiguous_format
    for tensor in (x, weight):
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            return last
    return torch.contiguous_format


def dtype_of(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of the convolution; None if the tensors do not agree."""
    dtype, other, kind = x.dtype, weight.dtype, x.device.type
    if torch.is_autocast_enabled(kind) and dtype in NARROW and other in NARROW:
        return torch.get_autocast_dtype(kind)
    return dtype if dtype == other and (dtype in NARROW or dtype == torch.float64) else None


def takes(
    x: Tensor, weight: Tensor, residual: Tensor | None, geometry: Geometry, dtype: torch.dtype
) -> bool:
    """Whether the arguments are those of a right call with plain tensors on a CPU or a GPU."""
    shape, kernel = x.shape, weight.shape
    if len(shape) != len(kernel) or len(shape) not in CONVOLUTIONS or type(x) not in PLAIN:
        return False
    if shape[1] != kernel[1] * geometry.groups or kernel[0] % geometry.groups or 0 in shape:
        return False
    if x.device != weight.device or not (x.is_cuda or x.is_cpu):
        return False
    return residual is None or (
        residual.shape == (shape[0], kernel[0], *result_sizes(x, weight, geometry))
        and residual.dtype == dtype
        and residual.device == x.device
        and type(residual) in PLAIN
    )


def result_sizes(x: Tensor, weight: Tensor, geometry: Geometry) -> Sizes:
    """Sizes of the result of the convolution behind the channels."""
    inputs, kernel = x.shape[2:], weight.shape[2:]
    if isinstance(geometry.padding, str):
        return tuple(inputs)
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(
            inputs, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
        )
    )
