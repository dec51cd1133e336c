"""``torchkiln.replace(model, example=batch)`` computes convolutions in ``channels_last``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import torchkiln
from torchkiln.patch import forms, trial
from torchkiln.patch.graph.batch_norm import FusedForward
from torchkiln.patch.graph.channels_last import ChannelsLast
from torchkiln.patch.graph.unchanged import KEPT
from torchkiln.patch.plan import plan_of
from torchkiln.patch.replacing import KINDS
from torchkiln.patch.trial import MODEL_SLOWER, SLOWER
from torchkiln.typing import Kind

ROW: Kind = "channels_last"


class Block(nn.Module):
    """A residual block with a gate of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=2)
        self.gate = nn.Conv2d(channels, channels, 1)
        self.relu = nn.ReLU(inplace=True)
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out = out * torch.sigmoid(self.gate(out.mean((2, 3), keepdim=True)))
        out += x if self.rate == 0.0 else self.rate * x
        return self.relu(out)


class Net(nn.Module):
    """A stem with a pool, two blocks, branches that are joined, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.mix, self.norm = nn.Conv2d(16, 8, 1), nn.GroupNorm(2, 8)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        a, b = x.chunk(2, dim=1)
        x = self.norm(self.mix(torch.cat((F.gelu(a), b, F.avg_pool2d(x, 3, 1, 1)), 1)))
        x = F.interpolate(F.pad(x, (1, 1)), scale_factor=2)
        x = F.adaptive_avg_pool2d(x.permute(0, 2, 3, 1).permute(0, 3, 1, 2), 1)
        y: Tensor = self.head(self.drop(torch.flatten(x, 1)))
        return y


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which the last form of a model is the fastest, and modules are not timed."""
    monkeypatch.setattr(
        trial, "seconds_of_model", lambda _, __, f: [2.0, *(1.9 for _ in f[1:]), 1.0]
    )
    monkeypatch.setattr(trial.Trial, "times", lambda *_: [2.0, 1.0])


def images(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 12, 10, generator=generator, dtype=dtype).to(device)


def replaced(model: nn.Module, **options: Any) -> torchkiln.patch.Report:
    return torchkiln.replace(model, example=images(), only=ROW, **options)


class Strides(TorchFunctionMode):
    """Records whether the inputs of convolutions are in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[bool] = []

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d:
            self.last.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return func(*args, **(kwargs or {}))


def runs_by_channels(model: nn.Module, *args: Any, **options: Any) -> bool:
    """Whether a call of a model runs its first convolutions in channels_last."""
    with Strides() as strides:
        model(*args, **options)
    return all(strides.last[:3])


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result, gradients and buffers of a training step, then the result in eval mode."""
    model.zero_grad()
    y = model.train()(x)
    y.sin().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = [y, *grads, *(b.clone() for b in model.buffers())]
    with torch.no_grad():
        return [*found, model.eval()(x)]


@pytest.mark.parametrize("kinds", [ROW, KINDS])
def test_a_net_computes_the_same(kinds: Any, device: torch.device) -> None:
    model = Net().to(device, torch.float64)
    twin = copy.deepcopy(model)
    x = images(device)
    report = torchkiln.replace(model, example=x, only=kinds)
    assert report[ROW].outcome == "replaced"
    assert report[ROW].was == "Net"
    model.zero_grad()
    single = copy.deepcopy(model).float()  # in float64 results of cuDNN are contiguous
    assert runs_by_channels(single, x.float())
    found, right = outcome(model, x), outcome(twin, x)
    torch.testing.assert_close(found, right)
    assert [y.stride() for y in found] == [y.stride() for y in right]
    model.train()(x)
    twin.train()(x)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert KEPT not in vars(model)
    assert not runs_by_channels(model, x)


def test_images_with_a_gradient() -> None:
    """The gradient of an image is contiguous, as without."""
    model = Net().double().eval()
    twin = copy.deepcopy(model)
    assert replaced(model)[ROW].changed
    x = images().requires_grad_()
    scaled = 2 * x
    grads = [
        torch.autograd.grad(m(scaled).sum(), (x, scaled), retain_graph=True) for m in (model, twin)
    ]
    torch.testing.assert_close(*grads)
    assert [g.stride() for g in grads[0]] == [g.stride() for g in grads[1]]
    assert torch.autograd.gradcheck(
        model, (x[:1, :, :6, :6].detach().contiguous().requires_grad_(),)
    )


def saved(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


def chain() -> nn.Module:
    """A model whose own forward is fused, too."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("kinds", [ROW, KINDS])
@pytest.mark.parametrize("make", [Net, chain])
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copies_and_pickles(kinds: Any, make: Any, copied: Callable[[Any], Any]) -> None:
    model = make().double().eval()
    report = torchkiln.replace(model, example=images(), only=kinds)
    plan = plan_of(model)
    assert isinstance(plan, ChannelsLast)
    is_fused = make is chain and kinds is KINDS
    assert isinstance(plan.inner, FusedForward) == is_fused
    assert not is_fused or report["1"].now == "conv_bn_act(relu)"
    with torch.no_grad():
        right = model(images())
        again = copied(model)
        assert vars(again)[KEPT] is None
        assert runs_by_channels(again, images())
        assert torch.equal(again(images()), right)
    assert plan_of(again) == plan_of(model)
    assert list(again.state_dict()) == list(make().state_dict())
    report.undo()
    assert type(model) is type(make())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_gets_the_original_forward(backend: str) -> None:
    model = Net().double().eval()
    replaced(model)
    right = model(images())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(images()), right)
    program = torch.export.export(model, (images(),))
    torch.testing.assert_close(program.module()(images()), right)


class Features(nn.Module):
    """Convolutions, then a call that depends on strides."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.head = nn.Linear(4 * 8 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.features(x).view(len(x), -1))
        return y


def test_the_largest_part_that_has_a_proof() -> None:
    model = Features().double()
    twin = copy.deepcopy(model)
    report = replaced(model)
    assert report["features.channels_last"].changed
    assert ROW not in report
    torch.testing.assert_close(outcome(model, images()), outcome(twin, images()))
    assert model.features(images()).is_contiguous()
    assert runs_by_channels(model, images())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"skip": [ROW]}, "skip"),
        ({"skip": ["", "stem"]}, "skip"),
        ({"skip": lambda name, _: name == ROW}, "skip"),
        ({}, ""),
    ],
)
def test_skip(options: Any, reason: str) -> None:
    assert replaced(Net().double(), **options)[ROW].reason == reason


def test_options() -> None:
    model = Net().double()
    dry = replaced(model, dry_run=True)
    assert dry[ROW].outcome == "would replace"
    assert type(model) is Net
    for options in ({"exact": True}, {"only": ["norm", "batch_norm"]}):
        assert ROW not in torchkiln.replace(model, example=images(), **options)
    assert ROW not in torchkiln.replace(model)  # no example
    assert ROW not in torchkiln.replace(nn.Sequential(nn.Linear(4, 4)), example=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("options", "got"),
    [({}, "without example"), ({"example": images(), "exact": True}, "with exact=True")],
)
def test_the_kind_alone_needs_a_trial(options: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"only: got 'channels_last' {got}, expected an example"):
        torchkiln.replace(Net().double(), only=ROW, **options)


@pytest.mark.parametrize(
    ("seconds", "kept"), [([2.0, 2.1], False), ([2.0, 1.99], False), ([2.0, 1.9], True)]
)
def test_the_time_of_the_model_decides(
    seconds: list[float], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "seconds_of_model", lambda *_: seconds)
    model = Net().double()
    report = replaced(model)
    row = report[ROW]
    assert row.changed is kept
    assert row.reason == ("" if kept else forms.NOT_FASTER)
    assert [row.seconds_was, row.seconds_now] == seconds
    assert (type(model) is Net) is not kept
    assert kept or KEPT not in vars(model)
    assert (report.seconds_now is not None) is kept


@pytest.mark.parametrize(
    ("seconds", "changed"),
    [
        ([3.0, 2.0, 1.9], {"blocks.0.norm1", ROW}),
        ([3.0, 2.0, 2.1], {"stem.1"}),
        ([1.0, 2.0, 3.0], ()),
    ],
)
def test_modules_are_tried_in_both_layouts(
    seconds: list[float], changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each form keeps the modules that are faster in it; the rows are those of the chosen form."""

    def times(_: Any, module: nn.Module, given: Any) -> list[float]:
        by_channels = not given.args[0].is_contiguous()
        wins = isinstance(module, Block) if by_channels else isinstance(module, nn.Sequential)
        return [2.0, 1.0] if wins else [1.0, 2.0]

    monkeypatch.setattr(trial.Trial, "times", times)
    monkeypatch.setattr(trial, "seconds_of_model", lambda *_: seconds)
    model = Net().double()
    report = torchkiln.replace(model, example=images(), only=["batch_norm", ROW])
    names = {row.name for row in report.changed}
    assert set(changed) <= names
    assert names <= {"stem.1", *(f"blocks.{i}.norm{k}" for i in (0, 1) for k in (1, 2)), ROW}
    assert ("stem.1" in names) == ("stem.1" in changed)
    assert all(not row.reason for row in report.changed)
    kept = [row for row in report.rows if not row.changed and row.kind in ("batch_norm", ROW)]
    reasons = {row.name: row.reason for row in kept}
    assert reasons.pop(ROW, forms.NOT_FASTER) == forms.NOT_FASTER
    if seconds[1] > seconds[0]:
        assert reasons.pop("stem.1") == MODEL_SLOWER
    assert set(reasons.values()) == {SLOWER}
    state = copy.deepcopy(model.state_dict())
    report.undo()
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_a_trial_with_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms run on the real clock, in training with backward, and leave no trace."""
    monkeypatch.undo()
    monkeypatch.setattr(trial, "MODEL_BUDGET", 0.01)
    monkeypatch.setattr(trial, "BUDGET", 0.001)
    model = Net().double()
    state = copy.deepcopy(model.state_dict())
    report = torchkiln.replace(model, example=images(), dry_run=True, only=KINDS)
    assert report[ROW].seconds_now is not None
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert not any(hasattr(type(m), "_kiln_plan") for m in model.modules())


def hooked(model: Any) -> None:
    model.blocks[1].conv2.register_forward_hook(lambda _, __, y: y.view(-1).view(y.shape))


def hooked_anew(model: Any) -> None:
    model.mix._forward_hooks = type(model.mix._forward_hooks)()
    model.mix.register_forward_hook(lambda _, __, y: y.view(-1).view(y.shape))


def other_attribute(model: Any) -> None:
    model.blocks[0].rate = 0.5


def other_class(model: Net) -> None:
    class Flat(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.view(-1).view(input.shape))

    model.mix.__class__ = Flat


def other_child(model: Net) -> None:
    torch.manual_seed(5)
    model.blocks.append(Block(8).double().eval())


def other_forward(model: Any) -> None:
    forward = model.mix.forward
    model.mix.forward = lambda x: forward(x.view(-1).view(x.shape))


def mixed(model: Net) -> None:
    model.blocks[0].train()


def in_place(model: Any) -> None:
    model.stem[2].inplace = True


CHANGES = (
    hooked,
    hooked_anew,
    other_attribute,
    other_class,
    other_child,
    other_forward,
    mixed,
    in_place,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_as_before(change: Callable[[Net], None]) -> None:
    model = Net().double().eval()
    twin = copy.deepcopy(model)
    replaced(model)
    assert runs_by_channels(model, images())
    for one in (model, twin):
        change(one)
    torch.testing.assert_close(model(images()), twin(images()))
    assert not runs_by_channels(model, images())


def test_a_removed_hook_and_a_global_one() -> None:
    model = Net().double().eval()
    replaced(model)
    hook = model.mix.register_forward_pre_hook(lambda *_: None)
    assert not runs_by_channels(model, images())
    hook.remove()
    assert runs_by_channels(model, images())
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not runs_by_channels(model, images())
    hook.remove()


class Special(Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3),
        lambda x: x.as_subclass(Special),
        lambda x: x[0],
    ],
)
def test_other_arguments_run_as_before(given: Callable[[Tensor], Tensor]) -> None:
    model = Net().double().eval()
    twin = copy.deepcopy(model)
    replaced(model)
    x = given(images())
    if x.dim() == 4:
        torch.testing.assert_close(model(x), twin(x), rtol=0, atol=0)
    else:
        with pytest.raises((RuntimeError, ValueError)):
            model(x)
    assert not runs_by_channels(model, x=images())


def test_transforms() -> None:
    model = Net().double().eval()
    twin = copy.deepcopy(model)
    replaced(model)
    x = torch.stack((images(), 2 * images()))
    torch.testing.assert_close(torch.vmap(model)(x), torch.vmap(twin)(x))
    state = {name: 2 * p for name, p in model.named_parameters()}
    call = torch.func.functional_call
    torch.testing.assert_close(call(model, state, (images(),)), call(twin, state, (images(),)))


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Convolutions whose results repeat bit by bit."""
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
