"""The contract of the cross-entropy of a linear layer's outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.ops._traced import name_of
from torchkiln.testing.compare import steps
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.cross_entropy import logits as whole

# Shapes of x, and the number of classes. "two chunks" has more rows than the largest chunk.
SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = (
    {"one row": ((1, 5), 7), "no leading sizes": ((5,), 7), "one class": ((4, 3), 1)}
    | {"one feature": ((7, 1), 9), "no features": ((4, 0), 3), "prime": ((13, 11), 17)}
    | {"batch": ((2, 3, 5), 6), "vector and one": ((9, 33), 129), "wide": ((5, 8), 1025)}
    | {"two chunks": ((8193, 3), 5)}
)

# Options, one at a time. tests/ops/test_linear_cross_entropy.py combines them.
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 2},
    "z-loss": {"z_loss": 0.01, "reduction": "none"},
    "weighted": {"weight": True},
    "softcap": {"softcap": 2.5},
    "softcap, none": {"softcap": 2.5, "reduction": "none"},
    "temperature": {"temperature": 0.7},
    "temperature, softcap, none": {"temperature": 1.5, "softcap": 2.5, "reduction": "none"},
    "all": {"weight": True, "ignore_index": 2, "label_smoothing": 0.3, "z_loss": 0.02},
    "checked": {"check_target": True, "reduction": "sum"},
}


def call(
    name: str,
    x: Tensor,
    classes: int,
    *,
    has_bias: bool = True,
    parameters: torch.dtype | None = None,
    **options: Any,
) -> Sample:
    """A call with this x; ``parameters`` is the dtype of bias and class weights."""
    device = x.device
    features = x.shape[-1]
    weight = 2 * normal("weight", (classes, features), device, torch.float64)
    bias = normal("bias", (classes,), device, parameters or x.dtype) if has_bias else None
    rows = torch.arange(math.prod(x.shape[:-1]), device=device)
    target = (rows * 7919 + 1) % classes
    if "ignore_index" in options:
        target[1::3] = options["ignore_index"]
    if "weight" in options:
        options["weight"] = (
            normal("class_weight", (classes,), device, parameters or x.dtype).abs() + 0.1
        )
    weight = (weight / max(features, 1) ** 0.5).to(x.dtype)
    return Sample(name, (x, weight, target.reshape(x.shape[:-1]), bias), options)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, then with each option, with and without a bias."""

    def x(*shape: int) -> Tensor:
        return normal("x", shape, device, dtype)

    # Losses per row: a call that uses both helper ops.
    yield call("typical", x(6, 10), 7, reduction="none")
    yield call("mean", x(6, 10), 7)
    for name, (shape, classes) in SHAPES.items():
        yield call(name, x(*shape), classes, has_bias=name != "wide")
    for reduction in ("sum", "none"):
        yield call(f"no rows, {reduction}", x(0, 5), 3, reduction=reduction)
    for name, options in OPTIONS.items():
        yield call(name, x(4, 5), 6, has_bias=name != "none", **options)
    if dtype in (torch.float16, torch.bfloat16):
        # The contract has no bound for a float32 gradient that sums half precision terms, such as
        # that of a bias: tests/ops/test_linear_cross_entropy.py compares it.
        rows, wide = x(7, 9), torch.float32
        given = {"has_bias": False, "weight": True}
        yield call("float32 class weights", rows, 33, parameters=wide, **given)
    for out in dict.fromkeys((dtype, torch.float32, torch.float16, torch.bfloat16)):
        yield call(f"to {out}", x(9, 8), 21, loss_dtype=out)
    some = call("all ignored", x(9, 8), 21, label_smoothing=0.1)
    yield some.substitute(2, torch.full_like(some.args[2], -100))


Arguments = tuple[Tensor, Tensor, dict[str, Any]]


def flat(logits: Tensor, target: Tensor, kwargs: Mapping[str, Any]) -> Arguments:
    """Logits and classes as rows, and the arguments of :func:`torchkiln.cross_entropy`."""
    options = dict(kwargs)
    softcap, temperature = options.pop("softcap", None), options.pop("temperature", 1.0)
    for name in ("loss_dtype", "check_target"):
        options.pop(name, None)
    rows = logits.reshape(-1, logits.shape[-1])
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    if temperature != 1:
        rows = rows / temperature
    return rows, target.reshape(-1), options


def shaped(loss: Tensor, target: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The loss in the shape of the op's result."""
    return loss.reshape(target.shape if kwargs.get("reduction") == "none" else ())


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits, rounded as in torch; a bias of another dtype is added to the product."""
    if bias is None or bias.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return (F.linear(x, weight) + bias).to(x.dtype)


def composite(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Tensor:
    """The loss of all logits, which are cast first if the loss has a wider dtype."""
    dtype = kwargs.get("loss_dtype") or x.dtype
    logits = product(x, weight, bias).to(torch.promote_types(x.dtype, dtype))
    rows, classes, options = flat(logits, target, kwargs)
    return shaped(whole.reference(rows, classes, **options), target, kwargs).to(dtype)


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The loss in the dtype of the logits."""
    return composite(*args, **{**kwargs, "loss_dtype": None})


def roundings(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Per row, the largest of the sums of absolute terms of its logits, times :func:`steps`.

    An infinite logit is not rounded.
    """
    terms = F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    terms = terms.masked_fill(terms.isinf(), 0)
    return terms.reshape(-1, terms.shape[-1]).amax(-1) * steps(x.shape[-1])


def magnitude(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Tensor:
    """The magnitude of the loss, plus the effect of rounding the logits."""
    rows, classes, options = flat(product(x, weight, bias), target, kwargs)
    z_loss = options.pop("z_loss", 0.0)
    share, row = whole.terms(rows, classes, **options)
    slope = 2 * share.sum(-1) + 4 * z_loss * row * whole.log_sum_exp(rows).abs()
    moved = whole.reduced(slope * roundings(x, weight, bias), rows, classes, **options)
    own = whole.magnitude(rows, classes, z_loss=z_loss, **options)
    return shaped(own + moved, target, kwargs)


def gradient_terms(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    kwargs: Mapping[str, Any],
    *,
    is_rounding: bool,
) -> Tensor:
    """A function whose gradients are sums of the absolute values of the gradient's terms.

    The terms of the logits' gradient are all terms, or with ``is_rounding`` only the terms that are
    rounded to the dtype of x.
    """
    with torch.no_grad():
        logits = product(x, weight, bias)
        rows, classes, options = flat(logits, target, kwargs)
        errors = 0.0 if is_rounding else 2 * roundings(x, weight, bias).unsqueeze(-1)
        own = whole.pull(rows, classes, errors, **options)
        options.pop("z_loss", None)
        growth = (1.0, 1.0) if is_rounding else (steps(rows.shape[1]), steps(rows.shape[0]))
    of_x = F.linear(x, weight.detach().abs()) * growth[0]
    of_weight = F.linear(x.detach().abs(), weight, bias) * growth[1]
    each = (of_x + of_weight).reshape(rows.shape)
    return shaped(whole.reduced((each * own).sum(-1), rows, classes, **options), target, kwargs)


def gradient_magnitude(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Tensor:
    """A function whose gradients sum the absolute values of the terms of all products."""
    return gradient_terms(x, weight, target, bias, kwargs, is_rounding=False)


def output_sensitivity(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Tensor:
    """The effect of rounding the logits and their gradient to the dtype of x."""
    return gradient_terms(x, weight, target, bias, kwargs, is_rounding=True)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call of a layer whose logits have this shape."""
    rows, classes = shape
    features = BENCH_FEATURES if device.type == "cuda" else 64
    x = torch.randn(rows, features, device=device, dtype=dtype)
    weight = torch.randn(classes, features, device=device, dtype=dtype) / features**0.5
    return Sample("bench", (x, weight, torch.randint(classes, (rows,), device=device)))


BENCH_FEATURES = 4096
"""Features of the timed calls on a GPU."""


def products(sample: Sample) -> int:
    """Operations of one product."""
    x, weight = sample.args[:2]
    return 2 * int(x.numel()) * int(weight.shape[0])


def traffic(sample: Sample) -> Traffic:
    """Reads x and weight."""
    x, weight = sample.args[:2]
    return Traffic(x.nbytes + weight.nbytes, products(sample))


def backward_traffic(sample: Sample) -> Traffic:
    """Reads x and weight, writes their gradients."""
    x, weight = sample.args[:2]
    return Traffic(2 * (x.nbytes + weight.nbytes), 2 * products(sample))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with weights or targets that do not match x, and with numbers out of range."""
    x, weight = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    target = torch.tensor([1, 2], device=device)
    overload = torch.ops.torchkiln.linear_cross_entropy.default
    good = GoodCall(overload, Sample("good", (x, weight, target)))
    yield good.changed(
        "x: got a 0-dimensional tensor, expected at least 1 dimension", x=x[0, 0], target=target[0]
    )
    yield good.changed(
        "linear_weight: got 1 dimensions (shape [4]), expected 2",
        linear_weight=weight[0],
        target=target,
    )
    words = "linear_weight: got shape [4, 3], expected 4 as the second size, the last size of x"
    yield good.changed(words, linear_weight=weight.T)
    words = "linear_weight: got shape [0, 4], expected at least 1 row: one for each class"
    yield good.changed(words, linear_weight=weight[:0])
    words = (
        "expected int64, of classes; for probabilities call "
        "cross_entropy(linear(x, linear_weight, linear_bias), target)"
    )
    for dtype in (torch.int32, torch.float32):
        said = f"target: got dtype {name_of(dtype)}, {words}"
        yield good.changed(said, target=target.to(dtype))
    for shape in ((3,), (2, 1), (), (2, 3)):
        said = f"target: got shape {list(shape)}, expected [2] for x of shape [2, 4]"
        wrong = torch.zeros(shape, dtype=torch.int64, device=device)
        yield good.changed(f"{said}: a class for each row", target=wrong)
    for value in (3, -1, 2**40):
        words = f"target: got {value}, expected one of 3 classes, 0 to 2, or ignore_index, -7"
        given = {"target": torch.tensor([-7, value], device=device), "ignore_index": -7}
        yield good.changed(words, IndexError, **given, check_target=True)
    for smoothing in (-0.1, 1.5, math.nan):
        words = f"label_smoothing: got {smoothing}, expected a number between 0 and 1"
        yield good.changed(words, ValueError, label_smoothing=smoothing)
    for softcap in (0.0, -2.0):
        words = f"softcap: got {softcap:g}, expected a number greater than 0, or None"
        yield good.changed(words, ValueError, softcap=softcap)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        words = f"temperature: got {temperature:g}, expected a finite number greater than 0"
        yield good.changed(words, ValueError, temperature=temperature)


def typical_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The input and the target of the module."""
    x, _, target, _ = next(inputs(device, dtype)).args
    return x, target


LINEAR_CROSS_ENTROPY = OpSpec(
    op=torchkiln.linear_cross_entropy,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    # The logits and their gradient are rounded before they are multiplied.
    output_sensitivity=output_sensitivity,
    inputs=inputs,
    differentiable=(0, 1, 3),
    refusals=Refusals(
        dtypes={"linear_weight": "x"},
        parameters={"linear_bias": "x", "weight": "x"},
        shapes=dict.fromkeys(("linear_bias", "weight"), "the first size of linear_weight"),
        words={"reduction": ("none", "mean", "sum")},
    ),
    invalid=invalid,
    bench=bench,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    indices=(2,),
    gradient_in_forward=True,
    waits_for=("check_target",),
    autocast=(0, 1),
    threads_matter=True,
    bench_shapes=((8192, 32768), (8192, 131072)),
    small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
    helpers=("_linear_cross_entropy_forward", "_linear_cross_entropy_backward"),
    module=layer(torchkiln.nn.LinearCrossEntropyLoss, 10, 7, True, z_loss=0.01),
    module_inputs=typical_inputs,
    excluded={
        "autocast": "the loss of half precision is float32 under autocast; "
        "tests/ops/test_linear_cross_entropy.py compares it"
    },
)
