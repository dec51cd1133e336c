"""The contract of divergences of two linear layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing import derive
from torchkiln.testing.compare import steps
from torchkiln.testing.data import normal
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.cross_entropy import linear
from torchkiln.testing.specs.cross_entropy.linear_logprob import product
from torchkiln.testing.specs.cross_entropy.logprob import sizes, wrong_temperatures

OPTIONS: dict[str, dict[str, Any]] = {
    "no bias": {},
    "reverse": {"direction": "reverse"},
    "js": {"direction": "js"},
    "js, little of the teacher": {"direction": "js", "beta": 0.1, "temperature": 0.7},
    "temperature": {"temperature": 1.5},
}


def call(name: str, x: Tensor, classes: int, *, has_bias: bool = True, **options: Any) -> Sample:
    """A call with this x, and a teacher of two more features."""
    own = linear.call(name, x, classes, has_bias=has_bias)
    y = normal("y", (*x.shape[:-1], x.shape[-1] + 2), x.device, x.dtype)
    weight_y = 2 * normal("weight_y", (classes, y.shape[-1]), x.device, torch.float64)
    weight_y = (weight_y / y.shape[-1] ** 0.5).to(x.dtype)
    bias_y = normal("bias_y", (classes,), x.device, x.dtype) if has_bias else None
    args = (x, own.args[1], y, weight_y, own.args[3], bias_y)
    return Sample(name, args, options)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, then with each option, with and without biases."""

    def x(*shape: int) -> Tensor:
        return normal("x", shape, device, dtype)

    yield call("typical", x(6, 10), 7)
    for name, (shape, classes) in linear.SHAPES.items():
        yield call(name, x(*shape), classes, has_bias=name != "wide")
    yield call("no rows", x(0, 5), 3)
    for name, options in OPTIONS.items():
        yield call(name, x(4, 5), 6, has_bias=name != "no bias", **options)
    rows = torch.tensor([5, 0, 3], device=device)
    yield call("some rows", x(2, 3, 5), 6, rows=rows, direction="js")
    yield call("rows, none", x(4, 5), 6, rows=rows[:0])


class Layer(NamedTuple):
    """A layer of a call and the logits of its rows, at least float32."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    logits: Tensor

    @property
    def logs(self) -> Tensor:
        """The logarithms of the layer's probabilities."""
        return torch.log_softmax(self.logits, -1)

    def errors(self, temperature: float) -> Tensor:
        """The error of each log-probability from rounding in the product and in the log-sum-exp."""
        moved = 2 * linear.roundings(self.x, self.weight, self.bias) / temperature
        return 1 + sizes(self.logits) + moved.unsqueeze(-1)


def layers(args: tuple[Any, ...], temperature: float) -> tuple[Layer, Layer]:
    """The student and the teacher of a call."""
    x, weight, y, weight_y, bias, bias_y = (*args, None, None)[:6]

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Layer:
        logits = product(x, weight, bias) / temperature
        return Layer(x, weight, bias, logits.reshape(-1, logits.shape[-1]))

    return layer(x, weight, bias), layer(y, weight_y, bias_y)


def ratios(logs: Tensor, others: Tensor, share: float | None) -> Tensor:
    """``log(own / other)``, or ``log(own / mixture)`` with the other's ``share``; 0 for own = 0."""
    if share is not None:
        others = torch.logaddexp(logs + math.log(1 - share), others + math.log(share))
    return (logs - others).masked_fill(logs.exp() == 0, 0)


def parts(log_p: Tensor, log_q: Tensor, direction: str, beta: float) -> tuple[Tensor, Tensor]:
    """The terms of the divergence with the factor p, and with the factor q."""
    mixed = direction == "js"
    of_p = log_p.exp() * ratios(log_p, log_q, beta if mixed else None)
    of_q = log_q.exp() * ratios(log_q, log_p, 1 - beta if mixed else None)
    if mixed:
        return (1 - beta) * of_p, beta * of_q
    none = torch.zeros_like(of_p)
    return (of_p, none) if direction == "reverse" else (none, of_q)


def shaped(found: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
    """The result of a call; 0 for rows that do not count."""
    if rows is not None:
        found = torch.zeros_like(found).index_copy(0, rows, found[rows])
    return found.reshape(x.shape[:-1])


def reference(
    *args: Any,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    rows: Tensor | None = None,
) -> Tensor:
    """The formula of the op, at least in float32."""
    student, teacher = layers(args, temperature)
    of_p, of_q = parts(student.logs, teacher.logs, direction, beta)
    return shaped((of_p + of_q).sum(-1), args[0], rows)


def slopes(
    student: Layer, teacher: Layer, temperature: float, direction: str, beta: float
) -> tuple[Tensor, Tensor]:
    """Absolute values of the derivatives in both layers' logits, with the errors of all factors."""
    log_p, log_q = student.logs, teacher.logs
    error_p, error_q = student.errors(temperature), teacher.errors(temperature)
    both = parts(log_p, log_q, direction, beta)

    def pull(own: Tensor, error: Tensor, other: Tensor, other_error: Tensor, terms: Tensor) -> Any:
        p, total = own.exp(), terms.abs().sum(-1, keepdim=True)
        used = (terms != 0).any()  # else the derivative is a difference of probabilities
        of_other = p * other_error if used else other.exp() * other_error
        return (p * (1 + total) + terms.abs()) * error + of_other

    return pull(log_p, error_p, log_q, error_q, both[0]), pull(
        log_q, error_q, log_p, error_p, both[1]
    )


def magnitude(
    *args: Any,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    rows: Tensor | None = None,
) -> Tensor:
    """The magnitude of the divergence, plus the effect of rounding the logits."""
    student, teacher = layers(args, temperature)
    both = slopes(student, teacher, temperature, direction, beta)
    return shaped((both[0] + both[1]).sum(-1), args[0], rows)


def gradient_terms(
    args: tuple[Any, ...],
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    rows: Tensor | None = None,
    *,
    is_rounding: bool,
) -> Tensor:
    """A function whose gradients sum absolute values, as in the contract of the loss."""
    with torch.no_grad():
        given = layers(args, temperature)
        pulls = slopes(*given, temperature, direction, beta)
    found = torch.zeros((), device=args[0].device)
    for layer, pull in zip(given, pulls, strict=True):
        x, weight, bias, logits = layer
        growth = (1.0, 1.0) if is_rounding else (steps(logits.shape[1]), steps(logits.shape[0]))
        of_x = product(x, weight.detach().abs(), None) * growth[0]
        of_weight = product(x.detach().abs(), weight, bias) * growth[1]
        each = (of_x + of_weight).reshape(logits.shape) / temperature
        found = found + (each * pull).sum(-1)
    return shaped(found, args[0], rows)


def gradient_magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """A function whose gradients sum the absolute values of the terms of all products."""
    return gradient_terms(args, **kwargs, is_rounding=False)


def output_sensitivity(*args: Any, **kwargs: Any) -> Tensor:
    """The effect of rounding the logits' gradient to the dtype of x."""
    return gradient_terms(args, **kwargs, is_rounding=True)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call of two layers whose logits have this shape."""
    x, weight, _ = linear.bench(device, dtype, shape).args
    y, weight_y, _ = linear.bench(device, dtype, shape).args
    return Sample("bench", (x, weight, y, weight_y), {})


def bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """The benchmark call with the divergence from a mixture."""
    call = bench(device, dtype, shape)
    yield "js", Sample("bench", call.args, {"direction": "js"})


def traffic(sample: Sample) -> Traffic:
    """Reads the tensors of both layers."""
    given = [each for each in sample.args if each is not None]
    both = linear.products(sample) + linear.products(Sample("teacher", sample.args[2:4]))
    return Traffic(sum(each.nbytes for each in given), both)


def backward_traffic(sample: Sample) -> Traffic:
    """Writes the gradient of x, the only part that is timed; forward has read the tensors."""
    return Traffic(sample.args[0].nbytes, linear.products(sample))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with layers that do not match, and with numbers out of range."""
    x, weight = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    y, weight_y = torch.ones(2, 5, device=device), torch.ones(3, 5, device=device)
    overload = torch.ops.torchkiln.linear_kl.default
    good = GoodCall(overload, Sample("good", (x, weight, y, weight_y)))
    words = "weight: got shape [0, 4], expected at least 1 row: one for each class"
    yield good.changed(words, weight=weight[:0], weight_y=weight_y[:0])
    words = "y: got shape [1, 5], expected the rows of x, whose shape is [2, 4]"
    yield good.changed(words, y=y[:1])
    words = "weight_y: got shape [2, 5], expected 3 as the first size, the classes of weight"
    yield good.changed(words, weight_y=weight_y[:2])
    yield from wrong_temperatures(good)
    for beta in (0.0, 1.0, -0.5, 1e-9, math.nan):
        words = f"beta: got {beta:g}, expected a number greater than 0 and less than 1"
        yield good.changed(words, ValueError, direction="js", beta=beta)
    expected = (
        "expected int64 [any], indices of rows, or bool [2], a mask of the shape of the result"
    )
    words = f"rows: got float32 [2], {expected}"
    yield good.changed(words, rows=torch.ones(2, device=device))


def typical_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The states of both layers of the module."""
    x, _, y, *_ = next(inputs(device, dtype)).args
    return x, y


LINEAR_KL = OpSpec(
    op=torchkiln.linear_kl,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    # The gradient of the logits is rounded before it is multiplied.
    output_sensitivity=output_sensitivity,
    inputs=inputs,
    differentiable=(0, 1, 2, 3, 4, 5),
    refusals=Refusals(
        dtypes={"weight": "x", "y": "x", "weight_y": "x"},
        parameters={"bias": "x", "bias_y": "x"},
        shapes={"bias": "the first size of weight", "bias_y": "the first size of weight_y"},
        words={"direction": ("forward", "reverse", "js")},
    ),
    invalid=invalid,
    bench=bench,
    bench_variants=bench_variants,
    # Only the gradient of x is timed; forward computes it.
    timed=(0,),
    gradient_in_forward=True,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    autocast=(0, 1, 2, 3),
    threads_matter=True,
    bench_shapes=((8192, 32768), (8192, 128256)),
    small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
    helpers=("_linear_kl_forward", "_linear_kl_backward"),
    module=derive.layer(
        torchkiln.nn.LinearKL, 10, 7, True, teacher_features=12, direction="js", beta=0.3
    ),
    module_inputs=typical_inputs,
    excluded={
        "mixed_dtypes": "the results are float32; tests/ops/test_linear_kl.py compares a float32 "
        "bias"
    },
)
