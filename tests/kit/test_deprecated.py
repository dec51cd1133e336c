"""Deprecated names of arguments and attributes still work, with a warning."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from torchkiln import _deprecated
from torchkiln._deprecated import Renamed
from torchkiln.ops.eager import eager

CHANGED = Renamed("check", "0.2", "0.3")
WORDS = "check_target is check since version 0.2; check_target is gone in version 0.3"


def op(**options: Any) -> dict[str, Any]:
    _deprecated.argument("op", options, "check_target", CHANGED)
    return options


def test_a_former_argument_has_its_present_name() -> None:
    with pytest.warns(FutureWarning, match=rf"^torchkiln\.op: {WORDS}$") as caught:
        assert op(check_target=True) == {"check": True}
    assert caught[0].filename == __file__
    assert op(check=True) == {"check": True}


def test_both_names_of_an_argument() -> None:
    with pytest.raises(TypeError, match=r"torchkiln\.op: check_target: got a value beside check"):
        op(check_target=True, check=True)


@eager(lambda x, groups, check: (x, groups, check), former={"check_target": CHANGED})
def routed(x: int, groups: int = 1, *, check: bool = True) -> tuple[int, int, bool]:
    return x, groups, check


@eager(lambda x, check: (x, check), input="x", former={"check_target": CHANGED})
def required(x: int, check: int) -> tuple[int, int]:
    return x, check


def test_a_former_argument_of_a_function_that_is_routed() -> None:
    former: Any = routed
    with pytest.warns(FutureWarning, match=rf"^torchkiln\.routed: {WORDS}$") as caught:
        assert former(1, check_target=False) == (1, 1, False)
    assert caught[0].filename == __file__
    assert routed(1, 2, check=False) == (1, 2, False)
    with pytest.raises(TypeError, match=r"torchkiln\.routed: check_target: got a value beside"):
        former(1, check_target=True, check=False)
    with pytest.raises(TypeError, match=r"got more than 2 positional arguments"):
        former(1, 2, True)


@eager(lambda x, check: (x, check), former={"check_target": CHANGED})
def numbered(x: int, *, check: float = 1e-6) -> tuple[int, float]:
    return x, check


def test_a_former_argument_whose_default_is_a_number() -> None:
    former: Any = numbered
    with pytest.warns(FutureWarning, match=r"^torchkiln\.numbered: "):
        assert former(1, check_target=0.5) == (1, 0.5)
    with pytest.raises(TypeError, match=r"check_target: got a value beside check"):
        former(1, check_target=0.5, check=0.25)


def test_a_former_argument_without_a_default() -> None:
    former: Any = required
    with pytest.warns(FutureWarning, match=r"^torchkiln\.required: "):
        assert former(input=1, check_target=2) == (1, 2)


def test_a_former_argument_under_compile() -> None:
    """A call with a deprecated argument compiles to one graph, without a warning."""
    former: Any = routed
    found = torch.compile(lambda x: former(x, check_target=False), fullgraph=True, backend="eager")
    assert found(3) == (3, 1, False)


def test_a_former_attribute_of_a_module() -> None:
    module: Any = types.ModuleType("torchkiln.made")
    module.check = print
    former = {"check_target": CHANGED}
    module.__getattr__ = lambda name: _deprecated.attribute(module, name, former)
    with pytest.warns(FutureWarning, match=rf"^torchkiln\.made: {WORDS}$") as caught:
        assert module.check_target is print
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = module.other
