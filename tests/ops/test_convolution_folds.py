"""Folding in conv_bn_act: changes that renew it, calls without it, and the notes of explain."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convolutions import close, conv_bn_act, count, exact, layer, notes
from torch import nn

import torchkiln
from torchkiln.ops import _folding

pytestmark = pytest.mark.usefixtures("no_folds")


def change_version(m: Any) -> None:
    with torch.no_grad():
        m.conv.weight.mul_(2)


def change_detached(m: Any) -> None:
    m.bn.bias.detach().add_(1)


def change_running(m: Any) -> None:
    m.bn.running_var.mul_(3)


def change_data(m: Any) -> None:
    for _ in range(2):  # the second may get the memory of the first
        m.conv.weight.data = m.conv.weight.data * 2


def change_bn_data(m: Any) -> None:
    m.bn.weight.data = m.bn.weight.data * 2


def change_eps(m: Any) -> None:
    m.bn.eps = 1.0


def change_by_loading(m: Any) -> None:
    m.load_state_dict(layer(m.conv.weight.device).state_dict())


def change_by_assigning(m: Any) -> None:
    m.load_state_dict(layer(m.conv.weight.device).state_dict(), assign=True)


def change_parameter(m: Any) -> None:
    m.bn.bias = nn.Parameter(torch.randn_like(m.bn.bias))


def change_in_inference_mode(m: Any) -> None:
    with torch.inference_mode():
        m.bn.running_mean.add_(1)


def change_dtype_and_back(m: Any) -> None:
    m.bfloat16().float()


def change_by_a_step(m: Any) -> None:
    for fused in (False, True):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused)
        m(torch.randn(2, 8, 5, 5, device=m.conv.weight.device)).sum().backward()
        with torch.no_grad():
            m(torch.randn(2, 8, 5, 5, device=m.conv.weight.device))
        optimizer.step()
        optimizer.zero_grad()


def change_by_training(m: Any) -> None:
    m.train()(torch.randn(2, 8, 5, 5, device=m.conv.weight.device))
    m.eval()


def change_mode(m: Any) -> None:
    """A change that torch does not count is detected if the mode changes after it."""
    m.conv.weight.data.mul_(2)
    m.eval()


CHANGES = [value for name, value in sorted(globals().items()) if name.startswith("change_")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_every_change_renews_the_fold(device: torch.device, change: Callable[[Any], None]) -> None:
    module = layer(device)
    x = torch.randn(2, 8, 5, 5, device=device)
    with torch.no_grad():
        before = module(x)
        assert count() == 1
    change(module)
    with torch.no_grad():
        found = module(x)
        close(found, exact(module, x))
    assert not torch.equal(found, before)


@torch.no_grad()
def test_a_fold_is_kept_and_freed_with_its_weight(device: torch.device) -> None:
    module = layer(device)
    x = torch.randn(2, 8, 5, 5, device=device)
    module(x)
    (fold,) = _folding.FOLDS.values()
    with torch.inference_mode():
        module(x)
    module(x.clone())
    assert next(iter(_folding.FOLDS.values())) is fold
    assert not fold[1].weight.is_inference()
    other = copy.deepcopy(module)
    assert torch.equal(other(x), module(x))
    assert count() == 2
    assert list(module.state_dict()) == list(other.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
    del fold, module, other
    gc.collect()
    assert not count()


@torch.no_grad()
def test_tensors_can_be_swapped(device: torch.device) -> None:
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    module(x)
    other = layer(device)
    for parameter, new in zip(module.parameters(), other.parameters(), strict=True):
        torch.utils.swap_tensors(parameter, new)
    close(module(x), exact(module, x))


@torch.no_grad()
def test_a_convolution_shared_by_two_batch_norms(device: torch.device) -> None:
    first, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    second = torchkiln.nn.ConvBNAct2d.from_modules(first.conv, layer(device).bn)
    for _ in range(2):
        close(first(x), exact(first, x))
        close(second(x), exact(second, x))
        assert count() == 2
    module = layer(device)
    module(x)
    transposed = module.conv.weight.detach().movedim(2, 3)
    module.conv.weight = nn.Parameter(transposed)  # the same memory in another view
    close(module(x), exact(module, x))


def test_what_is_not_folded(device: torch.device) -> None:
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    assert "gradients are needed" in notes(module, x)[0]
    with torch.no_grad():
        parts = (module.conv.weight.detach(), None, *module.bn.state_dict().values())
        assert "no torch.nn.Parameter" in notes(conv_bn_act, x, *parts[:6])[0]
    with torch.inference_mode():
        made = layer(device)
        assert "inference mode" in notes(made, x)[0]
        close(made(x), exact(made, x))
    assert not count()


@torch.no_grad()
def test_explain_has_the_choice(device: torch.device) -> None:
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    first, note = notes(module, x)
    assert first.startswith("the batch norm is folded in this call")
    assert note.startswith("folded convolution")
    assert notes(module, x) == (note,)
    assert "bn_act" not in "".join(torchkiln.explain(module, x).forward.route)


@pytest.mark.parametrize("by", ["hook", "calls", "undo"])
def test_statistics_of_a_training_step_that_is_not_fused(by: str) -> None:
    """torch's batch norm writes them without a change of their versions."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    plain = copy.deepcopy(model)
    report = torchkiln.fuse(model)
    x = torch.randn(6, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.eval()(x))  # keeps a fold
        for net in (model.train(), plain.train()):
            if by == "calls":
                net[1](net[0](3 * x + 1))
                continue
            if by == "undo" and net is model:
                report.undo()
            hook = net[2].register_forward_hook(lambda *_: None)
            net(3 * x + 1)
            hook.remove()
        if by == "undo":
            torchkiln.fuse(model)
        torch.testing.assert_close(model.eval()(x), plain.eval()(x))
