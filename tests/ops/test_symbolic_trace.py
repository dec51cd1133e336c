"""Objects with ``__torch_function__``: torch.fx records each op, other objects get the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import torchkiln
from torchkiln import testing
from torchkiln.testing.compare import outputs
from torchkiln.testing.contract.values import TINY


class Call(nn.Module):
    """A module that calls an op with items of its input as tensors."""

    def __init__(self, spec: testing.OpSpec, sample: testing.Sample) -> None:
        super().__init__()
        self.spec, self.sample = spec, sample

    def forward(self, tensors: Any) -> Any:
        call = self.sample.bind(self.spec.op, self.sample.positions)
        return call(*(tensors[i] for i in range(len(self.sample.positions))))


@pytest.mark.parametrize("spec", testing.SPECS, ids=lambda spec: spec.name)
def test_an_op_is_traced(spec: testing.OpSpec) -> None:
    for sample in spec.samples(torch.device("cpu"), torch.float32):
        if sample.numel > TINY:
            continue
        graph = torch.fx.symbolic_trace(Call(spec, sample))
        sample.start_generators()
        found = outputs(graph(sample.take(sample.positions)))
        for one, other in zip(found, outputs(sample.call(spec.op)), strict=False):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Norms(nn.Module):
    """A module that calls ops of torchkiln and of torch with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = torchkiln.nn.RMSNorm(6), nn.BatchNorm1d(6)
        self.second = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        y = torchkiln.rms_norm(self.first(x) + 1, x.shape[-1:], self.second)
        parts = (self.bn.weight, self.bn.bias, self.bn.running_mean, self.bn.running_var)
        return torchkiln.bn_act(y, *parts, training=self.training)


def test_a_module_is_traced() -> None:
    module, twin = Norms(), Norms()
    twin.load_state_dict(module.state_dict())
    x = torch.randn(5, 6)
    graph = torch.fx.symbolic_trace(module)
    torch.testing.assert_close(graph(x), twin(x))
    torch.testing.assert_close(module.bn.running_mean, twin.bn.running_mean)
    graph(x).sum().backward()
    assert module.second.grad is not None


X, ROW = torch.randn(2, 4, 3, 3), torch.rand(4)
OTHERS: Mapping[str, Callable[[Any], Any]] = {
    "add": lambda x: torchkiln.add(x, x, alpha=2),
    "addcmul": lambda x: torchkiln.addcmul(x, x, x, value=2),
    "addcmul of one": lambda x: torchkiln.addcmul(x, x, x),
    "conv_bn_act": lambda x: torchkiln.conv_bn_act(
        x, torch.ones(4, 4, 1, 1), running_mean=ROW, running_var=ROW
    ),
    "geglu": lambda x: torchkiln.geglu(x, x, approximate="tanh"),
    "numbers": lambda x: torchkiln.muladd(x, 2.0, 1),
    "out": lambda x: torchkiln.rms_norm(x, 3, out=torch.empty_like(X)),
    "in place": lambda x: torchkiln.add_rms_norm_(x.clone(), x.clone(), (3,))[0],
    "spmm of a vector": lambda x: torchkiln.spmm(torch.eye(72).to_sparse_csr(), x.reshape(72)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", OTHERS)
def test_a_function_in_python_is_traced(name: str) -> None:
    graph = torch.fx.symbolic_trace(OTHERS[name])
    assert torch.equal(graph(X), OTHERS[name](X))


class Recorder:
    """An object that is no tensor and has a ``__torch_function__``."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> tuple[str, int]:
        return str(function), len(args)


@pytest.mark.parametrize("place", range(2))
def test_any_object_receives_the_call(place: int) -> None:
    args: list[Any] = [torch.ones(3), torch.ones(3)]
    args[place] = Recorder()
    bias_act: Any = torchkiln.bias_act
    assert bias_act(*args) == ("torchkiln.bias_act.default", 2)


def test_an_object_without_it_is_refused() -> None:
    with pytest.raises(TypeError, match=r"bias_act: bias: got object, expected a torch\.Tensor"):
        torchkiln.bias_act(torch.ones(3), object())  # type: ignore[arg-type]


class Passing(TorchFunctionMode):
    """A mode that calls each function unchanged, like ``torch.device`` as a context."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_mode_lets_a_batch_norm_move_its_statistics() -> None:
    moved = ROW.clone()
    with Passing():
        torchkiln.bn_act(X, ROW, ROW, moved, ROW.clone(), training=True)
    assert not torch.equal(moved, ROW)
