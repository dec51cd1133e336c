"""Modules that differ from an op's formula only in some calls, and must not be replaced."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replace_attacks import ROWS, ByGlobal, ByGroups, quick, rms
from torch import Tensor, nn

import torchkiln

FACTORS = {"quick": 1.702}


class ByIdentity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x.shape[0] == 7) is True:
            return x
        return quick(x)


class ByCheck(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) & (x.shape[0] == 7):
            return x
        return quick(x)


class ByNone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x) if x.grad_fn is None else x


class ByKey(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return {7: F.relu6}.get(x.shape[0], quick)(x)


class ByDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return {"cpu": quick, "meta": F.relu6}[x.device.type](x)


class ByIndex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (quick, F.relu6)[x.shape[0] == 7](x)


class ByFactor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x) * (1 + (x.shape[0] == 7))


class ByLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = quick(x)
        for _ in range(x.shape[0] // 7):
            y = y * 2
        return y


class ByError(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x.view(7, 64)
        except RuntimeError:
            return quick(x)
        return x


class ByTensorsAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x) * getattr(x, "scale", 1.0)


class ByLayout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return quick(x)


class ByZero(nn.Module):
    """An RMS norm that returns NaN where x is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2) / x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def marked(x: Tensor) -> Tensor:
    x.scale = 3.0  # type: ignore[attr-defined]
    return x


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (ByIdentity(), ROWS),
        (ByCheck(), ROWS),
        (ByNone(), ROWS.clone().requires_grad_() * 1),
        (ByKey(), ROWS),
        (ByDevice(), ROWS),
        (ByIndex(), ROWS),
        (ByFactor(), ROWS),
        (ByLoop(), ROWS),
        (ByError(), ROWS),
        (ByTensorsAttribute(), marked(ROWS.clone())),
        (ByLayout(), torch.randn(2, 3, 4, 5)),
        (ByGroups(), torch.randn(4, 64)),
        (ByZero(), torch.zeros(2, 64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_calls_unlike_those_that_were_tried(module: nn.Module, x: Tensor) -> None:
    expected = module(x)
    torchkiln.replace(module)
    found = module(x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, equal_nan=True)


class ByOwn(nn.Module):
    """A module with attributes named like methods of every module."""

    def __init__(self, type: str, half: float) -> None:
        super().__init__()
        self.type, self.half = type, half

    def forward(self, x: Tensor) -> Tensor:
        return quick(x, self.half) if self.type == "quick" else F.gelu(x) * 1


class ByDict(nn.Module):
    factor = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return quick(x, self.__dict__.get("factor", 1.702))


class ByClass(nn.Module):
    factor = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return quick(x, self.__class__.factor)


class ByType(nn.Module):
    factor = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return quick(x, type(self).factor)


class Gain:
    factor = 1.702

    def of(self, x: Tensor) -> Tensor:
        return quick(x, self.factor)


class ByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain.of(x)


class ByHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["act"] = ByGlobal()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(x)
        return result


class ByEps(nn.Module):
    """A norm that raises eps to at least 1e-3, or returns x if eps is below 1e-3."""

    def __init__(self, *, is_least: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.is_least = nn.Parameter(torch.randn(64)), 0.01, is_least

    def forward(self, x: Tensor) -> Tensor:
        if self.is_least:
            return rms(x, max(self.eps, 1e-3)) * self.weight
        return x if self.eps < 1e-3 else rms(x, self.eps) * self.weight


def exchanged_act(module: Any) -> None:
    module.__dict__["act"] = nn.ReLU()


def exchanged_gain(module: Any) -> None:
    module.gain = Gain()
    module.gain.factor = 1.0


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (ByOwn("quick", 1.702), lambda m: setattr(m, "type", "gelu")),
        (ByOwn("quick", 1.702), lambda m: setattr(m, "half", 1.0)),
        (ByDict(), lambda m: setattr(m, "factor", 1.0)),
        (ByMethod(), lambda m: setattr(m.gain, "factor", 1.0)),
        (ByMethod(), exchanged_gain),
        (ByHidden(), exchanged_act),
        (ByEps(is_least=True), lambda m: setattr(m, "eps", 1e-6)),
        (ByEps(is_least=False), lambda m: setattr(m, "eps", 1e-6)),
    ],
)
def test_later_changes(module: nn.Module, change: Callable[[Any], None]) -> None:
    original = copy.deepcopy(module)
    torchkiln.replace(module)
    change(module)
    change(original)
    torch.testing.assert_close(module(ROWS * 1e-2), original(ROWS * 1e-2))


@pytest.mark.parametrize("cls", [ByClass, ByType])
def test_later_changes_of_a_class(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = cls()
    torchkiln.replace(module)
    monkeypatch.setattr(cls, "factor", 1.0)
    torch.testing.assert_close(module(ROWS), quick(ROWS, 1.0))


def test_later_changes_of_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ByGlobal()
    report = torchkiln.replace(module)
    assert report[""].now == "quick_gelu"
    monkeypatch.setattr(sys.modules[ByGlobal.__module__], "FACTOR", 1.0)
    torch.testing.assert_close(module(ROWS), quick(ROWS, 1.0))


def test_modules_that_differ_in_an_attribute_named_as_a_method() -> None:
    net = nn.Sequential(ByOwn("quick", 1.702), ByOwn("gelu", 1.702))
    report = torchkiln.replace(net)
    assert [report["0"].now, report["1"].now[:4]] == ["quick_gelu", "gelu"]


class ByGlobalObject(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x, Gain.factor)


class ByGlobalDict(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x, FACTORS["quick"])


class ByOffset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x) * (1 + x.storage_offset())


@functools.lru_cache
def size_factor(size: int) -> float:
    return 2.0 if size == 7 else 1.0


class ByCache(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x) * size_factor(x.shape[0])


def test_a_class_and_a_dict_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(ByGlobalObject(), ByGlobalDict())
    original = copy.deepcopy(net)
    torchkiln.replace(net)
    monkeypatch.setattr(Gain, "factor", 1.0)
    monkeypatch.setitem(FACTORS, "quick", 1.0)
    torch.testing.assert_close(net(ROWS), original(ROWS))


def test_a_function_that_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ByGlobal()
    torchkiln.replace(module)
    monkeypatch.setattr(sys.modules[ByGlobal.__module__], "quick", lambda x, _: x)
    assert torch.equal(module(ROWS), ROWS)


def test_results_that_are_known_and_offsets() -> None:
    for size in (2, 48, 64, 130):
        size_factor(size)
    for module, x in ((ByCache(), ROWS), (ByOffset(), ROWS[1:])):
        expected = module(x)
        torchkiln.replace(module)
        torch.testing.assert_close(module(x), expected)
