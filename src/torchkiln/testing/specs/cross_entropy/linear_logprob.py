"""The contract of log-probabilities and entropies of a linear layer's outputs."""

from __future__ import annotations

from collections.abc import Iterator
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
from torchkiln.testing.specs.cross_entropy import linear
from torchkiln.testing.specs.cross_entropy import logprob as whole

# Options, one at a time.
OPTIONS: dict[str, dict[str, Any]] = {
    "no bias": {},
    "ignored": {"ignore_index": 2},
    "softcap": {"softcap": 2.5},
    "temperature": {"temperature": 0.7},
    "temperature and softcap": {"temperature": 1.5, "softcap": 2.5},
}


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, then with each option, with and without a bias."""

    def x(*shape: int) -> Tensor:
        return normal("x", shape, device, dtype)

    yield linear.call("typical", x(6, 10), 7, entropy=True)
    for name, (shape, classes) in linear.SHAPES.items():
        yield linear.call(name, x(*shape), classes, has_bias=name != "wide", entropy=True)
    yield linear.call("no rows", x(0, 5), 3, entropy=True)
    for name, options in OPTIONS.items():
        yield linear.call(name, x(4, 5), 6, has_bias=name != "no bias", entropy=True, **options)
    rows = torch.tensor([5, 0, 3], device=device)
    yield linear.call("some rows", x(2, 3, 5), 6, rows=rows, entropy=True)
    yield linear.call("rows, none", x(4, 5), 6, rows=rows[:0], entropy=True)
    some = linear.call("all ignored", x(9, 8), 21, entropy=True)
    yield some.substitute(2, torch.full_like(some.args[2], -100))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits, at least in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def flat(logits: Tensor, target: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """Capped logits and classes as rows, and other options. Rows left out have an ignored class."""
    options = {"ignore_index": -100, "temperature": 1.0, "entropy": False, **kwargs}
    softcap, counted = options.pop("softcap", None), options.pop("rows", None)
    rows = logits.reshape(-1, logits.shape[-1])
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    target = target.reshape(-1)
    if counted is not None:
        among = torch.full_like(target, options["ignore_index"])
        target = among.index_copy(0, counted, target[counted])
    return rows, target, options


def shaped(found: Any, target: Tensor) -> Any:
    """Results in the shape of the target."""
    if isinstance(found, Tensor):
        return found.reshape(target.shape)
    return tuple(each.reshape(target.shape) for each in found)


def reference(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Any:
    """The formula of the op, at least in float32."""
    rows, classes, options = flat(product(x, weight, bias), target, kwargs)
    return shaped(whole.reference(rows, classes, **options), target)


def magnitude(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Any:
    """The magnitude of the results, plus the effect of rounding the logits."""
    rows, classes, options = flat(product(x, weight, bias), target, kwargs)
    z = whole.scaled(rows, classes, options["ignore_index"], options["temperature"])
    p, logs, of_row = whole.terms(z)
    moved = linear.roundings(x, weight, bias) / options["temperature"]
    slopes = (p * (logs.abs() + of_row.unsqueeze(-1))).sum(-1)
    options["entropy"] = True
    own = whole.magnitude(rows, classes, **options)
    both = (own[0] + 2 * moved, own[1] + 2 * slopes * moved)
    wants = kwargs.get("entropy", False)
    return shaped(whole.both(both, classes, options["ignore_index"], wants), target)


def gradient_terms(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    kwargs: dict[str, Any],
    *,
    is_rounding: bool,
) -> Any:
    """Functions whose gradients sum absolute values, as in the contract of the loss."""
    with torch.no_grad():
        rows, classes, options = flat(product(x, weight, bias), target, kwargs)
        ignored, temperature = options["ignore_index"], options["temperature"]
        z = whole.scaled(rows, classes, ignored, temperature)
        errors = 2 * linear.roundings(x, weight, bias).unsqueeze(-1) / temperature
        pulls = whole.pulls(z, classes, ignored, 0.0 if is_rounding else errors)
        growth = (1.0, 1.0) if is_rounding else (steps(rows.shape[1]), steps(rows.shape[0]))
    of_x = F.linear(x, weight.detach().abs()) * growth[0]
    of_weight = F.linear(x.detach().abs(), weight, bias) * growth[1]
    each = (of_x + of_weight).reshape(rows.shape) / temperature
    both = tuple((each * pull).sum(-1) for pull in pulls)
    return shaped(whole.both(both, classes, ignored, options["entropy"]), target)


def gradient_magnitude(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Any:
    """A function whose gradients sum the absolute values of the terms of all products."""
    return gradient_terms(x, weight, target, bias, kwargs, is_rounding=False)


def output_sensitivity(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> Any:
    """The effect of rounding the logits' gradient to the dtype of x."""
    return gradient_terms(x, weight, target, bias, kwargs, is_rounding=True)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call for both results of a layer whose logits have this shape."""
    call = linear.bench(device, dtype, shape)
    return Sample("bench", call.args, {"entropy": True})


def bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """The benchmark call with ``rows``, a random quarter of the rows."""
    call = bench(device, dtype, shape)
    rows = torch.randperm(shape[0], device=device)[: shape[0] // 4]
    yield "25% of rows", Sample("bench", call.args, {**call.kwargs, "rows": rows})


def counted(sample: Sample) -> Sample:
    """The call with only the rows that count."""
    rows = sample.kwargs.get("rows")
    return sample if rows is None else sample.substitute(0, sample.args[0][: rows.numel()])


def traffic(sample: Sample) -> Traffic:
    """Reads the rows that count and the weight."""
    return linear.traffic(counted(sample))


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the rows that count and the weight, writes their gradients."""
    return linear.backward_traffic(counted(sample))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with targets or rows that do not match x, and with numbers out of range."""
    x, weight = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    target = torch.tensor([1, 2], device=device)
    overload = torch.ops.torchkiln.linear_logprob.default
    good = GoodCall(overload, Sample("good", (x, weight, target)))
    words = "weight: got shape [0, 4], expected at least 1 row: one for each class"
    yield good.changed(words, weight=weight[:0])
    yield from whole.wrong_targets(good, "x", x)
    yield from whole.wrong_temperatures(good)
    for softcap in (0.0, -2.0):
        words = f"softcap: got {softcap:g}, expected a number greater than 0, or None"
        yield good.changed(words, ValueError, softcap=softcap)
    expected = (
        "expected int64 [any], indices of rows, or bool [2], a mask of the shape of the result"
    )
    words = f"rows: got {{}}, {expected}"
    for wrong in (target.float(), target.view(2, 1), torch.ones(3, device=device) > 0):
        yield good.changed(words.format(f"{name_of(wrong.dtype)} {list(wrong.shape)}"), rows=wrong)


LINEAR_LOGPROB = OpSpec(
    op=torchkiln.linear_logprob,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    # The gradient of the logits is rounded before it is multiplied.
    output_sensitivity=output_sensitivity,
    inputs=inputs,
    differentiable=(0, 1, 3),
    refusals=Refusals(
        dtypes={"weight": "x"},
        parameters={"bias": "x"},
        shapes={"bias": "the first size of weight"},
    ),
    invalid=invalid,
    bench=bench,
    bench_variants=bench_variants,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    indices=(2,),
    autocast=(0, 1),
    threads_matter=True,
    bench_shapes=((8192, 32768), (16384, 131072)),
    small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
    helpers=("_linear_logprob_forward", "_linear_logprob_backward"),
    module=layer(torchkiln.nn.LinearLogprob, 10, 7, True, entropy=True),
    module_inputs=linear.typical_inputs,
    excluded={
        "mixed_dtypes": "the results are float32; tests/ops/test_logprob.py compares a float32 bias"
    },
)
