"""torchkiln.replace of the helpers of the installed TRL."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.patch.formula.recorder import OpNames

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # trl's imports warn
]
HELPERS = ("selective_log_softmax", "entropy_from_logits")


def results(module: Any, logits: Tensor, index: Tensor) -> list[Tensor]:
    """Results and gradients of both helpers."""
    found: list[Tensor] = []
    for name, args in zip(HELPERS, ((logits, index), (logits,)), strict=True):
        y = getattr(module, name)(*args)
        torch.manual_seed(1)
        found += [y.detach(), *torch.autograd.grad(y, logits, torch.randn_like(y))]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_helpers_of_trl_become_the_op(dtype: torch.dtype) -> None:
    """The helpers are replaced in the module that defines them, from which trainers import."""
    from trl.trainer import utils  # noqa: PLC0415 - takes seconds

    logits = (3 * torch.randn(3, 6, 50)).to(dtype).requires_grad_()
    index = torch.randint(50, (3, 6))
    before = [getattr(utils, name) for name in HELPERS]
    expected = results(utils, logits, index)
    report = torchkiln.replace(utils)
    try:
        assert [getattr(utils, name).__wrapped__ for name in HELPERS] == before
        found = results(utils, logits, index)
        # Another temperature was not compared with the op, so the function itself runs.
        hot = utils.selective_log_softmax(logits, index, temperature=2.0)
        assert torch.equal(hot, before[0](logits, index, temperature=2.0))
    finally:
        report.undo()
    assert [getattr(utils, name) for name in HELPERS] == before
    close = 0.02 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        atol = close * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", ["ORPO", "CPO"])
def test_a_trainer_calls_the_op(name: str) -> None:
    """A helper is replaced in the module of a trainer that imports it by name."""
    module = pytest.importorskip(f"trl.experimental.{name.lower()}.{name.lower()}_trainer")
    sums = getattr(module, f"{name}Trainer").get_batch_logps
    logits, labels = torch.randn(2, 7, 50, requires_grad=True), torch.randint(50, (2, 7))
    labels[:, :3] = -100
    results, called = [], []
    for is_replaced in (False, True):
        report = torchkiln.replace(module, dry_run=not is_replaced)
        try:
            with OpNames() as seen:
                found = sums(logits, labels)
        finally:
            report.undo()
        called.append("_logprob_forward" in seen.names)
        results.append((found.detach(), *torch.autograd.grad(found.sum(), logits)))
    assert called == [False, True]
    torch.testing.assert_close(*results)
