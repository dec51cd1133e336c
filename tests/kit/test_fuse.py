"""torchkiln.fuse: one call for convolution, batch norm, residual sum and activation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln


class QuickGelu(nn.Module):
    """The formula of Hugging Face's QuickGELUActivation."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class DroppedRelu(nn.Module):
    """A relu with dropout in training, so that only eval mode has an activation to fuse."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(x), 0.5, self.training)


class Block(nn.Module):
    """A residual block as in ResNets: one activation module, called twice, and sums in place."""

    def __init__(self, channels: int, act: Callable[..., nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act = act(inplace=True) if act is nn.ReLU else act()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.drop = nn.Identity()
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        out = self.drop(out)
        out += identity
        return self.act(out)


class Net(nn.Module):
    """A stem, two blocks of which one projects its shortcut, and a head."""

    def __init__(self, act: Callable[..., nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act())
        first, second = Block(8, act), Block(8, act)
        second.downsample = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.layer = nn.Sequential(first, second)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(x)).mean((2, 3)))


class Functional(nn.Module):
    """A batch norm, then a function."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(x))


def example(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 3, 9, 9, dtype=dtype)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs in training and in eval mode, gradients, and the buffers after two steps."""
    model.train()
    for _ in range(2):
        out = model(x)
    grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [out, model.eval()(x), *grads, *buffers]


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, QuickGelu])
def test_results_gradients_and_statistics_stay(act: Callable[..., nn.Module]) -> None:
    model = Net(act).double()
    reference = copy.deepcopy(model)
    report = torchkiln.fuse(model)
    assert [row.name for row in report.changed] == [
        *("stem.1", "layer.0.bn1", "layer.0.bn2", "layer.1.bn1", "layer.1.bn2"),
        "layer.1.downsample.1",
    ]
    assert report["layer.1.downsample.1"].now == "conv_bn_act(none)"
    assert report["layer.0.bn2"].now.endswith(", with the residual)")
    x = example()
    for _ in range(2):  # the second call uses the fold of the first
        torch.testing.assert_close(results(model, x), results(reference, x))
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x))


def test_the_op_is_called_in_place_of_three() -> None:
    model = Net()
    torchkiln.fuse(model)
    x = example(torch.float32)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        model.eval()(x)
    called = {event.name for event in profile.events()}
    assert "torchkiln::bn_act" in called
    assert not called & {"aten::relu", "aten::relu_", "aten::add_"}


@torch.no_grad()
def test_eval_folds_the_batch_norms() -> None:
    model = Net().eval()
    torchkiln.fuse(model)
    x = example(torch.float32)
    model(x)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        model(x)
    called = {event.name for event in profile.events()}
    assert "aten::conv2d" in called
    assert not called & {"torchkiln::bn_act", "aten::batch_norm"}


def test_names_and_classes_stay_and_undo_takes_all_back() -> None:
    model = Net()
    reference = copy.deepcopy(model)
    report = torchkiln.fuse(model)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert isinstance(model.layer[0], Block)
    assert type(model.layer[0]) is not Block
    with pytest.raises(KeyError, match=r"torchkiln\.fuse: report: got 'elsewhere'"):
        report["elsewhere"]
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    x = example(torch.float32)
    assert torch.equal(model.eval()(x), reference.eval()(x))


def test_copies_and_pickles_keep_the_new_forward() -> None:
    model = Net().eval()
    torchkiln.fuse(model)
    x = example(torch.float32)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.layer[0]) is type(model.layer[0])
        assert torch.equal(other(x), model(x))


def test_compiled_without_a_break() -> None:
    model = Net().eval()
    torchkiln.fuse(model)
    x = example(torch.float32)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_channels_last_stays() -> None:
    model = Net().eval()
    torchkiln.fuse(model)
    x = example(torch.float32).contiguous(memory_format=torch.channels_last)
    assert model.stem(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("after", "act"),
    [
        *((torch.relu, "relu"), (F.relu, "relu"), (lambda y: y.relu_(), "relu")),
        *((F.silu, "silu"), (torch.sigmoid, "sigmoid"), (lambda y: y.tanh(), "tanh")),
        (lambda y: F.relu(y, inplace=True), "relu"),
    ],
)
def test_functions_are_found(after: Callable[[Tensor], Tensor], act: str) -> None:
    model = Functional(after).double()
    reference = copy.deepcopy(model)
    assert torchkiln.fuse(model)["norm"].now == f"bn_act({act})"
    x = torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(x))


@pytest.mark.parametrize(
    ("after", "act"),
    [
        *((nn.GELU("tanh"), "gelu_tanh"), (QuickGelu(), "quick_gelu")),
        *((torchkiln.nn.ReLU2(), "relu2"), (nn.Threshold(0, 0), "relu")),
    ],
)
def test_modules_are_found_by_formula(after: nn.Module, act: str) -> None:
    model = Functional(after).double()
    reference = copy.deepcopy(model)
    assert torchkiln.fuse(model)["norm"].now == f"bn_act({act})"
    x = torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(x))


def with_flag(y: Tensor) -> Tensor:
    return torch.relu(y) if y.sum() > 0 else y


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (lambda y: torch.relu(y) + y, "its output is used more than once"),
        (lambda y: y.exp(), "no activation follows"),
        (F.leaky_relu, "no activation follows"),
        *(
            (module, "no activation follows")
            for module in (nn.Hardswish(), nn.Dropout(), DroppedRelu())
        ),
        (lambda y: torch.relu(y + 1), "no activation follows"),
        (with_flag, "its forward cannot be traced"),
        (lambda y: torch.relu(y) * torch.ones(6), "its forward makes a tensor"),
    ],
)
def test_others_are_left_alone_with_the_reason(after: Callable[[Tensor], Tensor], why: str) -> None:
    model = Functional(after)
    report = torchkiln.fuse(model)
    assert report["norm"].reason.startswith(why)
    assert type(model) is Functional
    assert set(vars(model)) == set(vars(Functional(after)))


class Training(Functional):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.relu(y) if self.training else torch.tanh(y)


class Optional(Functional):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.relu(self.norm(x)) * scale


class Branch(Functional):
    """A tensor takes the branch that was traced; a list must run the original forward."""

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        return torch.relu(self.norm(x if isinstance(x, Tensor) else torch.cat(x)))


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Training, "its forward depends on training"),
        (Optional, "its forward has optional arguments"),
    ],
)
def test_forwards_that_no_trace_has(cls: type[Functional], why: str) -> None:
    model = cls(torch.relu)
    assert torchkiln.fuse(model)["norm"].reason == why
    assert type(model) is cls


def test_arguments_that_the_trace_does_not_have() -> None:
    model = Branch(torch.relu).eval()
    reference = copy.deepcopy(model)
    assert torchkiln.fuse(model)["norm"].changed
    x = torch.randn(8, 6)
    torch.testing.assert_close(model(x), reference(x))
    assert torch.equal(model([x[:4], x[4:]]), reference([x[:4], x[4:]]))


def test_a_residual_of_another_shape_or_dtype() -> None:
    """The op has no residual that broadcasts or has another dtype, so the three steps run."""

    class Broadcast(Functional):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
            return torch.relu(self.norm(x) + residual)

    model = Broadcast(torch.relu).eval()
    reference = copy.deepcopy(model)
    torchkiln.fuse(model)
    x = torch.randn(8, 6)
    for residual in (torch.randn(6), torch.randn(8, 6, dtype=torch.float64)):
        torch.testing.assert_close(model(x, residual), reference(x, residual))


def test_hooks_run() -> None:
    """A batch norm with a hook is not fused; one that gets a hook later runs as three steps."""
    seen: list[str] = []
    model = Net().eval()
    model.stem[1].register_forward_hook(lambda *_: seen.append("before"))
    report = torchkiln.fuse(model)
    assert report["stem.1"].reason == "it has hooks"
    model.get_submodule("layer.0.bn1").register_forward_hook(lambda *_: seen.append("after"))
    model(example(torch.float32))
    assert seen == ["before", "after"]


class Pair(nn.Module):
    """A convolution and a batch norm; the function ``call`` runs both."""

    def __init__(self, conv: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv, nn.BatchNorm2d(3), nn.ReLU()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def one_after_the_other(m: Any, x: Tensor) -> Tensor:
    return torch.relu(m.norm(m.conv(x)))


def with_another_use(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return torch.relu(m.norm(y)) + y


def with_a_change_between(m: Any, x: Tensor) -> Tensor:
    x = x + 0
    y = m.norm(m.conv(x))
    return torch.relu(y + x.mul_(2))


def twice(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.conv(torch.relu(m.norm(m.conv(x)))))


def used_twice(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x))
    return torch.relu(y) * y


class Own(nn.Conv2d):
    """A convolution that overrides forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def normalized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))


CONVOLUTION, NORM = "conv_bn_act(relu", "bn_act(relu"


@pytest.mark.parametrize(
    ("make", "call", "now"),
    [
        (lambda: nn.Conv2d(3, 3, 1), one_after_the_other, CONVOLUTION),
        (lambda: nn.Conv2d(3, 3, 3, padding="same", groups=3), one_after_the_other, CONVOLUTION),
        (lambda: nn.Conv2d(3, 3, 1), twice, "conv_bn_act(none)"),
        (lambda: nn.Conv2d(3, 3, 1), used_twice, "conv_bn_act(none)"),
        (lambda: nn.Conv2d(3, 3, 1), with_another_use, NORM),
        (lambda: nn.Conv2d(3, 3, 1), with_a_change_between, ""),
        (lambda: nn.ConvTranspose2d(3, 3, 2), one_after_the_other, NORM),
        (lambda: Own(3, 3, 1), one_after_the_other, NORM),
        (normalized, one_after_the_other, NORM),
    ],
)
def test_convolutions(
    make: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor], now: str
) -> None:
    model = Pair(make(), call).double()
    reference = copy.deepcopy(model)
    report = torchkiln.fuse(model)
    assert report["norm"].now.startswith(now)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for training in (True, False, True, False):
        model.train(training)
        reference.train(training)
        torch.testing.assert_close(model(x), reference(x))
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x))
    assert list(model.state_dict()) == list(reference.state_dict())


@torch.no_grad()
def test_hooks_of_a_convolution_run() -> None:
    seen: list[str] = []
    model = Pair(nn.Conv2d(3, 3, 1), one_after_the_other).eval()
    handle = model.conv.register_forward_hook(lambda *_: seen.append("before"))
    x = torch.randn(2, 3, 4, 4)
    report = torchkiln.fuse(model)
    assert report["norm"].now == "bn_act(relu)"
    expected = model(x)
    handle.remove()
    report.undo()
    assert torchkiln.fuse(model)["norm"].now == "conv_bn_act(relu)"
    torch.testing.assert_close(model(x), expected)
    model.conv.register_forward_pre_hook(lambda *_: seen.append("after"))
    torch.testing.assert_close(model(x), expected)
    assert seen == ["before", "after"]


def test_what_the_caller_leaves_alone() -> None:
    model = Net()
    report = torchkiln.fuse(model, skip=["layer.0.*"])
    assert report["layer.0.bn1"].reason == "skip"
    assert type(model.layer[0]) is Block
    assert type(model.layer[1]) is not Block
    report.undo()
    torchkiln.fuse(model, skip=["layer.1.bn1"])
    x = example(torch.float32)
    reference = copy.deepcopy(model)
    report = torchkiln.fuse(model, dry_run=True)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    assert torch.equal(model.eval()(x), reference.eval()(x))
    assert "to replace (dry run)" in str(report)


class Moved(nn.Module):
    """A convolution whose input is changed in place before the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.conv(x)
        x += 1
        return self.norm(y) * x


def test_a_convolution_is_not_moved_behind_a_change_of_its_input() -> None:
    model = Moved().double()
    x = example()
    expected = copy.deepcopy(model)(x)
    report = torchkiln.fuse(model)
    assert report["norm"].reason == "a call before it may change its input"
    torch.testing.assert_close(model(x), expected)
