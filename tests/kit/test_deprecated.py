"""Former names of arguments and attributes."""

from __future__ import annotations

import types
from typing import Any

import pytest

from torchkiln import _deprecated
from torchkiln._deprecated import Renamed

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
