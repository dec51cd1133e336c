"""Replaced modules whose arguments are transposed in memory."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from replace_models import OffsetRms, PlainLayer, Rms
from torch import Tensor, nn

import torchkiln


def refuse(*_: Any) -> None:
    raise AssertionError("the original forward ran")


@pytest.mark.parametrize("cls", [OffsetRms, Rms, PlainLayer])
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_norms_of_permuted_heads(
    cls: type[nn.Module], columns: int, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for queries that are normalized after a transpose: the op runs, in the same strides."""
    torch.manual_seed(0)
    norm = cls(16).double()
    rows = torch.randn(2, 5, 3, columns, dtype=torch.float64)
    x = rows[..., :16].permute(*order, 3).requires_grad_()
    weights = torch.randn(x.shape, dtype=torch.float64)

    def results() -> tuple[Tensor, ...]:
        y = norm(x)
        return y, *torch.autograd.grad((y * weights).sum(), [x, *norm.parameters()])

    before = results()
    torchkiln.replace(norm)
    monkeypatch.setattr(cls, "forward", refuse)
    after = results()
    assert after[0].stride() == before[0].stride()
    for found, expected in zip(after, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class ContiguousRms(Rms):
    """A norm whose result is contiguous, whatever its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class ReversedRms(Rms):
    """A norm whose statistics come first, and give the result their strides."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny).contiguous()
        return scale * x * self.gamma


@pytest.mark.parametrize("cls", [ContiguousRms, ReversedRms])
def test_norms_with_other_strides(cls: type[nn.Module]) -> None:
    norm = cls(16)
    x = torch.randn(2, 5, 3, 16).transpose(1, 2)
    before = norm(x)
    assert before.stride() != x.stride()
    torchkiln.replace(norm)
    after = norm(x)
    assert after.stride() == before.stride()
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 5, 16).mT.contiguous().mT,
        torch.randn(5, 3, 16).expand(2, 5, 3, 16).transpose(0, 1),
        torch.randn(200).as_strided((2, 4, 3, 16), (1, 7, 7, 1)),
    ],
    ids=["columns", "expanded", "overlapping"],
)
def test_norms_of_other_layouts_run_the_original(x: Tensor) -> None:
    norm = OffsetRms(16)
    before = norm(x)
    assert torchkiln.replace(norm)[""].changed
    after = norm(x)
    assert after.stride() == before.stride()
    assert torch.equal(after, before)
