"""torchkiln's modules behave as those of torch.nn."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import torchkiln
from torchkiln import jit
from torchkiln.ops.matmul import matmul


def test_bias_act_is_the_function(device: torch.device) -> None:
    layer = torchkiln.nn.BiasAct(5, scale=0.3, device=device)
    x = torch.randn(2, 7, 5, device=device)
    with torch.no_grad():
        layer.bias.normal_()
    assert torch.equal(layer(x), torchkiln.bias_act(x, layer.bias, scale=0.3))


def test_parameters(device: torch.device) -> None:
    layer = torchkiln.nn.BiasAct(5, device=device, dtype=torch.bfloat16)
    assert list(layer.state_dict()) == ["bias"]
    assert layer.bias.requires_grad
    assert layer.bias.dtype == torch.bfloat16
    assert layer.bias.device == device
    assert layer.bias.tolist() == [0.0] * 5
    assert list(layer.buffers()) == []


def test_default_scale_is_one() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(torchkiln.nn.BiasAct(4)(x), torch.relu(x))


def test_repr_tells_the_arguments() -> None:
    assert repr(torchkiln.nn.BiasAct(4, scale=0.5)) == "BiasAct(4, act='relu', scale=0.5)"


def test_meta_then_materialised() -> None:
    """A module can be made on meta, moved to empty memory, and loaded, as large models are."""
    layer = torchkiln.nn.BiasAct(4, device="meta")
    assert layer(torch.empty(3, 4, device="meta")).shape == (3, 4)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict({"bias": torch.arange(4.0)})
    assert layer(torch.zeros(1, 4)).tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_training_is_that_of_plain_torch(device: torch.device) -> None:
    """A training with BiasAct has the losses of one whose linear layer adds the bias."""
    torch.manual_seed(0)
    fused = nn.Sequential(
        nn.Linear(8, 16, bias=False), torchkiln.nn.BiasAct(16), nn.Linear(16, 3)
    ).to(device)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    first, layer, last = (fused[i].state_dict() for i in range(3))
    plain[0].load_state_dict({**first, **layer})
    plain[2].load_state_dict(last)
    x = torch.randn(64, 8, device=device)
    y = x[:, :3].argmax(1)
    losses = []
    for model in (fused, plain):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        steps = []
        for _ in range(30):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimiser.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_wrong_width_names_the_argument() -> None:
    with pytest.raises(RuntimeError, match=r"bias: got shape \[4\], expected \[5\]"):
        torchkiln.nn.BiasAct(4)(torch.ones(2, 5))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, torchkiln.nn.Linear])
def test_a_pruned_layer_is_copied_as_torchs(kind: type[nn.Linear], recorded: bool) -> None:
    """A pruned weight is the result of an op: deepcopy fails as torch's, if that was recorded."""
    layer = kind(4, 3)
    prune.l1_unstructured(layer, "weight", 0.5)
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(recorded):
        layer(x)
    if recorded:
        with pytest.raises(RuntimeError, match="deepcopy protocol"):
            copy.deepcopy(layer)
    else:
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize("name", ["ReLU", "SiLU", "GELU", "Sigmoid", "Tanh", "CrossEntropyLoss"])
def test_modules_are_instances_of_torchs(name: str) -> None:
    """Modules are instances of torch's classes, so code that checks classes works."""
    ours, theirs = getattr(torchkiln.nn, name), getattr(nn, name)
    assert isinstance(ours(), theirs)
    assert vars(ours()).keys() >= vars(theirs()).keys()


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_modules_are_instances_of_torchs(name: str) -> None:
    ours, theirs = getattr(torchkiln.nn, name)(1), getattr(nn, name)(1)
    assert isinstance(ours, type(theirs))
    x = torch.randn(2, 3)
    torch.testing.assert_close(ours(x), theirs(x))


def test_linear_takes_torchs_positional_arguments() -> None:
    """Device and dtype may follow bias by position, as in torch; act and scale are keywords."""
    for device in ("cpu", torch.device("meta"), None):
        layer = torchkiln.nn.Linear(3, 4, True, device, torch.float64)
        theirs = nn.Linear(3, 4, True, device, torch.float64)
        assert (layer.weight.device, layer.weight.dtype) == (theirs.weight.device, torch.float64)
        assert (layer.act, layer.scale) == ("none", 1.0)
    layer = torchkiln.nn.Linear(3, 4, False, act="gelu", scale=2.0)
    assert (layer.act, layer.scale) == ("gelu", 2.0)
    assert layer.bias is None


def test_modules_refuse_bad_settings_when_made() -> None:
    expected = "act: got 'swish', expected one of none, square, relu"
    with pytest.raises(ValueError, match=f"torchkiln.nn.Linear: {expected}"):
        torchkiln.nn.Linear(3, 4, act="swish")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"torchkiln.nn.BiasAct: {expected}"):
        torchkiln.nn.BiasAct(3, act="swish")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.RMSNorm: round: got 'up', expected one of once"):
        torchkiln.nn.RMSNorm(8, round="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.LayerNorm: eps: got -1.0, expected a number of at"):
        torchkiln.nn.LayerNorm(8, -1.0)
    with pytest.raises(ValueError, match=r"nn\.CrossEntropyLoss: reduction: got 'average', expe"):
        torchkiln.nn.CrossEntropyLoss(reduction="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.LinearCrossEntropyLoss: reduction: got 'average'"):
        torchkiln.nn.LinearCrossEntropyLoss(3, 4, reduction="average")  # type: ignore[arg-type]
    for make in (torchkiln.nn.DropoutAdd, partial(torchkiln.nn.BiasDropoutAdd, 3)):
        with pytest.raises(ValueError, match=r"p: got 1.5, expected a probability"):
            make(1.5)


def test_flops_of_products_are_counted() -> None:
    """FlopCounterMode counts the products of forward and backward, as for torch's linear."""
    x, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    totals = []
    for call in (
        lambda: nn.functional.linear(x, weight),
        lambda: torchkiln.linear(x, weight),
        lambda: torchkiln.linear(x, weight, act="gelu"),
        lambda: matmul(x, weight.T),
    ):
        with FlopCounterMode(display=False) as counter:
            call()  # type: ignore[no-untyped-call]
        totals.append(counter.get_total_flops())
    assert totals == [2 * 2 * 5 * 3 * 4] * 4
    with FlopCounterMode(display=False) as counter:
        torchkiln.linear(x, weight, act="gelu").sum().backward()
    assert counter.get_total_flops() == 3 * totals[0]


@pytest.mark.parametrize("first", ["torchkiln", "torch.utils.flop_counter"])
def test_flops_are_counted_whatever_is_imported_first(first: str) -> None:
    """FLOPs are counted in either order of import; torchkiln does not import torch's counter."""
    code = f"""
import sys, {first}
import torch, torchkiln
assert ("torch.utils.flop_counter" in sys.modules) == ({first!r} != "torchkiln")
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torchkiln.linear(torch.ones(3, 4), torch.ones(5, 4))
    torchkiln.ops.matmul.matmul(torch.ones(3, 4), torch.ones(4, 5))
assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5
assert "torch.utils.flop_counter" not in [getattr(finder, "name", "") for finder in sys.meta_path]
"""
    given = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inductor_prints_no_arguments_of_ops_of_the_kit() -> None:
    """torch 2.11 prints them in each compilation: a time that doubles with each layer."""
    exc = importlib.import_module("torch._inductor.exc")

    class Argument:
        def __str__(self) -> str:
            raise AssertionError("printed")

    text = exc.MissingOperatorWithoutDecomp.operator_str
    made = jit.op("of_kit::twice(Tensor x) -> Tensor", torch.add, reference=lambda x: x * 2)
    backward = torch.ops.of_kit.twice_backward.default
    ops = torch.ops.torchkiln
    for op in (ops.relu2.default, ops._norm_backward.default, made.overload, backward):
        assert text(op, [Argument()], {}) == f"  target: {op}"
    torch.library.define("of_kit::other", "(Tensor x) -> Tensor")
    for other in (torch.ops.aten.relu.default, torch.ops.of_kit.other.default):
        with pytest.raises(AssertionError, match="printed"):
            text(other, [Argument()], {})
    assert "args[0]: 3" in text(torch.ops.aten.relu.default, [3], {})


@pytest.mark.parametrize(
    "make",
    [
        partial(torchkiln.nn.LayerNorm, 8),
        partial(torchkiln.nn.RMSNorm, 8),
        partial(torchkiln.nn.GroupNorm, 2, 8),
        partial(torchkiln.nn.GatedRMSNorm, 8),
        partial(torchkiln.nn.BatchNormAct2d, 8),
        partial(torchkiln.nn.SyncBatchNormAct, 8),
        partial(torchkiln.nn.Attention, 8, 2),
    ],
)
@pytest.mark.parametrize("eps", [-1e-6, "a"])
def test_an_eps_is_refused_at_once(make: partial[nn.Module], eps: object) -> None:
    name = make.func.__name__
    expected = rf"torchkiln\.nn\.{name}: eps: got {eps!r}, expected a number of at least 0"
    with pytest.raises(ValueError, match=expected):
        make(eps=eps)
