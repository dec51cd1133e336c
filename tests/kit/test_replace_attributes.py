"""Replaced modules read parameters, buffers and submodules as attributes are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replace_models import Gated, Rms
from torch import nn

import torchkiln

MAKERS = (lambda: nn.LayerNorm(16), lambda: Rms(16), lambda: torchkiln.nn.BatchNormAct1d(16))
X = torch.linspace(-1, 2, 64).reshape(4, 16)


def pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A replaced module after one call, and an equal module that is not replaced."""
    module, twin = make().eval(), make().eval()
    twin.load_state_dict(module.state_dict())
    torchkiln.replace(module)
    module(X)
    return module, twin


def doubled(name: str) -> property:
    """A property that returns twice the parameter."""
    return property(lambda module: 2 * module._parameters[name])


@pytest.mark.parametrize("make", MAKERS)
def test_a_property_of_a_later_class(make: Callable[[], nn.Module]) -> None:
    """A replaced module reads a property of its later class, as FSDP in torchtitan adds."""
    module, twin = pair(make)
    plain = twin(X)
    name = next(iter(twin._parameters))
    for one in (module, twin):
        one.__class__ = type("Sharded", (type(one),), {name: doubled(name)})
    assert not torch.equal(twin(X), plain)
    torch.testing.assert_close(module(X), twin(X))


class Gathering(dict[str, Any]):
    """A dict that triples parameters on access; DeepSpeed's gathers them there."""

    def __getitem__(self, name: str) -> Any:
        return 3 * super().__getitem__(name)


@pytest.mark.parametrize("make", MAKERS)
def test_a_dict_of_parameters_with_code(make: Callable[[], nn.Module]) -> None:
    module, twin = pair(make)
    plain = twin(X)
    for one in (module, twin):
        one.__dict__["_parameters"] = Gathering(one._parameters)
    assert not torch.equal(twin(X), plain)
    torch.testing.assert_close(module(X), twin(X))


def test_an_attribute_in_front_of_a_submodule() -> None:
    module, twin = pair(Gated)
    plain = twin(X)
    for one in (module, twin):
        one.__dict__["gate"] = nn.Linear(16, 24)
    module.gate.load_state_dict(twin.gate.state_dict())
    assert not torch.equal(twin(X), plain)
    torch.testing.assert_close(module(X), twin(X))
