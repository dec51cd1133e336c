"""An invalid spec raises one error, before any check, that names all invalid fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from torchkiln import testing
from torchkiln.testing.specs.norm import ADD_RMS_NORM
from torchkiln.testing.specs.pointwise import ADD

X = torch.ones(3, 4)


def of(*samples: Any) -> Any:
    return lambda *_: iter(samples)


def refusing(*cases: Any) -> Any:
    return lambda _: iter(cases)


def fail(*_: object) -> None:
    raise KeyError("shape")


def sample(name: str = "typical", *args: Any) -> testing.Sample:
    return testing.Sample(name, args or (X, X))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name: got ''"),
    ({"reference": None}, "reference: got None, expected a function"),
    ({"large": 7}, "large: got 7, expected a function or None"),
    ({"overload": torch.add}, "overload: got "),
    ({"overload": None, "op": torch.add}, "overload: missing, expected one such as"),
    ({"differentiable": [0]}, "differentiable: got [0], expected a tuple of positions"),
    ({"differentiable": (0, 0)}, "differentiable: got (0, 0), expected each position once"),
    ({"dtypes": ()}, "dtypes: got ()"),
    ({"dtypes": (torch.int64,)}, "dtypes: got (torch.int64,)"),
    ({"differentiable": (0, 5)}, "differentiable: got position 5, but torchkiln::add has 2"),
    ({"indices": (1,), "autocast": (1,)}, "autocast: got position 1, which indices calls"),
    ({"module_inputs": of()}, "module: missing, but module_inputs is given"),
    ({"helpers": ("nothing",)}, "helpers: got 'nothing', which is no op of torchkiln"),
    ({"waits_for": ("flag",)}, "waits_for: got 'flag', which is no argument of torchkiln::add"),
    ({"excluded": {"value": "no"}}, "excluded: got 'value', expected the name of a check"),
    ({"excluded": {"vmap": " "}}, "excluded: vmap: got ' ', expected the reason"),
    ({"excluded": {"written": "no"}}, "excluded: got 'written', but without written"),
    ({"inputs": fail}, "inputs: raised KeyError: 'shape'"),
    ({"inputs": of()}, "inputs: got no sample"),
    ({"inputs": of((X, X))}, "inputs: got a tuple, expected a Sample"),
    ({"inputs": of(sample(), sample())}, "inputs: got 2 samples named 'typical'"),
    ({"inputs": of(sample("n", 1, 2))}, "inputs: sample 'n': got no tensor"),
    (
        {"inputs": of(testing.Sample("typical", (X, X), {"scale": 1.7}))},
        "inputs: sample 'typical': got scale=1.7, expected arguments among ",
    ),
    ({"inputs": of(sample("one", X[:1], X[:1]))}, "'one': expected at least two rows"),
    ({"inputs": of(sample("n", X, 1))}, "differentiable: got position 1, where no sample"),
    ({"invalid": fail}, "invalid: raised KeyError"),
    ({"invalid": refusing(), "refusals": None}, "invalid: got no call"),
    ({"invalid": refusing("x")}, "invalid: got a str, expected an Invalid"),
    (
        {"invalid": refusing(testing.Invalid("n", (X,), TypeError, "(got"))},
        "invalid: n: message: '(got' is no pattern",
    ),
    (
        {"invalid": refusing(testing.Invalid("n", (X,), TypeError, ""))},
        "invalid: n: message: got none",
    ),
]


@pytest.mark.parametrize(("changed", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_field_is_told(changed: dict[str, Any], words: str) -> None:
    spec = dataclasses.replace(ADD, **changed)
    with pytest.raises(testing.SpecError) as caught:
        list(testing.cases([ADD_RMS_NORM, spec], torch.device("cpu")))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{spec.name}: ")
    assert words in problem


def test_all_problems_are_told_at_once() -> None:
    first = dataclasses.replace(ADD, name="first", differentiable=(9,), waits_for=("flag",))
    second = dataclasses.replace(ADD, name="second", reference=None)  # type: ignore[arg-type]
    with pytest.raises(testing.SpecError) as caught:
        testing.validate([first, second])
    assert [line.split(":")[:2] for line in caught.value.problems] == [
        ["first", " differentiable"],
        ["first", " waits_for"],
        ["second", " reference"],
    ]


def test_a_name_stands_once() -> None:
    with pytest.raises(testing.SpecError, match="add: name: got 2 specs of this name"):
        testing.validate([ADD, ADD])


def test_missing_fields_are_told_with_the_name() -> None:
    given: dict[str, Any] = {"name": "mine", "op": torch.add}
    with pytest.raises(testing.SpecError, match="mine: reference: missing") as caught:
        testing.OpSpec(**given)
    assert "mine: inputs: missing" in str(caught.value)


def test_ours_are_right() -> None:
    testing.validate(testing.SPECS)


@torch.library.custom_op("validated::swished", mutates_args=())
def swished(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


def swish_spec(op: Any, **fields: Any) -> testing.OpSpec:
    def formula(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate)

    excluded = {"bad_input": "it has no checks"}
    given = {"inputs": testing.alike("x", "gate"), "excluded": excluded, **fields}
    return testing.OpSpec(op=op, reference=formula, magnitude=formula, **given)


@pytest.mark.parametrize("place", ["custom_op", "packet", "overload"])
def test_an_op_of_torch_library_has_its_own_schema(place: str) -> None:
    packet = torch.ops.validated.swished
    op = {"custom_op": swished, "packet": packet, "overload": packet.default}[place]
    spec = swish_spec(op)
    assert (spec.name, spec.overload) == ("swished", packet.default)
    assert spec.differentiable == (0, 1)
    testing.validate([spec])
    checks = {case.check.name: case for case in testing.cases([spec], torch.device("cpu"))}
    checks["values"].run()


def test_a_packet_with_several_overloads_is_told() -> None:
    with pytest.raises(testing.SpecError, match=r"has several: aten\.mul\.Tensor, "):
        testing.validate([swish_spec(torch.ops.aten.mul, name="mul")])


def test_checks_that_cannot_hold_for_a_custom_op_exist() -> None:
    excluded = {**testing.CUSTOM_OP_EXCLUDED, "bad_input": "it has no checks"}
    testing.validate([swish_spec(swished, excluded=excluded)])


def test_a_sample_with_an_unknown_argument_is_told() -> None:
    inputs = testing.alike("x", "gate", scale=1.7)
    with pytest.raises(testing.SpecError, match=r"got scale=1.7, expected arguments among x, gate"):
        testing.validate([swish_spec(swished, inputs=inputs)])


def test_a_function_with_any_keyword_arguments_takes_those_of_its_samples() -> None:
    def scaled(x: torch.Tensor, gate: torch.Tensor, **options: float) -> torch.Tensor:
        return swished(x * options["scale"], gate)

    inputs = testing.alike("x", "gate", scale=1.7)
    overload = torch.ops.validated.swished.default
    testing.validate([swish_spec(scaled, overload=overload, inputs=inputs)])


def test_a_wrong_gradient_is_told_with_the_name_of_the_argument() -> None:
    op = torch.library.custom_op("validated::stopped", swished._init_fn, mutates_args=())
    op.register_fake(lambda x, _: torch.empty_like(x))
    op.register_autograd(lambda _, grad: (grad, grad))
    case = next(
        case
        for case in testing.cases([swish_spec(op)], torch.device("cpu"))
        if case.check.name == "gradient_values"
    )
    with pytest.raises(AssertionError, match=r"gradient of argument 0 \(x\)"):
        case.run()
