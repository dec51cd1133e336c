"""The contract for ops that draw random numbers, or have arguments that are not tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln import testing
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.contract.bad_input import reaches_the_op
from torchkiln.testing.data import normal
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")


def run(spec: testing.OpSpec, check: str, dtype: torch.dtype = torch.float32) -> None:
    testing.Case(spec, CHECKS[check], CPU, dtype).run()


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.ops.aten.dropout.default(x, p, train)


def draws_from_its_own_generator(x: Tensor, p: float, train: bool) -> Tensor:
    torch.seed()
    return dropout(x, p, train)


def masked(x: Tensor, p: float, train: bool) -> Tensor:
    """The reference: x times the mask that the op draws from the same generator state."""
    with torch.no_grad():
        mask = dropout(torch.ones_like(x), p, train)
    return x * mask


def drop_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
    for seed, (name, shape) in enumerate({"typical": (4, 6), "odd": (13, 7)}.items()):
        yield testing.Sample(name, (normal("x", shape, device, dtype), 0.4, True), seed=seed)


DROPOUT = dataclasses.replace(
    ADD,
    name="dropout",
    op=dropout,
    overload=torch.ops.aten.dropout.default,
    reference=masked,
    composite=masked,
    magnitude=lambda x, *_: x.abs(),
    inputs=drop_inputs,
    differentiable=(0,),
    excluded={"vmap": "torch asks how random numbers are drawn under vmap"},
)


@pytest.mark.parametrize(
    "check",
    [
        "values",
        "gradient_values",
        "determinism",
        "func_grad",
        "func_jvp",
        "retained_graph",
        "opcheck",
        "compile_aot_eager",
        "export",
    ],
)
def test_equal_seeds_draw_equal_numbers(check: str) -> None:
    run(DROPOUT, check)


@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck"])
def test_every_call_of_a_numerical_difference_draws_the_same(check: str) -> None:
    run(DROPOUT, check, torch.float64)


@pytest.mark.parametrize("check", ["values", "gradient_values", "determinism"])
def test_an_op_that_ignores_the_seed_is_found(check: str) -> None:
    with pytest.raises(AssertionError, match=r"elements are wrong|not bitwise equal"):
        run(dataclasses.replace(DROPOUT, op=draws_from_its_own_generator), check)


def test_an_excluded_check_says_why() -> None:
    with pytest.raises(testing.UnavailableError, match="not for dropout: torch asks how"):
        run(DROPOUT, "vmap")
    assert "vmap" in {case.check.name for case in testing.cases([DROPOUT], CPU)}


def test_an_unknown_exclusion_is_refused() -> None:
    spec = dataclasses.replace(DROPOUT, excluded={"vmaps": "a slip"})
    with pytest.raises(ValueError, match="dropout: excluded: got 'vmaps', expected the name"):
        list(testing.cases([spec], CPU))


def scaled(x: Tensor, bias: Tensor | None, act: str, factor: float) -> Tensor:
    function = getattr(torch, act)
    return function(x * factor if bias is None else x * factor + bias)


LIBRARY = torch.library.Library("torchkiln_shown", "DEF")
LIBRARY.define("scaled(Tensor x, Tensor? bias, str act, float factor) -> Tensor")
LIBRARY.impl("scaled", scaled, "CompositeImplicitAutograd")


def scaled_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
    x, bias = normal("x", (4, 6), device, dtype), normal("b", (6,), device, dtype)
    yield testing.Sample("typical", (x, None, "tanh", 0.5))
    yield testing.Sample("bias", (x, bias, "sigmoid", -2.0))


def scaled_invalid(device: torch.device) -> Iterator[testing.Invalid]:
    args = (torch.ones(3, device=device), None, "nothing", 1.0)
    yield testing.Invalid("act", args, AttributeError, "module 'torch' has no attribute 'nothing'")


SCALED = dataclasses.replace(
    ADD,
    name="scaled",
    op=scaled,
    overload=torch.ops.torchkiln_shown.scaled.default,
    reference=scaled,
    composite=scaled,
    magnitude=lambda x, bias, _, factor: (x * factor).abs() + (0 if bias is None else bias.abs()),
    inputs=scaled_inputs,
    refusals=None,
    invalid=scaled_invalid,
    excluded={
        "subclasses": "a composite op is not seen itself",
        "more_than_2_to_the_31_elements": "no large sample",
        "rounded_to_nearest": "no sample of a thousand elements",
        "aot_inductor": "dear, and nothing new",
        "sharding": "no rule",
    },
)


@pytest.mark.parametrize(
    "case",
    [case for case in testing.cases([SCALED], CPU) if case.check.name not in SCALED.excluded],
    ids=str,
)
def test_none_numbers_and_text_pass_through(case: testing.Case) -> None:
    case.run()


@pytest.mark.parametrize(
    ("args", "reaches"),
    [
        ((torch.ones(2), None, "tanh", 1), True),
        ((None, torch.ones(2), "tanh", 1.0), True),
        ((2.0, None, "tanh", 1.0), False),
        ((torch.ones(2), None, None, 1.0), False),
        ((torch.ones(2), None, "tanh", "1"), False),
    ],
)
def test_what_torch_refuses_by_itself_is_left_to_it(args: tuple[Any, ...], reaches: bool) -> None:
    """Torch raises these errors before the op runs, so their messages are not checked."""
    assert reaches_the_op(SCALED, testing.Sample("call", args)) == reaches


def test_arguments_that_are_too_many_or_given_twice_reach_the_function() -> None:
    x, bias = torch.randn(3, 4), torch.randn(4)
    with pytest.raises(TypeError, match="bias_act: got more than 2 positional arguments"):
        testing.Sample("too many", (x, bias, 1.0, "relu", 0)).call(torchkiln.bias_act)
    with pytest.raises(TypeError, match=r"bias_act: (got|scale)"):
        testing.Sample("twice", (x, bias, 1.0), {"scale": 2.0}).call(torchkiln.bias_act)
    found = testing.Sample("right", (x, bias, 0.5), {"act": "none"}).call(torchkiln.bias_act)
    torch.testing.assert_close(found, x * 0.5 + bias)
