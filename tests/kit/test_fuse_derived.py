"""torchkiln.fuse and batch norms whose class is derived from torch's, such as timm's."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from derived_norms import ATTACKS, FORMS, INIT, changed, mutants, spelled_out
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import torchkiln
from torchkiln.patch.graph.derived import calls_of

NUMBERS = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """A function that imports a source as a module of its own, and returns its class ``Norm``."""
    loaded = []

    def made(source: str) -> Any:
        name = f"derived_norms_{next(NUMBERS)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module.Norm

    yield made
    for name in loaded:
        del sys.modules[name]


class Block(nn.Module):
    """Two convolutions and batch norms, of which the second has no activation of its own."""

    def __init__(self, norm: Any, act: Callable[[], nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 1, bias=False), norm(8, act())
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1), norm(6, nn.Identity())
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        return self.act(self.bn2(self.conv2(y)) + x)


class Pooled(nn.Module):
    """A batch norm without a convolution, then a max pool."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.bn1, self.pool = norm(6, nn.ReLU(inplace=True)), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.bn1(x))


def example() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, 6, 6, generator=generator, dtype=torch.float64)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and gradients of two training steps, and the outputs of two calls in inference."""
    found = []
    model.train()
    for _ in range(2):
        given = x.clone().requires_grad_()
        y = model(given)
        found += [y, *gradients(y.square().sum(), [given, *model.parameters()])]
    model.eval()
    with torch.no_grad():
        found += [model(x), model(x)]
    return found


gradients = functools.partial(torch.autograd.grad, materialize_grads=True)


def agree(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models have equal results, up to rounding of float64."""
    both = [(*results(one, example()), *one.state_dict().values()) for one in (model, other)]
    pairs = zip(*both, strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)


def ops_of(model: nn.Module) -> set[str]:
    """The ops of training steps and inference."""
    with torch.profiler.profile(acc_events=True) as profile:
        results(model, example())
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_results_are_those_of_the_calls(
    form: str, momentum: float | None, load: Callable[[str], Any]
) -> None:
    block = Block(load(FORMS[form])).double()
    block.bn1.momentum = momentum
    reference = copy.deepcopy(block)
    report = torchkiln.fuse(block)
    assert report["bn1"].now == "conv_bn_act(silu)"
    assert report["bn2"].now == "conv_bn_act(relu, with the residual)"
    assert agree(block, reference)
    assert "aten::batch_norm" not in ops_of(block)


def test_no_op_of_torch_is_left(load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out())).double()
    torchkiln.fuse(block)
    names = ops_of(block)
    assert any("bn_act" in name for name in names)
    assert not {"aten::batch_norm", "aten::silu", "aten::relu"} & names


def test_other_calls_of_a_chain(load: Callable[[str], Any]) -> None:
    norm = load(spelled_out())
    pooled = Pooled(norm).double()
    report = torchkiln.fuse(pooled)
    assert report["bn1"].now == "bn_act(relu, with the max pool)"
    assert agree(pooled, Pooled(norm).double())
    torch.manual_seed(0)
    light = nn.Sequential(*(nn.Conv2d(6, 6, 1), norm(6, nn.ReLU())) * 2).double()
    report = torchkiln.fuse(light, recompute=True)
    assert report["1"].now.endswith("again in backward")


def test_an_unknown_activation_stays_a_call(load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out()), lambda: nn.Hardswish(inplace=True)).double()
    reference = copy.deepcopy(block)
    report = torchkiln.fuse(block)
    assert report["bn1"].now == "conv_bn_act(none)"
    assert agree(block, reference)
    assert "aten::batch_norm" not in ops_of(copy.deepcopy(block))
    block.bn1.act = reference.bn1.act = nn.Tanh()  # no condition: the module is called
    assert agree(block, reference)
    norm = load(spelled_out())
    first, second = norm(6, nn.Hardswish()), norm(6, nn.SiLU())
    mixed = nn.Sequential(first, nn.Conv2d(6, 6, 1), second).double()
    plain = copy.deepcopy(mixed)
    report = torchkiln.fuse(mixed)
    assert report["0"].reason == "no activation follows"
    assert report["2"].now == "conv_bn_act(silu)"
    assert agree(mixed, plain)


@pytest.mark.parametrize("attack", ATTACKS)
def test_other_classes_are_left_alone(attack: str, load: Callable[[str], Any]) -> None:
    source, reason = ATTACKS[attack]
    block = Block(load(source))
    report = torchkiln.fuse(block)
    assert not report.changed
    assert type(block) is Block
    assert reason in report["bn1"].reason


def test_each_change_of_the_forward_is_found(load: Callable[[str], Any]) -> None:
    sources = list(mutants())
    assert len(sources) > 60
    assert calls_of(load(spelled_out())) == ("drop", "act")
    assert [source for source in sources if not isinstance(calls_of(load(source)), str)] == []


def test_code_without_its_source_is_left_alone(load: Callable[[str], Any]) -> None:
    scope: dict[str, Any] = {}
    exec(FORMS["super"], scope)
    assert "not available" in torchkiln.fuse(Block(scope["Norm"]))["bn1"].reason
    norm = load(spelled_out())
    code = norm.forward.__code__
    constants = tuple(2.0 if repr(value) == "1.0" else value for value in code.co_consts)
    assert constants != code.co_consts
    norm.forward.__code__ = code.replace(co_consts=constants)
    assert "is not the code that runs" in torchkiln.fuse(Block(norm))["bn1"].reason


def alter(norm: Any, source: str) -> None:
    """Changes a class or its module after it was fused."""
    exec(source, {"norm": norm, "module": sys.modules[norm.__module__], "nn": nn, "F": F})


OTHER = "lambda self, x: self._check_input_dim(x) or x * 3"
CLASS_CHANGES = {
    "forward": f"norm.forward = {OTHER}",
    "code": f"norm.forward.__code__ = ({OTHER}).__code__",
    "call": "norm.__call__ = lambda self, x: nn.Module.__call__(self, x) * 3",
    "functional": "module.F = type(module)('F'); module.F.batch_norm = lambda x, *args: x * 2",
    "float": "module.float = lambda count: 3.0",
    "base": "class Base(nn.BatchNorm2d):\n"
    "    def __call__(self, x): return nn.Module.__call__(self, x) * 3\n"
    "norm.__bases__ = (Base,)",
}


@pytest.mark.parametrize("change", CLASS_CHANGES)
def test_a_later_change_of_the_class_is_noticed(change: str, load: Callable[[str], Any]) -> None:
    norm = load(spelled_out())
    block = Block(norm).double()
    block.bn1.momentum = None
    plain, reference = copy.deepcopy(block), copy.deepcopy(block)
    before = results(plain, example())
    assert torchkiln.fuse(block)["bn1"].changed
    results(copy.deepcopy(block), example())
    alter(norm, CLASS_CHANGES[change])
    after = results(copy.deepcopy(reference), example())
    assert not all(map(torch.allclose, before, after))
    assert agree(block, reference)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *given: given[-1] * 2)


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


CHANGES: dict[str, Callable[[Block], object]] = {
    "activation": lambda block: setattr(block.bn1, "act", nn.Tanh()),
    "identity": lambda block: setattr(block.bn1, "drop", nn.Tanh()),
    "hook of the activation": lambda block: hook(block.bn1.act),
    "hook of the identity": lambda block: hook(block.bn1.drop),
    "hook of the norm": lambda block: hook(block.bn1),
    "forward of the norm": lambda block: setattr(block.bn1, "forward", F.softplus),
    "forward of the activation": lambda block: setattr(block.bn1.act, "forward", torch.tanh),
    "eps": lambda block: setattr(block.bn1, "eps", 0.25),
    "momentum": lambda block: setattr(block.bn1, "momentum", None),
    "statistics": lambda block: setattr(block.bn1, "track_running_stats", False),
    "parametrization": lambda block: parametrize.register_parametrization(
        block.bn1, "weight", Halved()
    ),
    "norm": lambda block: setattr(block, "bn1", nn.BatchNorm2d(8).double()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_of_a_module_is_noticed(change: str, load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out())).double()
    reference = copy.deepcopy(block)
    torchkiln.fuse(block)
    before = results(copy.deepcopy(reference), example())
    results(copy.deepcopy(block), example())
    for model in (block, reference):
        CHANGES[change](model)
    after = results(copy.deepcopy(reference), example())
    assert not all(map(torch.allclose, before, after))
    assert agree(block, reference)


def test_hooks_before_are_left_alone(load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out())).double()
    hook(block.bn1.act)
    reference = copy.deepcopy(block)
    assert torchkiln.fuse(block)["bn1"].now == "conv_bn_act(none)"  # the activation is called
    assert agree(block, reference)
    block = Block(load(spelled_out()))
    hook(block.bn1)
    assert torchkiln.fuse(block)["bn1"].reason == "it has hooks"


def test_subclasses_without_a_forward_are_fused(load: Callable[[str], Any]) -> None:
    more = INIT + "        self.register_buffer('calls', torch.zeros(3))\n"
    block = Block(load(changed(INIT, more).split("    def forward")[0])).double()
    block.bn1.momentum = 0.5
    reference = copy.deepcopy(block)
    assert torchkiln.fuse(block)["bn1"].now == "conv_bn_act(none)"
    assert agree(block, reference)
    assert "bn1.calls" in block.state_dict()


def test_the_fold_is_renewed(load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out())).double().eval()
    reference = copy.deepcopy(block)
    torchkiln.fuse(block)
    x = example()
    with torch.no_grad():
        with torch.profiler.profile(acc_events=True) as profile:
            block(x)
        assert not any("bn_act" in event.name for event in profile.events())  # it is folded
        for model in (block, reference):
            model.bn1.weight.mul_(2)
        torch.testing.assert_close(block(x), reference(x))
        for model in (block, reference):  # the forward of the class changes the statistics
            type(model.bn1).forward(model.bn1.train(), torch.ones(1, 8, 2, 2).double())
            model.eval()
        torch.testing.assert_close(block(x), reference(x))


def test_copies_pickles_and_undo(load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out())).double().eval()
    report = torchkiln.fuse(block)
    x = example()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(other) is type(block)
        assert torch.equal(other(x), block(x))
        with torch.no_grad():
            other.bn1.weight.zero_()  # a copy has parameters of its own
            assert not torch.equal(other(x), block(x))
    report.undo()
    assert type(block) is Block
    assert list(block.state_dict()) == list(Block(type(block.bn1)).state_dict())


@pytest.mark.parametrize("is_patched", [False, True])
def test_the_compiler_traces_the_calls(is_patched: bool, load: Callable[[str], Any]) -> None:
    norm = load(spelled_out())
    block = Block(norm).double()
    reference = copy.deepcopy(block)
    torchkiln.fuse(block)
    if is_patched:
        alter(norm, CLASS_CHANGES["forward"])
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
    assert agree(compiled, reference)
    assert all(("torch.ops.torchkiln." in code) is not is_patched for code in graphs)


def test_replace_fuses_them(load: Callable[[str], Any]) -> None:
    block = Block(load(spelled_out()), nn.GELU).double()
    reference = copy.deepcopy(block)
    report = torchkiln.replace(block, only=("batch_norm", "activation"))
    assert report["bn1"].now == "conv_bn_act(gelu)"
    assert report["bn1.act"].reason == "its formula is part of that of its parent"
    assert agree(block, reference)


def registered(norm: Any, x: Tensor) -> Tensor:
    """A registered forward."""
    y: Tensor = norm.act(nn.BatchNorm2d.forward(norm, x))
    return y


def test_a_registered_forward_of_the_class_stays(load: Callable[[str], Any]) -> None:
    norm = load(spelled_out())
    generator = torch.Generator().manual_seed(0)
    torchkiln.replace.register(
        norm,
        registered,
        inputs=lambda m: torch.randn(
            m.num_features, m.num_features, 3, 3, generator=generator
        ).double(),
    )
    try:
        report = torchkiln.replace(Block(norm).double(), only=("batch_norm", "registered"))
        assert report["bn1"].now == "registered"
    finally:
        torchkiln.replace.unregister(norm)
