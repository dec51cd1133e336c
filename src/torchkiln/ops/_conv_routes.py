"""The ways to compute a convolution with a folded batch norm, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
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


class Route(Enum):
    """A way to compute ``act(batch_norm(convolution(x)) + residual)`` without gradients."""

    apart = "convolution, then bn_act"
    steps = "folded convolution, then sum and activation in place"
    cudnn = "folded convolution with sum and relu in cuDNN"
    product = "folded 1x1 convolution as a matrix product with bias, activation and residual"


def choose(
    x: Tensor, weight: Tensor, geometry: Geometry, act: str, *, has_residual: bool
) -> tuple[Route, str]:
    """The fastest way that the call allows, and the reason."""
    if not x.is_cuda:
        return Route.steps, "on a CPU the bias is part of the convolution, and a pass is saved"
    is_flat = all(size == 1 for size in weight.shape[2:]) and is_plain(geometry)
    if is_flat and is_last(x) and act != "relu" and (act == "none" or not has_residual):
        return Route.product, "a kernel of one element, and channels are adjacent in x"
    for applies, why in (
        (act != "relu", f"cuDNN computes relu, not {act}"),
        (x.dim() != 4, "cuDNN's fused kernels are for 2 dimensions"),
        (geometry.groups != 1, "cuDNN's fused kernels are for 1 group"),
        (x.dtype == torch.float64, "cuDNN has no fused kernel for float64"),
        (isinstance(geometry.padding, str), "cuDNN pads both sides alike"),
        (not torch.backends.cudnn.enabled or torch.version.cuda is None, "cuDNN is not available"),
    ):
        if applies:
            return Route.apart, why
    return Route.cudnn, "cuDNN computes bias, sum and relu in the convolution"


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
        _C.note(f"{Route.apart.value}: {reason}")
        return None
    if x.dtype != dtype:
        x = x.to(dtype)
    route, why = choose(x, parts.weight, geometry, act, has_residual=residual is not None)
    if route is not Route.apart:
        found = fold_of(parts, Form(eps, dtype, format_of(x, parts.weight)))
        if isinstance(found, Fold):
            result = ROUTES[route](x, found, residual, geometry, act)
            if result is not None:
                _C.note(f"{route.value}: {why}")
                return result
            why = f"cuDNN refused the fused call: {found.refused}"
        else:
            why = found
    _C.note(f"{Route.apart.value}: {why}")
    return None


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


ROUTES: dict[Route, Callable[[Tensor, Fold, Tensor | None, Geometry, str], Tensor | None]] = {
    Route.steps: by_steps,
    Route.product: by_product,
    Route.cudnn: by_cudnn,
}


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


def is_plain(geometry: Geometry) -> bool:
    """Whether a kernel of one element reads each pixel once."""
    return (
        geometry.groups == 1
        and not isinstance(geometry.padding, str)
        and all(s == 1 for s in geometry.stride)
        and not any(geometry.padding)
    )


def is_last(x: Tensor) -> bool:
    """Whether the channels of a pixel are adjacent, and the pixels follow each other."""
    return x.movedim(1, -1).is_contiguous()


def format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory format in which torch convolves, so that the weight is not copied in each call."""
    last = LAST.get(x.dim())
    if last is not None and any(
        t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, weight)
    ):
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
