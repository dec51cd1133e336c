"""Constructors and forwards of subclasses of torch's modules begin with torch's parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import torchkiln

Parameter = inspect.Parameter
DEPRECATED = {"size_average", "reduce"}
"""Parameters that torch has deprecated. Those after them are keyword-only here."""

REQUIRED = {("Softmax", "dim"), ("LogSoftmax", "dim")}
"""Parameters without a default here; torch chooses a dimension and warns."""


def torchs_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The public class of torch from which a module inherits."""
    for base in cls.__mro__:
        if getattr(nn, base.__name__, None) is base and base is not nn.Module:
            return base
    return None


PAIRS = {
    name: (cls, base)
    for name in torchkiln.nn.__all__
    if (base := torchs_class(cls := getattr(torchkiln.nn, name))) is not None
}


def parameters(function: Any) -> list[Parameter]:
    """The parameters of a method, without ``self``."""
    return list(inspect.signature(function).parameters.values())[1:]


def test_subclasses_are_found() -> None:
    assert {"Linear", "LayerNorm", "ReLU", "BatchNormAct2d", "TransformerEncoderLayer"} <= set(
        PAIRS
    )
    assert len(PAIRS) >= 20


@pytest.mark.parametrize("name", PAIRS)
def test_constructors_begin_as_torchs(name: str) -> None:
    cls, base = PAIRS[name]
    ours, theirs = parameters(cls.__init__), parameters(base.__init__)
    plain = [p for p in theirs if p.kind is not Parameter.KEYWORD_ONLY]
    end = next((i for i, p in enumerate(plain) if p.name in DEPRECATED), len(plain))
    leading = [p for p in ours if p.kind is not Parameter.KEYWORD_ONLY]
    assert [p.name for p in leading] == [p.name for p in plain[:end]]
    for one, other in zip(leading, plain, strict=False):
        assert one.default == other.default or (name, one.name) in REQUIRED, one
    rest = {p.name for p in plain[end:]} - DEPRECATED
    assert rest <= {p.name for p in ours}


@pytest.mark.parametrize("name", PAIRS)
def test_forwards_begin_as_torchs(name: str) -> None:
    cls, base = PAIRS[name]
    ours, theirs = parameters(cls.forward), parameters(base.forward)
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]


def test_device_and_dtype_by_position() -> None:
    norm = torchkiln.nn.BatchNormAct2d(8, 1e-5, 0.1, True, True, "meta", torch.float64)
    assert (norm.weight.device.type, norm.weight.dtype) == ("meta", torch.float64)
    sync = torchkiln.nn.SyncBatchNormAct(8, 1e-5, 0.1, True, True, None, "meta", torch.float64)
    assert (sync.weight.device.type, sync.weight.dtype) == ("meta", torch.float64)
    conv: Any = torchkiln.nn.ConvBNAct2d(2, 3, 1, 1, 0, 1, 1, False, "zeros", "meta", torch.float64)
    assert (conv.conv.weight.device.type, conv.bn.weight.dtype) == ("meta", torch.float64)


def test_layers_take_input_by_keyword() -> None:
    x = torch.randn(2, 8, 4, 4)
    for layer in (
        torchkiln.nn.LayerNorm(4),
        torchkiln.nn.GroupNorm(2, 8),
        torchkiln.nn.BatchNormAct2d(8),
        torchkiln.nn.Softmax(1),
        torchkiln.nn.GELU(),
    ):
        assert torch.equal(layer(input=x), layer(x))
