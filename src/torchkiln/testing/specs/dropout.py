"""The contracts of dropout and residual sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.specs.activation import FLOATING, SPARSE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shapes of x, from the scalar loop to several threads or blocks, and probabilities with them.
SHAPES: dict[str, tuple[tuple[int, ...], float]] = {
    "typical": ((6, 10), 0.4),
    "one": ((1,), 0.5),
    "empty": ((0,), 0.5),
    "no rows": ((0, 5), 0.5),
    "no columns": ((5, 0), 0.5),
    "prime": ((7, 13), 0.1),
    "vector less one": ((3, 127), 0.25),
    "vector": ((3, 128), 0.25),
    "vector and one": ((3, 129), 0.25),
    "power of two and one": ((1025,), 0.9),
    "images": ((2, 3, 5, 7), 0.5),
    "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), 0.5),
    "many narrow rows": ((4099, 3), 0.3),
    "threads": ((257, 261), 0.2),
}

EXCLUDED = {
    "vmap": "torch asks at each vmap how random numbers are drawn; test_dropout tells the cases",
    "vmap_of_grad": "as vmap",
    "graph_capture": "a generator cannot be seeded in a graph; test_dropout replays one",
    "more_than_2_to_the_31_elements": "a few rows have another mask alone than within the whole; "
    "test_dropout looks at the mask",
    "gradients_of_more_than_2_to_the_31_elements": "as the values",
    "calls_from_several_threads": "threads share torch's generator, and so the numbers it gives",
}


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes with probabilities, then nothing and everything dropped."""
    for seed, (name, (shape, p)) in enumerate(SHAPES.items()):
        pair = normal("x", shape, device, dtype), normal("residual", shape, device, dtype)
        yield Sample(name, (*pair, p), seed=seed)
    pair = normal("x", (5, 9), device, dtype), normal("residual", (5, 9), device, dtype)
    yield Sample("no p", pair, seed=40)
    yield Sample("nothing dropped", (*pair, 0.0), seed=41)
    yield Sample("all dropped", (*pair, 1.0), seed=42)
    yield Sample("not training", (*pair, 0.4, False), seed=43)
    yield Sample("not training by keyword", pair, {"p": 0.4, "training": False}, seed=44)


def bias_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The same with a bias, and with a float32 bias beside a half precision."""
    for sample in inputs(device, dtype):
        x, *others = sample.args
        bias = normal("bias", x.shape[-1:], device, dtype)
        yield Sample(sample.name, (x, bias, *others), sample.kwargs, sample.seed)
    if dtype in (torch.float16, torch.bfloat16):
        x, residual = normal("x", (6, 9), device, dtype), normal("residual", (6, 9), device, dtype)
        wide = normal("bias", (9,), device, torch.float32)
        yield Sample("float32 bias", (x, wide, residual, 0.3), seed=45)
        yield Sample("float32 bias, not training", (x, wide, residual, 0.3, False), seed=46)


def without_bias(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """What is kept, scaled, and the residual."""
    return with_mask(x, p, training) + residual


def with_bias(
    x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
) -> Tensor:
    """The same of x + bias."""
    return (with_mask(x + bias, p, training) + residual).to(x.dtype)


def magnitude(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """The terms of each sum."""
    return with_mask(x.abs(), p, training) + residual.abs()


def bias_magnitude(
    x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
) -> Tensor:
    """The terms of each sum."""
    return with_mask(x.abs() + bias.abs(), p, training) + residual.abs()


def with_mask(x: Tensor, p: float, training: bool) -> Tensor:
    """``x`` where the op keeps it, by 1 / (1 - p), at the present state of the generators.

    Which elements the op keeps it tells itself: the mask depends on the state, p and the place of
    the element alone, and whether it is a fair one is seen in test_dropout.
    """
    if not training:
        return x
    with torch.no_grad():
        ones = torch.ones(x.shape, device=x.device)
        kept = torchkiln.dropout_add(ones, torch.zeros_like(ones), p) != 0
    return torch.where(kept, x / (1 - p) if p < 1 else x, 0)


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal of dropout_add."""
    for title, (x, residual), options, error, message in refusals("dropout_add", device):
        yield Invalid(title, (x, residual, *options), error, message)


def bias_invalid(device: torch.device) -> Iterator[Invalid]:
    """The same of bias_dropout_add, and those of its bias."""
    prefix = r"torchkiln\.bias_dropout_add: bias: "
    bias = torch.ones(4, device=device)
    for title, (x, residual), options, error, message in refusals("bias_dropout_add", device):
        yield Invalid(title, (x, bias, residual, *options), error, message)
    x = torch.ones(2, 4, device=device)
    shape = r"got shape \[{}\], expected \[4\], the last dimension of x"
    dtype = "got dtype {}, expected {}, the dtype of x{}"
    for title, call, message in (
        ("bias too short", (x, bias[:3], x), shape.format(3)),
        ("bias of length 1", (x, bias[:1], x), shape.format(1)),
        ("2-D bias", (x, x, x), shape.format("2, 4")),
        ("float64 bias", (x, bias.double(), x), dtype.format("float64", "float32", "")),
        (
            "bfloat16 bias beside float16",
            (x.half(), bias.bfloat16(), x.half()),
            dtype.format("bfloat16", "float16", ", or float32"),
        ),
        ("sparse bias", (x, bias.to_sparse(), x), SPARSE),
        (
            "meta bias",
            (x, bias.to("meta"), x),
            f"got device meta, expected {x.device}, the device of x",
        ),
    ):
        yield Invalid(title, call, RuntimeError, prefix + message)
    yield Invalid(
        "bias None", (x, None, x), TypeError, prefix + r"got NoneType, expected a torch\.Tensor"
    )
    yield Invalid(
        "0-dim x",
        (x[0, 0], bias, x[0, 0]),
        RuntimeError,
        r"torchkiln\.bias_dropout_add: x: got a 0-dimensional tensor, "
        "expected at least 1 dimension",
    )


Refusal = tuple[str, tuple[object, object], tuple[object, ...], type[Exception], str]


def refusals(op: str, device: torch.device) -> Iterator[Refusal]:
    """What both ops refuse: title, x and residual, what follows them, error and message."""
    prefix = rf"torchkiln\.{op}: "
    x = torch.ones(2, 4, device=device)
    nothing = r"got NoneType, expected a torch\.Tensor"
    yield "x None", (None, x), (), TypeError, f"{prefix}x: {nothing}"
    yield "residual None", (x, None), (), TypeError, f"{prefix}residual: {nothing}"
    for p, shown in ((1.5, "1.5"), (-0.1, "-0.1"), (float("nan"), "nan")):
        words = f"{prefix}p: got {shown}, expected a probability between 0 and 1"
        yield f"p {shown}", (x, x), (p,), ValueError, words
        yield f"p {shown}, not training", (x, x), (p, False), ValueError, words
    for other in (x[:1], x[0], x[:, :1]):
        shape = ", ".join(map(str, other.shape))
        yield (
            f"residual of shape {shape}",
            (x, other),
            (),
            RuntimeError,
            rf"{prefix}residual: got shape \[{shape}\], expected \[2, 4\], the shape of x",
        )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        kind = str(dtype).removeprefix("torch.")
        words = f"{prefix}x: got dtype {kind}, {FLOATING}"
        yield kind, (x.to(dtype), x.to(dtype)), (), RuntimeError, words
    yield (
        "two dtypes",
        (x.half(), x),
        (),
        RuntimeError,
        f"{prefix}residual: got dtype float32, expected float16, the dtype of x",
    )
    yield "sparse x", (x.to_sparse(), x), (), RuntimeError, f"{prefix}x: {SPARSE}"
    yield "sparse residual", (x, x.to_sparse()), (), RuntimeError, f"{prefix}residual: {SPARSE}"
    away = [torch.device("meta")] + ([torch.device("cpu")] if device.type != "cpu" else [])
    for elsewhere in away:
        yield (
            f"residual on {elsewhere}",
            (x, x.to(elsewhere)),
            (),
            RuntimeError,
            f"{prefix}residual: got device {elsewhere}, expected {x.device}, the device of x",
        )


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Two matrices of one shape."""
    x = torch.randn(shape, device=device, dtype=dtype)
    return Sample("bench", (x, torch.randn_like(x), 0.1))


def bias_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """The same with a bias."""
    x, residual, p = bench(device, dtype, shape).args
    return Sample("bench", (x, torch.randn(shape[1:], device=device, dtype=dtype), residual, p))


def large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements, and a residual of one element seen as often."""
    rows, columns = 2**16 + 1, 2**15 + 1
    x = torch.ones((rows, columns), device=device, dtype=torch.bfloat16)
    return Sample("large", (x, x.new_zeros(()).expand_as(x), 0.3), seed=7)


def bias_large(device: torch.device) -> Sample:
    """The same with a bias."""
    x, residual, p = large(device).args
    return Sample("large", (x, x.new_zeros(x.shape[1:]), residual, p), seed=7)


def traffic(sample: Sample) -> Traffic:
    """Reads x, residual and what else there is, writes the output."""
    x = sample.args[0]
    read = sum(sample.args[i].numel() * sample.args[i].itemsize for i in sample.positions)
    return Traffic(read + x.numel() * x.itemsize, 3 * x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient, which is that of residual; writes those of x and bias."""
    x = sample.args[0]
    rest = sum(sample.args[i].numel() * sample.args[i].itemsize for i in sample.positions[1:-1])
    return Traffic(2 * x.numel() * x.itemsize + rest, 2 * x.numel())


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows and what is added to them."""
    return normal("x", (9, 21), device, dtype), normal("residual", (9, 21), device, dtype)


def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """It has no parameters."""
    del device, dtype
    return torchkiln.nn.DropoutAdd(0.3)


def bias_module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module with a bias that is not zero."""
    layer = torchkiln.nn.BiasDropoutAdd(21, 0.3, device=device, dtype=dtype)
    with torch.no_grad():
        layer.bias.copy_(normal("bias", (21,), device, dtype))
    return layer


DROPOUT_ADD = OpSpec(
    name="dropout_add",
    op=torchkiln.dropout_add,
    overload=torch.ops.torchkiln.dropout_add.default,
    reference=without_bias,
    composite=without_bias,
    magnitude=magnitude,
    inputs=inputs,
    invalid=invalid,
    bench=bench,
    large=large,
    traffic=traffic,
    backward_traffic=backward_traffic,
    differentiable=(0, 1),
    opaque=True,
    helpers=("dropout_add_forward", "dropout_add_backward"),
    module=module,
    module_inputs=module_inputs,
    excluded=EXCLUDED,
)

BIAS_DROPOUT_ADD = OpSpec(
    name="bias_dropout_add",
    op=torchkiln.bias_dropout_add,
    overload=torch.ops.torchkiln.bias_dropout_add.default,
    reference=with_bias,
    composite=with_bias,
    magnitude=bias_magnitude,
    inputs=bias_inputs,
    invalid=bias_invalid,
    bench=bias_bench,
    large=bias_large,
    traffic=traffic,
    backward_traffic=backward_traffic,
    differentiable=(0, 1, 2),
    opaque=True,
    helpers=("dropout_add_forward", "dropout_add_backward"),
    module=bias_module,
    module_inputs=module_inputs,
    excluded=EXCLUDED,
)
