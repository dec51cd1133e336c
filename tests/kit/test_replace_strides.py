"""The proofs that a model of images does not depend on strides, and the calls that they accept."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln import nn as ours
from torchkiln.patch import trial
from torchkiln.patch.graph import channels_last
from torchkiln.patch.graph.results import FACT, MODULES, NAMES


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which channels_last is faster."""
    monkeypatch.setattr(trial, "seconds_of_model", lambda _, __, f: [2.0, *(1.9 for _ in f[1:]), 1])
    monkeypatch.setattr(trial.Trial, "times", lambda *_: [2.0, 1.0])
    torch.manual_seed(0)


class Net(nn.Module):
    """A convolution, and a function of the module and its result."""

    def __init__(self, rest: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.flatten, self.calls = nn.Flatten(), 0
        self.rest = rest

    def forward(self, x: Tensor) -> Any:
        return self.rest(self, self.conv(x))


def reason_of(net: nn.Module, x: Tensor | None = None) -> str:
    """The reason of the report not to change a net; "" if it was changed."""
    x = torch.randn(2, 3, 6, 5) if x is None else x
    report = torchkiln.replace(net.eval(), example=x, only="channels_last")
    (row,) = (row for row in report.rows if row.kind == "channels_last")
    assert row.changed == (not row.reason)
    return row.reason


def changed_after_a_view(net: Any, y: Tensor) -> Any:
    flat = y.flatten(1)
    net.relu(y)
    return flat + 1


def changed_view(net: Any, y: Tensor) -> Any:
    net.relu(net.flatten(y))
    return y + 1


def changed_view_that_is_last(net: Any, y: Tensor) -> Any:
    return net.relu(net.flatten(y)) + 1


def changed_before_a_view(net: Any, y: Tensor) -> Any:
    net.relu(y)
    return net.flatten(y) + 1


def copied(_: Any, y: Tensor) -> Any:
    z = y.contiguous().view(y.size(0), -1)
    z += 1
    return y.mean((2, 3)) + z.mean()


def branch(_: Any, y: Tensor) -> Any:
    return y.reshape(-1) if len(y.shape) > 2 and y.shape[0] > 1 else y


def counted(net: Any, y: Tensor) -> Any:
    net.calls += 1
    return y + 1


def tried(_: Any, y: Tensor) -> Any:
    try:
        return y.view(y.size(0), -1)
    except RuntimeError:
        return y.sum()


def whatever(y: Tensor) -> Tensor:
    return y.view(y.size(0), -1)


def stable(_: Any, y: Tensor) -> Any:
    n, c, h, w = y.shape
    z = y.permute(0, 2, 3, 1).reshape(n, h * w, c).contiguous().view(n, -1).view((n, h * w * c))
    return F.relu(z, inplace=True) * y.new_ones(()) + y.size(0)


def kept(_: Any, y: Tensor) -> Any:
    KEPT.append(1)
    return y + 1


KEPT: list[int] = []
LAST = torch.channels_last


REFUSED: dict[Callable[[Any, Tensor], Any], str] = {
    lambda _, y: y.view(y.size(0), -1): "view may depend on strides",
    lambda _, y: whatever(y): "view may depend on strides",
    lambda _, y: y.data + 1: "data may depend on strides",
    lambda _, y: y.as_strided((2, 2), (1, 1)): "as_strided may depend on strides",
    lambda _, y: torch.as_strided(y, (2, 2), (1, 1)): "as_strided may depend on strides",
    lambda _, y: y * y.stride(0): "stride may depend on strides",
    lambda _, y: y * y.is_contiguous(): "it reads is_contiguous",
    lambda _, y: y.topk(2).indices: "topk may depend on strides",
    lambda _, y: torch.cumsum(y, 1): "cumsum may depend on strides",
    lambda _, y: torch.cumsum(y.contiguous(), 1): "cumsum may depend on strides",
    lambda _, y: y.contiguous().view(torch.int32).float(): "view may depend on strides",
    lambda _, y: F.relu(y.contiguous()).view(-1): "view may depend on strides",
    # images of 1 pixel in channels_last are contiguous, and their enlarged copies are not
    lambda _, y: F.interpolate(F.avg_pool2d(y, 5).contiguous(), size=2).view(-1): "view may depend",
    lambda _, y: y + y.to(memory_format=LAST).add_(5): "the memory_format of to may depend",
    lambda _, y: y.contiguous(memory_format=LAST): "the memory_format of contiguous may depend",
    lambda _, y: torch.zeros_like(y, memory_format=LAST): "the memory_format of zeros_like",
    lambda _, y: y + torch.add(y.new_ones(()), y.ravel(), out=y.ravel()).sum(): "add writes into",
    changed_view: "it changes a tensor in place that may be a view",
    changed_after_a_view: "it changes a tensor in place that may be a view",
    copied: "it changes a tensor in place that may be a view",
    lambda _, y: (y, y): "it returns views of one tensor",
    lambda _, y: [y, {"flat": y.flatten(1)}]: "it returns views of one tensor",
    lambda _, y: y.permute(0, 2, 3, 1): "its results are no contiguous tensors",
    lambda _, y: (y + 1, "text"): "its results are no contiguous tensors",
    branch: "cannot be traced",
    kept: "cannot be traced: it calls list.append",
    counted: "cannot be traced: it sets calls",
    tried: "cannot be traced",
    lambda _, y: y.numpy(): "numpy may depend on strides",
    lambda _, y: y + 1 if y.is_contiguous() else y: "cannot be traced",
}


@pytest.mark.parametrize("rest", REFUSED)
def test_what_may_depend_on_strides_is_refused(rest: Any) -> None:
    assert REFUSED[rest] in reason_of(Net(rest))


def collected(_: Any, y: Tensor) -> Any:
    found = [y]
    for _ in range(2):
        found.append(F.relu(torch.cat(found, 1)))
    return torch.cat(found, 1)


def scripted(_: Any, y: Tensor) -> Any:
    is_seen = torch.jit.is_scripting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return y.view(-1) if is_seen else y + 1


ACCEPTED: tuple[Callable[[Any, Tensor], Any], ...] = (
    stable,
    collected,
    scripted,
    changed_before_a_view,
    changed_view_that_is_last,
    lambda _, y: (y + 1, [y.mean((2, 3)), None]),
    lambda _, y: y.contiguous().view(y.shape) * y.float(),
)


@pytest.mark.parametrize("rest", ACCEPTED)
def test_what_does_not_is_accepted(rest: Any) -> None:
    net, x = Net(rest), torch.randn(2, 3, 6, 5)
    right = net(x.clone())
    assert reason_of(net) == ""
    torch.testing.assert_close(net(x), right)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (lambda _, y: y.as_strided((2, 7), (7, 1)), "its results differ"),
        (lambda _, y: y.view(y.size(0), -1), "it raised RuntimeError: view size"),
        (lambda _, y: torch.cumsum(y, 1), ""),
    ],
)
def test_results_are_compared(rest: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is in the list by mistake has other results, or raises."""
    monkeypatch.setattr(channels_last, "why_not_free", lambda *_: "")
    found = reason_of(Net(rest))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


class OnArgument(Net):
    """A net that changes its argument."""

    def forward(self, x: Tensor) -> Any:
        return self.conv(self.relu(x))


class Optional(Net):
    """A net with an optional argument."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.conv(x) * scale


class Unused(Net):
    """A net whose convolution runs on other values."""

    def forward(self, x: Tensor) -> Any:
        return self.conv(self.conv.weight[:, :, :, :].detach()) + x.mean()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OnArgument, "it changes an argument in place"),
        (Optional, "its forward has optional arguments"),
        (Unused, "no convolution of its arguments"),
    ],
)
def test_forwards(cls: type[Net], reason: str) -> None:
    assert reason_of(cls(lambda *_: None)) == reason


def with_hook(net: Any) -> None:
    net.conv.register_forward_pre_hook(lambda *_: None)


def with_weight_norm(net: Any) -> None:
    nn.utils.parametrizations.weight_norm(net.conv)


class Special(nn.Parameter):
    """A parameter of another class."""


def with_special_weight(net: Any) -> None:
    net.conv.weight = Special(net.conv.weight.detach())


def with_forward(net: Any) -> None:
    net.conv.forward = net.conv.forward


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hook, "conv has hooks"),
        (with_weight_norm, "conv has parametrizations"),
        (with_special_weight, "its parameters are tensors of another class"),
        (with_forward, "a forward is an attribute of the instance"),
    ],
)
def test_changed_modules(change: Callable[[nn.Module], None], reason: str) -> None:
    net = Net(lambda _, y: y + 1)
    change(net)
    assert reason in reason_of(net)


def test_registered_forwards() -> None:
    """The function of a user may depend on strides."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), Doubled())
    torchkiln.replace.register(Doubled, doubled, inputs=lambda _: torch.ones(4).double())
    try:
        x = torch.randn(2, 3, 6, 5)
        report = torchkiln.replace(net, example=x, only=["registered", "channels_last"])
    finally:
        torchkiln.replace.unregister(Doubled)
    assert report["channels_last"].reason == "a registered forward may depend on strides"
    assert report["2"].changed
    assert reason_of(nn.Sequential(net)) == "a registered forward may depend on strides"


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def doubled(_: nn.Module, x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, 6, 5),
        torch.ones(2, 6, 5, 3).permute(0, 3, 1, 2),
        (torch.ones(2, 3, 6, 5),) * 2,
    ],
)
def test_other_examples(x: Any) -> None:
    net = Two() if isinstance(x, tuple) else Net(lambda _, y: y + 1)
    assert reason_of(net, x) == (
        "" if isinstance(x, tuple) else "its arguments are no contiguous images"
    )


class Two(nn.Module):
    """A net of two images and a conversion of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.conv(x) * self.conv(y)
        return z


SIZES: dict[type[nn.Module], tuple[Any, ...]] = {
    **dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d), (4, 6, 3)),
    **dict.fromkeys((nn.Linear, ours.Linear), (6, 3)),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, ours.LayerNorm, ours.RMSNorm), (6,)),
    **dict.fromkeys((nn.GroupNorm, ours.GroupNorm), (2, 4)),
    **dict.fromkeys((nn.BatchNorm2d, nn.InstanceNorm2d, ours.BatchNormAct2d), (4,)),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), (2,)),
    **dict.fromkeys((nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d), (1,)),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), (7,)),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, ours.Softmax, ours.LogSoftmax), (1,)),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle), (2,)),
    nn.ConstantPad2d: (1, 2.0),
    nn.Unflatten: (1, (2, 2)),
}
OTHER_RANKS = {nn.BatchNorm1d, nn.SyncBatchNorm, ours.BatchNormAct1d, ours.SyncBatchNormAct}
"""Modules that do not take images, or not on a CPU."""


@pytest.mark.parametrize("cls", [c for cs in MODULES.values() for c in cs if c not in OTHER_RANKS])
def test_modules_do_not_depend_on_strides(cls: type[nn.Module]) -> None:
    module: nn.Module = cls(*SIZES.get(cls, ())).double().eval()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(module(x.to(memory_format=torch.channels_last)), module(x))


CALLS: dict[str, Callable[..., Any]] = {
    "conv2d": lambda f, x: f(x, x[:, :, :3, :3]),
    "conv_transpose2d": lambda f, x: f(x, x[:1].expand(4, -1, -1, -1)),
    "linear": lambda f, x: f(x, x[0, 0]),
    "matmul": lambda f, x: f(x, x),
    "bmm": lambda f, x: f(x[0], x[1]),
    "mm": lambda f, x: f(x[0, 0], x[1, 0]),
    "einsum": lambda f, x: f("nchw,nkhw->nck", x, x),
    "scaled_dot_product_attention": lambda f, x: f(x, x, x),
    "batch_norm": lambda f, x: f(x, x.mean((0, 2, 3)), x.var((0, 2, 3))),
    "group_norm": lambda f, x: f(x, 2),
    "layer_norm": lambda f, x: f(x, (6,)),
    "rms_norm": lambda f, x: f(x, (6,)),
    "max_pool2d": lambda f, x: f(x, 2),
    "avg_pool2d": lambda f, x: f(x, 2),
    "adaptive_avg_pool2d": lambda f, x: f(x, 2),
    "adaptive_max_pool2d": lambda f, x: f(x, 2),
    "interpolate": lambda f, x: f(x, (7, 8)),
    "pad": lambda f, x: f(x, (1, 2, 0, 1)),
    "prelu": lambda f, x: f(x, x[0, :, 0, 0]),
    "softmax": lambda f, x: f(x, 1),
    "log_softmax": lambda f, x: f(x, 1),
    "where": lambda f, x: f(*((x, x > 0) if f is Tensor.where else (x > 0, x)), 2 * x),
    "lerp": lambda f, x: f(x, 2 * x, 0.3),
    "addcmul": lambda f, x: f(x, x, x),
    "cat": lambda f, x: f([x, x], 1),
    "concat": lambda f, x: f([x, x], 1),
    "stack": lambda f, x: f([x, x]),
    "roll": lambda f, x: f(x, 1),
    "flip": lambda f, x: f(x, (1, 2)),
    "repeat": lambda f, x: f(x, 1, 2, 1, 1),
    "tile": lambda f, x: f(x, (2, 1)),
    "mean": lambda f, x: f(x, (2, 3)),
    "amax": lambda f, x: f(x, 1),
    "amin": lambda f, x: f(x, 1),
    "chunk": lambda f, x: f(x, 2, 1),
    "split": lambda f, x: f(x, 2, 1),
    "tensor_split": lambda f, x: f(x, 3, 1),
    "narrow": lambda f, x: f(x, 1, 1, 2),
    "select": lambda f, x: f(x, 1, 1),
    "getitem": lambda f, x: f(x, (slice(None), 1)),
    "unsqueeze": lambda f, x: f(x, 1),
    "transpose": lambda f, x: f(x, 1, 2),
    "swapaxes": lambda f, x: f(x, 1, 2),
    "swapdims": lambda f, x: f(x, 1, 2),
    "permute": lambda f, x: f(x, (0, 2, 3, 1)),
    "movedim": lambda f, x: f(x, 1, 3),
    "unflatten": lambda f, x: f(x, 1, (2, 2)),
    "expand": lambda f, x: f(x[:1], 2, -1, -1, -1),
    "expand_as": lambda f, x: f(x[:1], x),
    "broadcast_to": lambda f, x: f(x[:1], (2, 4, 6, 6)),
    "to": lambda f, x: f(x, torch.float32),
    "type_as": lambda f, x: f(x, x.float()),
    "reshape": lambda f, x: f(x, (8, -1)),
    "flatten": lambda f, x: f(x, 1),
    "pixel_shuffle": lambda f, x: f(x, 2),
    "pixel_unshuffle": lambda f, x: f(x, 2),
    "dropout": lambda f, x: f(x, 0.0, True),
    "dropout2d": lambda f, x: f(x, 0.0),
    "clamp": lambda f, x: f(x, -0.5, 0.5),
    "clamp_": lambda f, x: f(x, -0.5, 0.5),
    "clip": lambda f, x: f(x, -0.5, 0.5),
    "clamp_min": lambda f, x: f(x, 0.1),
    "clamp_max": lambda f, x: f(x, 0.1),
    "hardtanh": lambda f, x: f(x, -0.5, 0.5),
    "pow": lambda f, x: f(x, 2),
    "glu": lambda f, x: f(x, 1),
    "silu_": lambda f, x: f(x, inplace=True) if f is F.silu else f(x),
}
BINARY = """
    add sub mul div truediv true_divide minimum maximum eq ne lt le gt ge
    iadd isub imul itruediv add_ sub_ mul_ div_
"""
POSITIVE = {"sqrt", "rsqrt", "log", "reciprocal"}


@pytest.mark.parametrize(
    "name", [n for result, names in NAMES.items() if result != FACT for n in names.split()]
)
def test_functions_do_not_depend_on_strides(name: str) -> None:
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    x = x.abs() if name in POSITIVE else x
    by_channels = x.to(memory_format=torch.channels_last)
    default: Callable[..., Any] = (
        (lambda f, x: f(x, 2 * x)) if name in BINARY.split() else (lambda f, x: f(x))
    )
    call = CALLS.get(name, default)
    found = 0
    for place in (torch, F, torch._C._nn, operator, Tensor):
        function = getattr(place, name, None)
        if function is None or isinstance(function, torch.dtype):
            continue
        try:
            right = call(function, x.clone())
        except TypeError:  # a private form of a public function
            continue
        again = call(function, by_channels.clone())
        torch.testing.assert_close(again, right)
        found += 1
    assert found
