"""The ways to compute a convolution with a folded batch norm, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchkiln import _C
from torchkiln.ops._folding import PLAIN, Fold, Form, Parts, fold_of, kept_fold, why_not_now
from torchkiln.ops._traced import name_of
from torchkiln.ops.activation import ACTIVATIONS, IN_PLACE
from torchkiln.ops.matmul import linear
from torchkiln.typing import Activation

Sizes = tuple[int, ...]

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda y: y} | ACTIVATIONS | IN_PLACE
"""Activations that may write into their argument."""

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
"""Convolutions by the rank of their input."""

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats with adjacent channels, by rank."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that autocast casts."""

HALF = (torch.float16, torch.bfloat16)

LEAST_CHANNELS = 4
"""Channels per group from which cuDNN's fused kernels were measured to be fast."""


class Geometry(NamedTuple):
    """The settings of a convolution."""

    stride: Sizes
    padding: Sizes | str
    """Zeros on each side, or ``"same"`` where the two sides differ."""
    dilation: Sizes
    groups: int


def by_steps(
    x: Tensor, fold: Fold, residual: Tensor | None, geometry: Geometry, act: Activation
) -> Tensor:
    """Convolves with a bias, then adds the residual and applies the activation in place."""
    y = CONVOLUTIONS[x.dim()](x, fold.weight, fold.bias, *geometry)
    if residual is not None:
        y += residual
    return ACTS[act](y)


def by_product(
    x: Tensor, fold: Fold, residual: Tensor | None, _: Geometry, act: Activation
) -> Tensor:
    """A matrix product with pixels as rows; a residual of another layout is copied."""
    rows, weight = x.movedim(1, -1), fold.weight.flatten(1)
    more = None if residual is None else residual.movedim(1, -1)
    return linear(rows, weight, fold.bias, act=act, residual=more).movedim(-1, 1)


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
    run: Callable[[Tensor, Fold, Tensor | None, Geometry, Activation], Tensor | None]
    """Computes the result with a fold; returns None if it cannot."""


APART = Route("convolution, then bn_act", lambda *_: None)
STEPS = Route("folded convolution, then sum and activation in place", by_steps)
CUDNN = Route("folded convolution with sum and relu in cuDNN", by_cudnn)
PRODUCT = Route(
    "folded 1x1 convolution as a matrix product with bias, activation and residual", by_product
)


def choose(
    x: Tensor, weight: Tensor, geometry: Geometry, act: Activation, *, has_residual: bool
) -> tuple[Route, str]:
    """The fastest route that the call allows, and the reason.

    Times on an H200 in channels_last, relative to torch's convolution alone:

    - cuDNN with relu: 1.0 to 1.1, with a residual 1.1 to 2.5;
    - torch's convolution and bn_act: 1.2 to 2.2, with a residual 1.3 to 3.
    """
    if not x.is_cuda:
        return STEPS, "on a CPU the bias is part of the convolution, and a pass is saved"
    if act != "relu":
        why = why_no_product(x, weight, geometry, act, has_residual=has_residual)
        ours = "a kernel of one element, and channels are adjacent in x"
        return (PRODUCT, ours) if why is None else (APART, why)
    why = why_no_cudnn(x, weight, geometry, has_residual=has_residual)
    theirs = "cuDNN computes bias, sum and relu in the convolution"
    return (CUDNN, theirs) if why is None else (APART, why)


def why_no_product(
    x: Tensor, weight: Tensor, geometry: Geometry, act: Activation, *, has_residual: bool
) -> str | None:
    """The reason not to compute a convolution as a matrix product, if any.

    In float32 torch allows TensorFloat-32 in convolutions, but by default not in matrix products. A
    stride needs a copy of the pixels, which takes as long as the product saves.
    """
    ones = (1,) * len(geometry.stride)
    if weight.shape[2:] != ones or geometry.groups != 1 or (act != "none" and has_residual):
        return f"cuDNN computes relu, not {act}"
    if not is_last(x) or geometry.stride != ones or geometry.padding != (0,) * len(ones):
        return "the pixels are no rows of a matrix"
    return None if x.dtype in HALF else f"a product in {name_of(x.dtype)} is slower"


def why_no_cudnn(
    x: Tensor, weight: Tensor, geometry: Geometry, *, has_residual: bool
) -> str | None:
    """The reason not to use cuDNN's fused kernels, if any.

    Three cases take longer than torch's convolution and bn_act:

    - half precision without adjacent channels, because cuDNN converts x: 1.02 to 2.7 times;
    - fewer than ``LEAST_CHANNELS`` channels per group: 1.1 to 11 times;
    - output pixels that are no multiple of 8 bytes, or 16 with a residual: 1.5 times.
    """
    pixel = weight.shape[0] * x.element_size()
    if x.dim() != 4 or x.dtype == torch.float64 or isinstance(geometry.padding, str):
        return "cuDNN has no fused kernel for float64, uneven padding, 1 or 3 dimensions"
    if x.dtype in HALF and not is_last(x):
        return "cuDNN's fused kernel is slow in half precision unless channels are adjacent in x"
    if geometry.groups != 1 and weight.shape[1] < LEAST_CHANNELS:
        return f"cuDNN's fused kernel is slow for less than {LEAST_CHANNELS} channels per group"
    if pixel % (16 if has_residual else 8):
        return f"cuDNN's fused kernel is slow for results of {weight.shape[0]} channels"
    has_cudnn = torch.backends.cudnn.enabled and torch.version.cuda is not None
    return None if has_cudnn else "cuDNN is not available"


APART_CALLS: dict[tuple[Any, ...], str] = {}
"""Notes of the calls for which :func:`choose` returned ``APART``: choosing again takes 10 us."""

MOST_CALLS = 4096


def run_folded(
    owner: object,
    x: Tensor,
    parts: Parts,
    residual: Tensor | None,
    geometry: Geometry,
    *,
    act: Activation,
    eps: float,
) -> Tensor | None:
    """The result from a folded batch norm; None if convolution and batch norm are to run apart."""
    if not is_plain(x) or (residual is not None and not is_plain(residual)):
        return None  # bn_act or the convolution reports errors
    reason = why_not_now(owner, x, parts, residual)
    if reason is not None:
        _C.note(f"{APART.words}: {reason}")
        return None
    call = signature(x, residual, geometry, act, eps)
    fold = kept_fold(owner, parts)
    last, route, note = (None, APART, "") if fold is None else fold.last
    if fold is None or last != call:
        case = (*call, parts.weight.shape, parts.weight.dtype, parts.weight.device)
        known = APART_CALLS.get(case)
        if known is not None:
            _C.note(known)
            return None
        found, route, note = planned(owner, x, parts, residual, geometry, case, act=act, eps=eps)
        if found is None:
            _C.note(note)
            return None
        fold = found
        fold.last = call, route, note
    if x.dtype != fold.form.dtype:
        x = x.to(fold.form.dtype)
    fold.is_used()
    result: Tensor | None = route.run(x, fold, residual, geometry, act)
    if result is None:
        note = f"{APART.words}: cuDNN refused the fused call: {fold.refused}"
    _C.note(note)
    return result


def signature(
    x: Tensor, residual: Tensor | None, geometry: Geometry, act: Activation, eps: float
) -> tuple[Any, ...]:
    """The properties of a call, besides its :class:`Parts`, that decide how it is computed."""
    added = None if residual is None else (residual.shape, residual.dtype, residual.device)
    kind = "cuda" if x.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    has_cudnn = torch._C._get_cudnn_enabled()
    place = x.shape, x.stride(), x.dtype, x.device
    return place, added, geometry, act, eps, autocast, has_cudnn


def planned(
    owner: object,
    x: Tensor,
    parts: Parts,
    residual: Tensor | None,
    geometry: Geometry,
    case: tuple[Any, ...],
    *,
    act: Activation,
    eps: float,
) -> tuple[Fold | None, Route, str]:
    """The fold for this call or None, the route, and the note that explains the route.

    ``case`` are the properties that :func:`choose` reads.
    """
    dtype = dtype_of(x, parts.weight)
    if dtype is None or not takes(x, parts.weight, residual, geometry, dtype) or not eps >= 0:
        return None, APART, f"{APART.words}: the arguments do not agree"  # torch raises the error
    x = x.to(dtype)
    route, why = choose(x, parts.weight, geometry, act, has_residual=residual is not None)
    note = f"{route.words}: {why}"
    if route is APART:
        if len(APART_CALLS) >= MOST_CALLS:
            APART_CALLS.clear()
        APART_CALLS[case] = note
        return None, APART, note
    fold = fold_of(owner, parts, Form(eps, dtype, format_of(x, parts.weight)))
    if isinstance(fold, Fold):
        return fold, route, note
    return None, APART, f"{APART.words}: {fold}"


def geometry_of(
    weight: Tensor,
    stride: int | Sizes,
    padding: int | Sizes | str,
    dilation: int | Sizes,
    groups: int,
) -> Geometry:
    """The settings with one number for each spatial dimension of the kernel."""
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
    """The value for each of ``count`` dimensions."""
    if type(value) is tuple and len(value) == count:
        return value
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def is_plain(x: Tensor) -> bool:
    """Whether this is a strided tensor on a CPU or a GPU, and of no subclass with its own code."""
    return type(x) in PLAIN and (x.is_cuda or x.is_cpu) and x.layout is torch.strided


def is_last(x: Tensor) -> bool:
    """Whether the channels of a pixel are adjacent, and the pixels follow each other."""
    return x.movedim(1, -1).is_contiguous()


def format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory format that torch's convolution uses, to avoid a copy of the weight per call."""
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
    """Whether ranks, channels, devices and the residual fit a convolution."""
    shape, kernel = x.shape, weight.shape
    if len(shape) != len(kernel) or len(shape) not in CONVOLUTIONS:
        return False
    if shape[1] != kernel[1] * geometry.groups or kernel[0] % geometry.groups or 0 in shape:
        return False
    if x.device != weight.device:
        return False
    return residual is None or (
        residual.shape == (shape[0], kernel[0], *result_sizes(x, weight, geometry))
        and residual.dtype == dtype
        and residual.device == x.device
    )


def result_sizes(x: Tensor, weight: Tensor, geometry: Geometry) -> Sizes:
    """Spatial sizes of the convolution's result, without batch and channels."""
    inputs, kernel = x.shape[2:], weight.shape[2:]
    if isinstance(geometry.padding, str):
        return tuple(inputs)
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(
            inputs, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
        )
    )
