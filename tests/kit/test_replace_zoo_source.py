"""``torchkiln.replace``: mutants of forwards that are rewritten from their source."""

from __future__ import annotations

import pytest
import torch
from replace_zoo import source
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.patch.formula import gated, linear
from torchkiln.patch.source import residual, shared

PARTS = 20


def with_torchs_numbers(x: Tensor, to: Tensor, p: float) -> Tensor:
    """dropout_add with torch's random numbers, which differ from the op's."""
    return F.dropout(x, p) + to


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats layers of any size as wide, and dropouts draw the masks of torch.

    Gated units are not searched, because the search would run a mutant's effects.
    """
    monkeypatch.setattr(gated, "find", lambda _: None)
    monkeypatch.setattr(linear, "LEAST_SIZE", 1)
    monkeypatch.setattr(shared, "LEAST_INPUT", 1)
    monkeypatch.setattr(residual, "dropout_add", with_torchs_numbers)
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("index", range(len(source.FORWARDS)))
def test_the_forwards_are_rewritten(index: int) -> None:
    """Every template is rewritten and has the same results."""
    body = "\n".join(source.FORWARDS[index])
    plain = source.Mutant(-1 - index, body, "nothing", "log", ("norm", "fc"))
    assert not source.check(plain)
    model = plain.cls()("log", "norm", "fc").double()
    assert torchkiln.replace(model)[""].changed


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_compute_what_the_original_does(part: int, request: pytest.FixtureRequest) -> None:
    """A run has a tenth of the mutants, another tenth each day; all with ``--full``."""
    config = request.config
    tenth = config.option.day % 10
    seeds = range(part, source.COUNT, PARTS)
    chosen = seeds if config.option.full else seeds[tenth::10]
    failed = [found for seed in chosen if (found := source.check(source.mutant(seed)))]
    assert not failed, "\n\n".join(failed)
