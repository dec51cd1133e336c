"""The contracts of a convolution with batch norm, and of a convolution that computes moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.sample import FLOATING, Sample
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.testing.specs.batch_norm.whole import BN_ACT, Arguments

CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
GEOMETRY = ("stride", "padding", "dilation", "groups")
NAMES = ("x", "conv_weight", "conv_bias", "bn_weight", "bn_bias", "mean", "var", "residual")


ONE_WEIGHT = "a graph belongs to the weight it was made for; tests/ops/test_convolution.py"


class Layer:
    """The arguments of a call, split into arguments of the convolution and of the batch norm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given: dict[str, Any] = dict.fromkeys(NAMES)
        given |= dict(zip(NAMES, args, strict=False))
        self.x: Tensor = given["x"]
        self.weight: Tensor = given["conv_weight"]
        self.bias: Tensor | None = given["conv_bias"]
        self.vectors = [given[name] for name in NAMES[3:]]
        self.geometry = {k: v for k, v in kwargs.items() if k in GEOMETRY}
        self.options = {k: v for k, v in kwargs.items() if k not in GEOMETRY}

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of these tensors, with the strides and other options of the call."""
        found: Tensor = CONVOLUTIONS[x.dim()](x, weight, bias, **self.geometry)
        return found

    def arguments(self) -> Arguments:
        """The arguments of the batch norm, with the magnitude of its input."""
        y = self.convolved(self.x, self.weight, self.bias)
        given = Arguments(y, *self.vectors, **self.options)
        x, weight = self.x.detach().abs(), self.weight.detach().abs()
        bias = None if self.bias is None else self.bias.detach().abs()
        given.sizes = self.convolved(x, weight, bias)
        # A function of x, weight and bias whose gradients have the absolute values of all terms.
        given.path = self.convolved(self.x, weight, self.bias)
        given.path = given.path + self.convolved(x, self.weight, None)
        return given


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The formula of the op in plain torch."""
    return Layer(*args, **kwargs).arguments().reference()


def composite(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's convolution, batch norm, sum and activation."""
    layer = Layer(*args, **kwargs)
    y = layer.convolved(layer.x, layer.weight, layer.bias)
    weight, bias, mean, var, residual = layer.vectors
    training = layer.options.get("training", False)
    mean, var = (None, None) if training else (mean, var)
    eps = layer.options.get("eps", 1e-5)
    with torch.backends.cudnn.flags(enabled=False):
        z = F.batch_norm(y, mean, var, weight, bias, training, 0.0, eps)
    z = z if residual is None else z + residual
    return FORMULAS[layer.options.get("act", "relu")].value(z).to(y.dtype)


def magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    return Layer(*args, **kwargs).arguments().magnitude()


def gradient_magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms."""
    return Layer(*args, **kwargs).arguments().gradient_magnitude()


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls for kernels of one and of several elements, each rank, groups, modes, activations."""

    def sample(
        name: str,
        shape: tuple[int, ...],
        weight: tuple[int, ...],
        *,
        residual: tuple[int, ...] | None = None,
        has_bias: bool = False,
        **options: Any,
    ) -> Sample:
        def drawn(key: str, shape: tuple[int, ...]) -> Tensor:
            return normal(key, shape, device, dtype)

        out = weight[:1]
        owned = [drawn("bn_weight", out), drawn("bn_bias", out)]
        running = [drawn("mean", out), drawn("var", out).abs() + 0.5]
        if options.get("training"):
            running = [None, None]  # type: ignore[list-item]
        added = [] if residual is None else [drawn("residual", residual)]
        bias = drawn("conv_bias", out) if has_bias else None
        args = (drawn("x", shape), drawn("weight", weight), bias, *owned, *running, *added)
        return Sample(name, args, options)

    both: dict[str, Any] = {"training": True, "padding": 1}
    yield sample("typical", (2, 4, 5, 6), (6, 4, 3, 3), residual=(2, 6, 5, 6), **both)
    yield sample("eval", (2, 4, 5, 6), (6, 4, 3, 3), residual=(2, 6, 5, 6), padding=1)
    yield sample("one element", (2, 8, 4, 4), (8, 8, 1, 1), training=True, act="silu")
    yield sample("one element, eval", (2, 8, 4, 4), (8, 8, 1, 1), act="silu")
    yield sample("bias", (3, 3, 9), (4, 3, 3), has_bias=True, training=True, act="none")
    yield sample("bias, eval", (3, 3, 9), (4, 3, 3), has_bias=True, act="none", eps=1e-3)
    yield sample("strides and groups", (2, 4, 7, 7), (6, 2, 3, 3), groups=2, stride=2, **both)
    yield sample("volumes", (1, 2, 4, 3, 5), (3, 2, 2, 1, 3), training=True, dilation=(1, 1, 2))
    yield sample("same", (2, 3, 6, 5), (4, 3, 3, 3), padding="same", act="tanh")


def more_images(sample: Sample) -> Sample:
    """The call with twice the images: the sizes of kernels and images are not independent."""
    images = {i for i in (0, 7) if i in sample.positions}
    args = (torch.cat([a, a]) if i in images else a for i, a in enumerate(sample.args))
    return replace(sample, args=tuple(args))


CONV_BN_ACT = replace(
    BN_ACT,
    name="conv_bn_act",
    op=torchkiln.conv_bn_act,
    composed=True,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    differentiable=(0, 1, 2, 3, 4, 7),
    refusals=None,
    invalid=None,
    large=None,
    module=None,
    helpers=("_bn_act_forward", "_bn_act_backward"),
    opaque=None,
    threads_matter=True,
    dtypes=(torch.float32, torch.float64),  # in half precision the convolution is rounded, too
    # cuDNN's gradients are not reproducible: tests/ops/test_convolution.py compares them
    devices=("cpu",),
    grown=more_images,
    excluded={
        "compile_aot_eager": ONE_WEIGHT,
        "compile_inductor": ONE_WEIGHT,
        "no_recompilation_storm": "torch's convolution has another graph from 16 images on",
        "meta_and_fake": "torch's convolution has other strides on meta tensors",
        "bad_input": "torch's convolution refuses, too; tests/ops/test_convolution.py",
        "autocast": "torch's convolution casts; tests/ops/test_convolution.py compares it",
        "not_finite": "torch's convolutions multiply zeros of the padding by infinities",
    },
)


def pixels(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution without the moments; tests/ops/test_conv_moments.py compares those."""
    y: Tensor = torch.ops.torchkiln._pixel_conv.default(x, weight)[0]
    return y


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Torch's convolution."""
    return CONVOLUTIONS[x.dim()](x, weight)


def pixel_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls for each rank, with numbers of channels that are whole vectors and that are not."""
    shapes = {"typical": (2, 8, 3, 5), "sequences": (2, 16, 40), "volumes": (1, 16, 3, 2, 5)}
    for name, shape in (shapes | {"no vectors": (2, 3, 4, 4), "rows": (5, 64, 8, 8)}).items():
        weight = (16 if shape[1] % 8 == 0 else 5, shape[1], *[1] * (len(shape) - 2))
        scale = shape[1] ** -0.5
        x = normal("x", shape, device, dtype)
        yield Sample(name, (x, (scale * normal("weight", weight, device)).to(dtype)))


PIXEL_CONV = replace(
    CONV_BN_ACT,
    dtypes=FLOATING,
    name="pixel_conv",
    op=pixels,
    overload=torch.ops.torchkiln._pixel_conv.default,
    reference=product,
    composite=product,
    magnitude=lambda x, weight: product(x.abs(), weight.abs()),
    gradient_magnitude=lambda x, weight: (
        product(x, weight.detach().abs()) + product(x.detach().abs(), weight)
    ),
    inputs=pixel_inputs,
    differentiable=(0, 1),
    helpers=("_pixel_conv",),
    excluded={
        "bad_input": "conv_bn_act calls it where it applies; tests/ops/test_conv_moments.py",
        "autocast": "conv_bn_act casts before it calls the op",
    },
)
