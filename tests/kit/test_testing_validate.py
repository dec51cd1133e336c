"""Invalid specs raise one error with all names and fields before any check runs."""

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
