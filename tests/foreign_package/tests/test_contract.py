"""The tests that an author writes: one spec, and two functions."""

from __future__ import annotations

from collections.abc import Iterator

import foreign_ops
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from torchkiln.testing import (
    Case,
    Invalid,
    OpSpec,
    Plan,
    Sample,
    check_call,
    normal,
    plans,
)

SHAPES = {
    "typical": (6, 10),
    "one": (1,),
    "0-dim": (),
    "empty": (0, 3),
    "images": (2, 3, 5, 7),
    "many": (40, 30),
}


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),))
    yield Sample("limit", (normal("x", (7, 13), device, dtype),), {"limit": 0.5})


def invalid(device: torch.device) -> Iterator[Invalid]:
    x = torch.ones(3, device=device)
    prefix = r"foreign_ops\.softclip: "
    dtype = "x: got dtype int64, expected a floating point one"
    yield Invalid("integers", (x.long(),), TypeError, prefix + dtype)
    limit = "limit: got -1.0, expected more than 0"
    yield Invalid("limit", (x,), ValueError, prefix + limit, {"limit": -1.0})


def formula(x: Tensor, limit: float = 1.0) -> Tensor:
    return limit * torch.tanh(x / limit)


def magnitude(x: Tensor, limit: float = 1.0) -> Tensor:
    return torch.minimum(x.abs(), torch.full_like(x, limit))


def output_sensitivity(x: Tensor, limit: float = 1.0) -> Tensor:
    # d/dx = 1 - t**2 with t = y / limit: a relative error of t moves it by 2 t**2.
    t = torch.tanh(x / limit).detach()
    return 2 * t**2 * x


SOFTCLIP = OpSpec(
    op=foreign_ops.softclip,
    reference=formula,
    magnitude=magnitude,
    output_sensitivity=output_sensitivity,
    inputs=inputs,
    invalid=invalid,
    operations=(3, 3),
    opaque=True,
    excluded={"aot_inductor": "left out to save time"},
)


@pytest.mark.contract([SOFTCLIP])
def test_contract(contract_case: Case) -> None:
    contract_case.run()


@settings(max_examples=20, derandomize=True, database=None, deadline=None)
@given(plans(SOFTCLIP))
def test_any_call(plan: Plan) -> None:
    check_call(SOFTCLIP, plan, torch.device("cpu"))
