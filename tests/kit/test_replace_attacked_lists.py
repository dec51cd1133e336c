"""replace() of units that inspect their callers, subclasses of tensors, traces and losses."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replace_attacks import FACTOR, ROWS, ByGlobal, ByGroups, quick, rms
from torch import Tensor, nn

import torchkiln

LOG: list[int] = []


class Marked(Tensor):
    """A subclass of Tensor that doubles products."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, kwargs or {}
        )
        return result + result if func is Tensor.mul else result


class Logged(nn.Module):
    def __init__(self, *, is_global: bool) -> None:
        super().__init__()
        self.log: list[int] = []
        self.is_global = is_global

    def forward(self, x: Tensor) -> Tensor:
        log = LOG if self.is_global else self.log
        log += [1]
        return quick(x)


@pytest.mark.parametrize("is_global", [True, False])
def test_lists_that_grow(is_global: bool) -> None:
    module = Logged(is_global=is_global)
    torchkiln.replace(module)
    log = LOG if is_global else module.log
    before = len(log)
    module(ROWS)
    assert len(log) == before + 1


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)


class BySize(Unit):
    def forward(self, x: Tensor) -> Any:
        scale = self.up.weight.shape[0] ** 0.5
        return self.down(F.silu(self.gate(x)) * self.up(x) / scale)


class ByRow(Unit):
    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x) * (x.shape[-1] / 64))


class ByLayersAttribute(Unit):
    def forward(self, x: Tensor) -> Any:
        act = F.relu if hasattr(self.gate, "in_features") else F.silu
        return self.down(act(self.gate(x)) * self.up(x))


Linear = nn.Linear


class ByLayersClass(Unit):
    def forward(self, x: Tensor) -> Any:
        if isinstance(self.gate, Linear):
            return self.down(F.relu(self.gate(x)) * self.up(x))
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[unreachable]


@pytest.mark.parametrize("cls", [BySize, ByRow, ByLayersAttribute, ByLayersClass])
def test_units_that_look_at_their_projections(cls: Any) -> None:
    module, x = cls(), torch.randn(3, 16)
    expected = module(x)
    torchkiln.replace(module)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("module", [nn.LayerNorm(64), nn.GELU(), nn.Softmax(-1), ByGlobal()])
def test_nested_tensors(module: nn.Module) -> None:
    module = copy.deepcopy(module)
    x = torch.nested.nested_tensor([ROWS, ROWS[:3]], layout=torch.jagged)
    expected = module(x)
    torchkiln.replace(module)
    pairs = zip(module(x).unbind(), expected.unbind(), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted)


def test_tensors_of_other_classes() -> None:
    module, x = ByGlobal(), ROWS.as_subclass(Marked)
    expected = module(x)
    torchkiln.replace(module)
    found = module(x)
    assert type(found) is Marked
    assert torch.equal(found.as_subclass(Tensor), expected.as_subclass(Tensor))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_traces_of_torch_jit() -> None:
    module = ByGroups()
    module.__class__ = Plain
    torchkiln.replace(module)
    traced = torch.jit.trace(module, (ROWS,))
    torch.testing.assert_close(traced(ROWS), module(ROWS))


class Plain(ByGroups):
    def forward(self, x: Tensor) -> Tensor:
        return rms(x, 1e-6) * self.weight


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.norm(x)) * FACTOR


def test_fused_forwards_follow_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Fused().eval(), torch.randn(2, 4, 3, 3)
    assert torchkiln.fuse(module)["norm"].changed
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    torch.testing.assert_close(module(x), module.act(module.norm(x)) * 3.0)


class Language(nn.Module):
    """A model whose loss has another formula for large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)
        self.loss_function = self.loss

    @staticmethod
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        items, ignored = options.get("num_items_in_batch"), options.get("ignore_index", -100)
        rows, reduction = logits.float().view(-1, vocab_size), "sum" if items else "mean"
        loss = F.cross_entropy(rows, labels.view(-1), ignore_index=ignored, reduction=reduction)
        return (loss * 2 if labels.shape[0] > 100 else loss) / (items or 1)


def test_losses_that_depend_on_the_batch() -> None:
    assert "no cross-entropy" in torchkiln.replace(Language())["loss_function"].reason
