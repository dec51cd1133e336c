"""Norms in graphs, with symbolic shapes; their memory; an eps of 0; a float32 residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norms import every_op
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.memory import allocated_bytes


@every_op
def test_one_graph_serves_rows_of_all_lengths(device: torch.device, spec: Any) -> None:
    """If x has dynamic sizes, a normalized shape taken from x is dynamic, too."""

    def function(*tensors: Tensor) -> Any:
        rows = 2 if spec.name.startswith("add_") else 1
        return spec.op(*tensors[:rows], tensors[0].shape[-1:], *tensors[rows:])

    torch.compiler.reset()
    compiled: Any = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for columns, stance in ((10, "default"), (24, "fail_on_recompile"), (7, "fail_on_recompile")):
        sample = spec.bench(device, torch.float32, (6, columns))
        tensors = [t.requires_grad_() for t in sample.take(sample.positions)]
        with torch.compiler.set_stance(stance):
            found = compiled(*tensors)
        torch.testing.assert_close(found, function(*tensors))


def test_shapes_may_be_symbols() -> None:
    """Tracing calls the Python function with symbols instead of numbers as sizes."""

    def function(x: Tensor) -> Tensor:
        return torchkiln.layer_norm(x, x.shape[-1:])

    graph = make_fx(function, tracing_mode="symbolic")(torch.randn(3, 5))
    x = torch.randn(4, 9)
    torch.testing.assert_close(graph(x), F.layer_norm(x, (9,)))


@pytest.mark.cuda
@every_op
def test_memory_of_forward_and_backward(spec: Any) -> None:
    """Forward and backward allocate only results and gradients of the size of x."""
    device = torch.device("cuda", 0)
    sample = spec.leaves(spec.bench(device, torch.bfloat16, (4096, 4096)))
    whole = sample.args[0].nbytes
    inputs = sample.take(spec.wanted(sample))
    before = allocated_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = sample.call(spec.op)
    outs = result if isinstance(result, tuple) else (result,)
    forward = torch.cuda.max_memory_allocated(device) - before
    grads = [torch.ones_like(o) for o in outs]
    torch.autograd.grad(outs, inputs, grads)
    backward = torch.cuda.max_memory_allocated(device) - before
    assert forward <= 1.02 * len(outs) * whole
    assert backward <= 1.1 * (2 * len(outs) + 1) * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_eps_of_0(dtype: torch.dtype) -> None:
    """Results for constant rows and rows of zeros are torch's."""
    x = normal("x", (5, 37), torch.device("cpu"), dtype)
    x[1] = 0
    x[2] = 3
    for found, expected in (
        (torchkiln.layer_norm(x, 37, eps=0.0), F.layer_norm(x, [37], eps=0.0)),
        (torchkiln.rms_norm(x, 37, eps=0.0), F.rms_norm(x, [37], eps=0.0)),
    ):
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert found[1].isnan().all()


@pytest.mark.parametrize("centered", [False, True])
def test_a_float32_residual_beside_half_precision(centered: bool) -> None:
    """Sum and norm have the dtypes of torch's formula; each gradient that of its argument."""
    cpu = torch.device("cpu")
    x, residual = normal("x", (9, 64), cpu, torch.bfloat16), normal("residual", (9, 64), cpu)
    weight = normal("weight", (64,), cpu, torch.bfloat16)
    inputs = [t.requires_grad_() for t in (x, residual, weight)]
    op = torchkiln.add_layer_norm if centered else torchkiln.add_rms_norm
    norm = F.layer_norm if centered else F.rms_norm
    total = x + residual
    expected = norm(total, [64], weight.float(), eps=1e-6), total
    found = op(x, residual, 64, weight, eps=1e-6)
    with torch.inference_mode():
        below = op(x, residual, 64, weight, eps=1e-6)
    for results in (found, below):
        torch.testing.assert_close(results, expected)
    grads = [torch.autograd.grad([r.square().sum() for r in y], inputs) for y in (found, expected)]
    assert [grad.dtype for grad in grads[0]] == [t.dtype for t in inputs]
    torch.testing.assert_close(*grads)
