"""Fields of a spec that are computed from its schema and samples: refused calls, traffic, sizes."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchkiln import testing
from torchkiln.testing import derive
from torchkiln.testing.data import normal
from torchkiln.testing.refusals import Refusals, kinds_of, refused_calls
from torchkiln.testing.specs.bias_act import BIAS_ACT
from torchkiln.testing.specs.gated import SWIGLU
from torchkiln.testing.specs.norm import ADD_RMS_NORM
from torchkiln.testing.specs.pointwise import ADD
from torchkiln.testing.specs.reduction import SUM

CPU = torch.device("cpu")
LIBRARY = torch.library.Library("torchkiln_derived", "DEF")
LIBRARY.define("scaled(Tensor x, Tensor? bias=None, float factor=2., *, str act='none') -> Tensor")


def scaled(x: Tensor, bias: Tensor | None = None, factor: float = 2.0, act: str = "none") -> Tensor:
    assert act == "none"
    return x * factor if bias is None else x * factor + bias


LIBRARY.impl("scaled", scaled, "CompositeImplicitAutograd")


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
    x, bias = normal("x", (6, 10), device, dtype), normal("bias", (10,), device, dtype)
    yield testing.Sample("typical", (x, bias), {"factor": 2.0, "act": "none"})
    yield testing.Sample("other", (x,), {"factor": 3.0})


def spec(**fields: Any) -> testing.OpSpec:
    given: dict[str, Any] = {
        "op": scaled,
        "overload": torch.ops.torchkiln_derived.scaled.default,
        "reference": scaled,
        "magnitude": scaled,
        "inputs": inputs,
    }
    return testing.OpSpec(**{**given, **fields})


def messages(one: testing.OpSpec) -> list[str]:
    """The messages, without a remedy behind them."""
    prefix = r"torchkiln_derived\.scaled: "
    found = [case.message for case in refused_calls(one, CPU)]
    assert all(message.startswith(prefix) for message in found)
    plain = [message.removeprefix(prefix).replace("\\", "") for message in found]
    return [message.removesuffix("(; .+)?") for message in plain]


def test_names_composite_and_gradients_are_derived() -> None:
    found = spec()
    assert found.name == "scaled"
    assert found.composite is scaled
    assert found.differentiable == (0, 1)
    assert SWIGLU.overload is torch.ops.torchkiln.swiglu.default
    assert spec(differentiable=(0,), name="mine").differentiable == (0,)
    testing.validate([found])


def test_kinds_of_arguments_are_those_of_the_schema() -> None:
    assert kinds_of(SUM.overload) == {
        "x": "Tensor",
        "dim": "int[1]?",
        "keepdim": "bool",
        "dtype": "ScalarType?",
    }
    assert kinds_of(torch.ops.aten.relu_.default) == {"self": "Tensor"}


def test_traffic_is_that_of_tensors_and_outputs() -> None:
    sample = next(iter(inputs(CPU, torch.float32)))
    matrix, row = 6 * 10 * 4, 10 * 4
    one = spec(operations=(3, 5))
    assert one.traffic(sample) == testing.Traffic(2 * matrix + row, 3 * 60)
    assert one.backward_traffic(sample) == testing.Traffic(3 * matrix + 2 * row, 5 * 60)
    counted = spec(operations=lambda sample: (sample.numel + 1, 7))
    assert counted.traffic(sample).operations == 61
    assert counted.backward_traffic(sample).operations == 7
    given = spec(traffic=lambda _: testing.Traffic(1, 2))
    assert given.traffic(sample) == testing.Traffic(1, 2)


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 64)])
def test_a_timed_call_has_the_sizes_of_the_typical_one(shape: tuple[int, int]) -> None:
    found = spec().bench(CPU, torch.bfloat16, shape)
    x, bias = found.args
    assert (x.shape, bias.shape) == (shape, shape[1:])
    assert {x.dtype, bias.dtype} == {torch.bfloat16}
    assert found.kwargs == {}  # the schema has these defaults
    assert found.seed is None


def test_sizes_that_are_not_those_of_the_matrix_are_an_error() -> None:
    def odd(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
        yield testing.Sample(
            "odd", (normal("x", (6, 10), device, dtype), normal("b", (7,), device))
        )

    def cube(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
        yield testing.Sample("cube", (normal("x", (2, 3, 4), device, dtype),))

    def integers(device: torch.device, _: torch.dtype) -> Iterator[testing.Sample]:
        yield testing.Sample("integers", (torch.ones(6, 10, device=device, dtype=torch.int64),))

    for wrong, words in (
        (odd, r"bench: got shape \[7\] in the typical sample 'odd', expected a matrix"),
        (cube, r"bench: got shape \[2, 3, 4\] of the first tensor in the typical sample 'cube'"),
        (integers, r"bench: got a tensor of dtype torch\.int64"),
    ):
        with pytest.raises(ValueError, match=words):
            spec(inputs=wrong).bench(CPU, torch.float32, (2, 3))
    with pytest.raises(ValueError, match=r"large: got a sequence of sizes .* give large"):
        derive.large(ADD_RMS_NORM, CPU)


def test_a_large_call_is_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    small = normal("x", (9, 5), CPU, torch.bfloat16)
    monkeypatch.setattr(derive, "large_matrix", lambda _: small)
    monkeypatch.setattr(derive, "LARGE", (9, 5))
    assert ADD.large is not None
    a, b = ADD.large(CPU).args
    assert a.data_ptr() == b.data_ptr() == small.data_ptr()
    assert BIAS_ACT.large is not None
    x, bias = BIAS_ACT.large(CPU).args
    assert (x.shape, bias.shape, bias.dtype) == ((9, 5), (5,), torch.bfloat16)
    assert SUM.large is None


class Scaled(nn.Module):
    def __init__(self, features: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.bias)


def test_a_module_gets_the_tensors_that_it_does_not_own() -> None:
    one = spec(module=testing.layer(Scaled, 10))
    assert one.module is not None
    assert one.module_inputs is not None
    made = one.module(CPU, torch.float64)
    assert bool((made.get_parameter("bias") != 0).any())
    (x,) = one.module_inputs(CPU, torch.float64)
    assert torch.equal(x, next(iter(inputs(CPU, torch.float64))).args[0])
    assert made(x).dtype == torch.float64
    assert made.get_parameter("bias").equal(one.module(CPU, torch.float64).get_parameter("bias"))


def test_a_copy_derives_anew() -> None:
    sample = ADD.typical(CPU, torch.float32)
    other = dataclasses.replace(ADD, operations=(9, 9))
    assert other.traffic(sample).operations == 9 * 60
    assert ADD.traffic(sample).operations == 60


def test_refusals_come_from_the_schema() -> None:
    found = messages(spec())
    for message in (
        "x: got NoneType, expected a torch.Tensor",
        "x: got float, expected a torch.Tensor",
        "bias: got str, expected a torch.Tensor",
        "factor: got Tensor, expected a number",
        "factor: got NoneType, expected a number",
        "act: got int, expected a str",
        "x: got dtype int64, expected one of float32, float64, float16, bfloat16",
        "x: got layout Sparse, expected Strided; call .to_dense() first",
        "bias: got layout Sparse, expected Strided; call .to_dense() first",
        "bias: got device meta, expected cpu, the device of x",
    ):
        assert message in found
    assert "bias: got NoneType, expected a torch.Tensor" not in found  # bias has a default
    assert len(found) == len(set(found))


RULES: list[tuple[Refusals, list[str], list[str]]] = [
    (
        Refusals(like={"bias": "x"}),
        [
            "bias: got dtype float64, expected float32, the dtype of x",
            "bias: got dtype float32, expected float16, the dtype of x",
            "bias: got shape [1], expected [10], the shape of x",
            "bias: got shape [10, 1], expected [10], the shape of x",
        ],
        [],
    ),
    (
        Refusals(parameters={"bias": "x"}, shapes={"bias": "the last dimension of x"}),
        [
            "bias: got dtype bfloat16, expected float16, the dtype of x, or float32",
            "bias: got dtype int64, expected float32, the dtype of x",
            "bias: got shape [9], expected [10], the last dimension of x",
            "bias: got shape [], expected [10], the last dimension of x",
        ],
        ["bias: got dtype float32, expected float16, the dtype of x, or float32"],
    ),
    (
        Refusals(words={"act": ("none", "relu")}),
        ["act: got 'unknown', expected one of none, relu"],
        [],
    ),
    (
        Refusals(dims={"factor": "x"}),
        [
            "factor: got 2, expected a number from -2 to 1: x has 2 dimensions",
            "factor: got -3, expected a number from -2 to 1: x has 2 dimensions",
            "factor: got 1, expected a number from -1 to 0: x has 0 dimensions",
        ],
        [],
    ),
    (
        Refusals(kinds=False, promotes=True),
        ["x: got layout Sparse, expected Strided; call .to_dense() first"],
        [
            "x: got NoneType, expected a torch.Tensor",
            "x: got dtype int64, expected one of float32, float64, float16, bfloat16",
        ],
    ),
    (
        Refusals(numbers=("x",)),
        [
            "x: got NoneType, expected a torch.Tensor( or a number)?",
            "x: got str, expected a torch.Tensor or a number",
        ],
        ["x: got float, expected a torch.Tensor"],
    ),
    (
        Refusals(integers=True),
        [
            (
                "x: got dtype complex64, expected one of float32, float64, float16, bfloat16, "
                "an integer dtype or bool"
            )
        ],
        ["x: got dtype int64, expected one of float32, float64, float16, bfloat16"],
    ),
    (
        Refusals(first="bias"),
        ["x: got device meta, expected cpu, the device of bias"],
        ["bias: got device meta, expected cpu, the device of x"],
    ),
]


@pytest.mark.parametrize(("rules", "wanted", "unwanted"), RULES)
def test_refusals_come_from_the_tables(
    rules: Refusals, wanted: list[str], unwanted: list[str]
) -> None:
    found = messages(spec(refusals=rules))
    assert set(wanted) <= set(found)
    assert not set(unwanted) & set(found)


def test_an_integer_tensor_takes_those_that_follow_it_along() -> None:
    cases = {case.name: case for case in refused_calls(SWIGLU, CPU)}
    wrong = cases["gate: got dtype bool, expected one of float32, float64, float16, bfloat16"]
    assert {a.dtype for a in wrong.args} == {torch.bool}


def test_the_op_may_have_another_name_in_messages() -> None:
    found = [case.message for case in refused_calls(spec(refusals=Refusals(called="sc")), CPU)]
    assert all(message.startswith(r"torchkiln_derived\.sc: ") for message in found)


def test_given_refusals_are_the_whole_list_unless_there_are_tables() -> None:
    mine = testing.Invalid("mine", (torch.ones(2),), ValueError, "no")
    assert list(refused_calls(spec(invalid=lambda _: [mine]), CPU)) == [mine]
    both = list(refused_calls(spec(invalid=lambda _: [mine], refusals=Refusals()), CPU))
    assert mine in both
    assert len(both) == 1 + len(messages(spec()))


def test_a_changed_call_keeps_positions_and_keywords() -> None:
    overload = torch.ops.torchkiln_derived.scaled.default
    x = torch.ones(2, 3)
    good = testing.GoodCall(overload, testing.Sample("good", (x, x)))
    assert good["x"] is x
    assert good["act"] is None
    case = good.changed("bias: got 2 (of [1])", ValueError, bias=None, act="no")
    assert case.args[0] is x
    assert case.args[1] is None
    assert case.kwargs == {"act": "no"}
    assert case.message == r"torchkiln_derived\.scaled: bias: got 2 \(of \[1\]\)"
    half = good.cast(torch.float16)
    assert half["bias"].dtype == torch.float16


def test_samples_of_tensors_of_one_shape() -> None:
    made = list(testing.alike("x", "gate", scale=2.0)(CPU, torch.float64))
    assert made[0].name == "typical"
    assert made[0].kwargs == {"scale": 2.0}
    for sample in made:
        x, gate = sample.tensors
        assert x.shape == gate.shape
        assert x.numel() < 2 or not torch.equal(x, gate)
    assert [(sample.args[2:], sample.kwargs) for sample in made[-2:]] == [((), {}), ((-0.6,), {})]
    assert len(list(testing.alike("x")(CPU, torch.float32))) == len(made) - 2
    assert pickle.loads(pickle.dumps(testing.alike("x", scale=1.0))).args == (
        ("x",),
        {"scale": 1.0},
    )
