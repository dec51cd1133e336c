"""torchao's linear layer in FP8, under torch.compile, with a scale per tensor."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.bench.case import BenchCase, Function
from torchkiln.bench.peers.package import Refused, require_package

PACKAGE = "torchao"
FUNCTIONS = frozenset({"linear_fp8"})
RECIPE = "tensorwise"
STEP = 16
"""Sizes of torchao's products are multiples of it."""


def function_of(case: BenchCase) -> Function:
    """The layer as a function of input, weight and bias."""
    require_package(case, PACKAGE)
    x, weight = case.sample.args[:2]
    if any(size % STEP for size in (*weight.shape, x.numel() // max(x.shape[-1], 1))):
        raise Refused(f"takes sizes that are multiples of {STEP}")
    found: Function = torch.compile(layer_of(weight), dynamic=False)
    return found


def layer_of(weight: Tensor, **settings: Any) -> Function:
    """The layer for weights of this size; ``settings`` are those of its configuration."""
    float8: Any = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(RECIPE)
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    plain = nn.Linear(weight.shape[1], weight.shape[0], device="meta", dtype=weight.dtype)
    model = float8.convert_to_float8_training(nn.Sequential(plain), config=config)
    layer = model[0]

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        given: Any = {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, given, (x,))

    return function
