"""The contract of batch norm with a residual and an activation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.testing.data import cycle, drawn_sizes, large_matrix, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS, amplified
from torchkiln.testing.specs.bias_act import ROUNDING

# Shapes [batch, channels, ...]: one channel, one image, no image, vectors of channels and of pixels
# with tails, many rows and many channels.
SHAPES: Mapping[str, tuple[int, ...]] = (
    {
        "rows": (17, 13),
        "one channel": (141, 1),
        "one image": (1, 3, 5, 11),
        "no images": (0, 5, 2, 2),
    }
    | {"sequence": (3, 17, 9), "volume": (2, 3, 2, 3, 4), "vectors": (3, 16, 4, 8)}
    | {"vectors of channels": (37, 40), "one of each": (1, 1, 1, 2), "pixel": (9, 24, 1, 1)}
    | {"many rows": (4099, 3), "many channels": (5, 1029), "planes": (2, 3, 31, 67)}
    | {"one large plane": (1, 1, 129, 64), "large planes": (3, 2, 61, 88)}
    | {"many small planes": (35, 8, 3, 5)}
)
PIXELS = 28
"""Height and width of the images that are timed."""
BENCH_SHAPES = ((802816, 256), (200704, 512), (200704, 64))
"""Pixels of all images, and channels."""
SMALL_SHAPES = tuple((rows, 256) for rows in (784, 6272, 25088))


class Arguments:
    """The arguments of a call by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = ("x", "weight", "bias", "running_mean", "running_var", "residual")
        given = dict(zip(names, args, strict=False)) | kwargs
        self.x: Tensor = given["x"]
        self.weight: Tensor | None = given.get("weight")
        self.bias: Tensor | None = given.get("bias")
        self.running: tuple[Tensor | None, Tensor | None] = (
            given.get("running_mean"),
            given.get("running_var"),
        )
        self.residual: Tensor | None = given.get("residual")
        self.act: str = given.get("act", "relu")
        self.training: bool = given.get("training", False)
        self.eps: float = given.get("eps", 1e-5)
        self.dims = (0, *range(2, self.x.dim()))
        self.sizes: Tensor = self.x.abs()
        """The magnitude of x, which exceeds |x| if another op computes x."""
        self.path: Tensor = self.x
        """x or, if another op computes x, a function whose gradients sum absolute values."""

    def wide(self, vector: Tensor) -> Tensor:
        """A vector of the channels with the rank of x."""
        return vector.reshape(-1, *[1] * (self.x.dim() - 2))

    def mean_of(self, x: Tensor) -> Tensor:
        """The mean of each channel."""
        return x.mean(self.dims, keepdim=True)

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the channels."""
        mean, var = self.running
        if not self.training and mean is not None and var is not None:
            return self.wide(mean), self.wide(var)
        mean = self.mean_of(self.x)
        return mean, self.mean_of((self.x - mean).square())

    def normalized(self) -> Tensor:
        """``(x - mean) / sqrt(variance + eps)``."""
        mean, var = self.moments
        return (self.x - mean) * (var + self.eps).rsqrt()

    def argument(self) -> Tensor:
        """The argument of the activation."""
        z = self.normalized()
        z = z if self.weight is None else z * self.wide(self.weight)
        z = z if self.bias is None else z + self.wide(self.bias)
        return z if self.residual is None else z + self.residual

    def errors(self) -> tuple[Tensor, Tensor, Tensor]:
        """|n| for the normalized x n, and the rounding errors of n and of rstd.

        The unit of the errors is that of ``compare.allowed_error``: two rounding steps of the dtype
        that the op computes in.
        """
        with torch.no_grad():
            mean, var = self.moments
            rstd = (var + self.eps).rsqrt()
            size = ((self.x - mean) * rstd).abs()
            if not self.training:
                return size, (self.sizes + mean.abs()) * rstd, rstd
            moved = (self.sizes + self.mean_of(self.sizes)) * rstd
            spread = 1 + self.mean_of(size * moved)
            return size, moved + size * spread, rstd * spread

    def terms(self) -> Tensor:
        """The magnitude of the argument of the activation."""
        terms = self.errors()[1]
        terms = terms if self.weight is None else terms * self.wide(self.weight).abs()
        terms = terms if self.bias is None else terms + self.wide(self.bias).abs()
        return terms if self.residual is None else terms + self.residual.abs()

    def reference(self) -> Tensor:
        """The result of the formula."""
        return FORMULAS[self.act].exact(self.argument())

    def magnitude(self) -> Tensor:
        """The magnitude of the result."""
        return amplified(self.act, self.terms())

    def gradient_magnitude(self) -> Tensor:
        """A function whose gradients are the op's, with the absolute values of all terms.

        The rounding errors of the normalized x are applied to one factor at a time.
        """
        formula = FORMULAS[self.act]
        size, error, rstd = self.errors()
        x, mean = self.path, self.mean_of
        y = x
        if self.training:
            y = x + mean(x) + error * mean(size * x) + size * mean(error * x)
        y = y * rstd
        if self.weight is not None:
            weight = self.wide(self.weight)
            y = y * weight.detach().abs() + weight * error
        y = y if self.bias is None else y + self.wide(self.bias)
        y = y if self.residual is None else y + self.residual
        with torch.no_grad():
            terms, argument = self.terms(), self.argument()
            slope = formula.slope_terms(argument) + formula.curvature * terms
            if self.act == "relu":  # within the rounding error of 0 either derivative is right
                slope = torch.where(argument.abs() <= ROUNDING * terms, 2.0**52, slope)
        return y * slope


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The formula of the op in plain torch."""
    return Arguments(*args, **kwargs).reference()


def composite(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's batch norm, sum and activation."""
    given = Arguments(*args, **kwargs)
    mean, var = (None, None) if given.training else given.running
    # On the GPU torch's kernels need both parameters for a gradient. cuDNN is off, because it reads
    # vectors of adjacent channels even if x is not aligned.
    channels = given.x.shape[1]
    weight = given.x.new_ones(channels) if given.weight is None else given.weight
    bias = weight.new_zeros(channels) if given.bias is None else given.bias
    with torch.backends.cudnn.flags(enabled=False):
        y = F.batch_norm(given.x, mean, var, weight, bias, given.training, 0.0, given.eps)
    y = y if given.residual is None else y + given.residual
    return FORMULAS[given.act].value(y).to(given.x.dtype)


def magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    return Arguments(*args, **kwargs).magnitude()


def gradient_magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms."""
    return Arguments(*args, **kwargs).gradient_magnitude()


def call(
    name: str,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    owned: torch.dtype | None = None,
    residual: bool = False,
    **options: Any,
) -> Sample:
    """A call in training without running statistics, or in eval mode with them."""
    training = options.get("training", False)
    x = normal("x", shape, device, dtype)
    weight, bias, mean = (
        normal(each, shape[1:2], device, owned or dtype) for each in ("weight", "bias", "mean")
    )
    running = (
        (None, None) if training else (mean, normal("var", mean.shape, device).to(mean).abs() + 0.5)
    )
    added = normal("residual", shape, device, dtype) if residual else None
    return Sample(name, (x, weight, bias, *running, added), options)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each activation, with and without residual, in both modes; missing tensors."""

    def sample(name: str, shape: tuple[int, ...], **rest: Any) -> Sample:
        return call(name, shape, device, dtype, **rest)

    yield sample("typical", (3, 4, 2, 2), training=True, residual=True)
    for act in FORMULAS:
        yield sample(f"{act}, residual", (3, 5, 9), training=True, residual=True, act=act)
    for act in ("relu", "silu"):
        yield sample(act, (3, 5, 9), training=True, act=act)
        yield sample(f"{act}, eval", (3, 5, 9), residual=True, act=act)
    for i, (name, shape) in enumerate(SHAPES.items()):
        yield sample(name, shape, training=True, residual=i % 2 == 0)
        yield sample(f"{name}, eval", shape, residual=i % 2 == 1, eps=1e-3)
    last = sample("channels last", (2, 24, 5, 3), training=True, residual=True)
    yield last.map(lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)
    plain = sample("no parameters", (5, 6, 4), training=True)
    yield plain.substitute(1, None).substitute(2, None)
    yield sample("weight alone", (5, 6, 5), residual=True).substitute(2, None)
    yield sample("bias alone", (5, 6, 5), training=True, act="silu").substitute(1, None)
    if dtype in (torch.float16, torch.bfloat16):
        yield sample("float32 parameters", (9, 21, 3), owned=torch.float32, training=True)
        yield sample("float32 parameters, eval", (9, 24), owned=torch.float32, residual=True)


def image(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """Images with adjacent channels."""
    pixels, channels = shape
    count = max(pixels // PIXELS**2, 1)
    x = torch.randn(count, PIXELS, PIXELS, channels, device=device, dtype=dtype)
    return x.movedim(-1, 1)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call on images in training, with float32 parameters."""
    owned = torch.promote_types(dtype, torch.float32)
    parameters = [torch.randn(shape[1], device=device, dtype=owned) for _ in range(2)]
    return Sample(
        "bench", (image(device, dtype, shape), *parameters, None, None, None), {"training": True}
    )


def bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """The benchmark call with a residual, and in eval mode."""
    plain = bench(device, dtype, shape)
    yield "residual", plain.substitute(5, image(device, dtype, shape))
    mean = plain.args[1]
    running = plain.substitute(3, mean).substitute(4, mean.abs() + 0.5)
    yield "eval", Sample("bench", running.args, {})


def drawn(device: torch.device, dtype: torch.dtype, rng: Random, most: int) -> Sample:
    """A call on random rows, or on images in either layout, in training or in eval mode."""
    batch, channels, *pixels = drawn_sizes(rng, most, rng.choice((2, 3, 4, 4)))
    owned = torch.promote_types(dtype, torch.float32)
    x = torch.randn(batch, channels, *pixels, device=device, dtype=dtype)
    weight, bias, mean = (torch.randn(channels, device=device, dtype=owned) for _ in range(3))
    act = rng.choice(("none", "relu", "silu"))
    residual = torch.randn_like(x) if rng.random() < 0.25 else None
    if rng.random() < 0.5 and x.numel() > channels:
        args = (x, weight, bias, None, None, residual)
        return Sample("drawn", args, {"training": True, "act": act})
    return Sample("drawn", (x, weight, bias, mean, mean.abs() + 0.5, residual), {"act": act})


def large(device: torch.device) -> Sample:
    """A call on a matrix of more than 2**31 elements in eval mode, where rows are independent."""
    x = large_matrix(device)
    columns = x.shape[1]
    vectors = [cycle(columns, length, device) for length in (113, 127, 131, 137)]
    residual = cycle(columns, 149, device).expand_as(x)
    return Sample("large", (x, *vectors[:3], vectors[3] + 0.5, residual))


def traffic(sample: Sample) -> Traffic:
    """Traffic that reads x (twice in training) and the residual, and writes y."""
    given = Arguments(*sample.args, **sample.kwargs)
    passes = 2 + given.training + (given.residual is not None)
    return Traffic(passes * given.x.nbytes, 8 * given.x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Traffic that reads the incoming gradient and x twice, and writes the gradient of x.

    With a residual, the gradient of the residual is written, and read in the second pass in place
    of the incoming gradient. One bit per element is read, too.
    """
    given = Arguments(*sample.args, **sample.kwargs)
    x = given.x
    if given.residual is None:
        return Traffic(5 * x.nbytes, 12 * x.numel())
    return Traffic(6 * x.nbytes + x.numel() // 8, 12 * x.numel())


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with no channels, one value per channel, missing statistics, numbers out of range."""
    x, row = torch.ones(4, 3, device=device), torch.ones(3, device=device)
    good = GoodCall(
        torch.ops.torchkiln.bn_act.default, Sample("good", (x, row, row, row, row, None))
    )
    words = "expected [batch, channels, ...]"
    yield good.changed(f"x: got shape [3], {words}", x=row)
    yield good.changed(f"x: got shape [], {words}", x=row[0])
    words = "expected more than 1 value for each channel in training"
    yield good.changed(f"x: got shape [1, 3], {words}", ValueError, x=x[:1], training=True)
    words = "expected a tensor of [3] unless training=True"
    yield good.changed(
        f"running_mean: got None, {words}", ValueError, running_mean=None, running_var=None
    )
    words = "running_var: got None, expected a tensor, as for running_mean"
    yield good.changed(words, ValueError, running_var=None)
    words = "running_var: got a tensor, expected None, as for running_mean"
    yield good.changed(words, ValueError, running_mean=None)
    for eps, said in ((-1e-5, "-1e-05"), (math.nan, "nan")):
        yield good.changed(f"eps: got {said}, expected a number of at least 0", ValueError, eps=eps)
    half = good.cast(torch.bfloat16)
    words = "bias: got dtype float32, expected bfloat16, the dtype of weight"
    yield half.changed(words, bias=row)
    words = "running_var: got dtype float32, expected bfloat16, the dtype of running_mean"
    yield half.changed(words, running_var=row)


VECTORS = ("weight", "bias", "running_mean", "running_var")

BN_ACT = OpSpec(
    op=torchkiln.bn_act,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    differentiable=(0, 1, 2, 5),
    refusals=Refusals(
        like={"residual": "x"},
        parameters=dict.fromkeys(VECTORS, "x"),
        shapes=dict.fromkeys(VECTORS, "the channels of x"),
        words={"act": tuple(FORMULAS)},
    ),
    invalid=invalid,
    bench=bench,
    bench_variants=bench_variants,
    drawn=drawn,
    bench_shapes=BENCH_SHAPES,
    small_shapes=SMALL_SHAPES,
    large=large,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    helpers=("_bn_act_forward", "_bn_act_backward"),
    module=layer(torchkiln.nn.BatchNormAct2d, 4),
)
