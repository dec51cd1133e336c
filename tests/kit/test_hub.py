"""torchkiln as a kernel of Hugging Face's ``kernels``, and its requirements of layers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchkiln import hub
from torchkiln.hub import layers

kernels: Any = pytest.importorskip("kernels")
if kernels.__file__ is None:  # the folder tests/kernels, if it is on the path
    pytest.skip("kernels is not installed", allow_module_level=True)
TRAINING = kernels.Mode.TRAINING
INFERENCE = kernels.Mode.INFERENCE
COMPILE = kernels.Mode.TORCH_COMPILE


class Original(nn.Module):
    """The RMS norm of models of Llama's family."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


def decorated(name: str, original: type[nn.Module]) -> Any:
    """A module whose forward ``kernels`` may replace by the layer ``name``."""
    made: Any = kernels.use_kernel_forward_from_hub(name)(type(name, (original,), {}))()
    return made


@pytest.mark.parametrize("mode", [TRAINING, INFERENCE, TRAINING | COMPILE, INFERENCE | COMPILE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_model_is_replaced(mode: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(decorated("RMSNorm", Original))
    x = torch.randn(3, 16, dtype=dtype)
    expected = model(x)
    with kernels.use_kernel_mapping(hub.mapping()):
        kernels.kernelize(model, mode=mode, use_fallback=False)
    assert "forward" in vars(model[0])
    found = model(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    if dtype != found.dtype:  # both round the rows before the weight
        assert (found - expected).abs().gt(1e-6 * expected.abs()).float().mean() < 0.05
    if mode & COMPILE:
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), found)


class One(nn.Module):
    """A stand-in for a function of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x


REFERENCES = {
    "SiluAndMul": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "GeluAndMul": lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "GeluTanhAndMul": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "SiLU": F.silu,
    "GeLU": F.gelu,
    "GeluTanh": lambda x: F.gelu(x, approximate="tanh"),
    "NewGELU": lambda x: F.gelu(x, approximate="tanh"),
    "FastGELU": lambda x: F.gelu(x, approximate="tanh"),
    "QuickGELU": lambda x: x * torch.sigmoid(1.702 * x),
}


def test_every_layer_is_tested() -> None:
    assert {*REFERENCES, "RMSNorm"} == set(layers.__all__) == set(hub.mapping())


@pytest.mark.parametrize("name", REFERENCES)
def test_layers_without_parameters(name: str) -> None:
    model = decorated(name, One)
    with kernels.use_kernel_mapping(hub.mapping()):
        kernels.kernelize(model, mode=TRAINING | COMPILE, device="cpu", use_fallback=False)
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    reference: Any = REFERENCES[name]
    found, expected = model(x), reference(x)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads)


def test_the_folder_is_a_local_kernel() -> None:
    kernel = kernels.get_local_kernel(hub.path(), backend="cpu")
    assert kernel.layers.RMSNorm is layers.RMSNorm
    assert sys.modules["torchkiln"].__name__ == "torchkiln"
    assert kernel is not sys.modules["torchkiln"]
    assert sorted(folder.name for folder in (hub.path() / "build").iterdir()) == [
        "torch-cpu",
        "torch-cuda",
    ]
