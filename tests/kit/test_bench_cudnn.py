"""cuDNN's graphs are built once and agree with our norms; calls that it lacks have a reason."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cudnn_stand_in
import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln import bench
from torchkiln.bench import peers
from torchkiln.bench.case import BACKWARD, FORWARD, cases
from torchkiln.bench.clock import cpu_clock
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.peers import cudnn, cudnn_graph
from torchkiln.testing import SPECS

CPU = torch.device("cpu")
CACHES = (
    *(cudnn.norm_forward, cudnn.norm_backward),
    *(cudnn.batch_norm_forward, cudnn.batch_norm_backward),
    *(cudnn_graph.handle, cudnn_graph.number, cudnn_graph.zeros_like),
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = cudnn_stand_in.module()
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=3))
    cudnn_stand_in.BUILT.clear()
    for cached in CACHES:
        cached.cache_clear()
    yield module
    for cached in CACHES:
        cached.cache_clear()


def leaves(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def assert_same_gradients(ours: Any, theirs: Any, tensors: list[Tensor | None]) -> None:
    """Asserts that two functions have equal results, and equal gradients of all tensors."""
    made = []
    for function in (ours, theirs):
        given = leaves(*tensors)
        y = function(*given)
        torch.manual_seed(7)
        wanted = [t for t in given if t is not None]
        made.append((y, *torch.autograd.grad(y, wanted, torch.randn_like(y))))
    for one, other in zip(*made, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_rows(dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*s, dtype=dtype) for s in ((3, 5, 8), (8,), (8,)))
    runner = cudnn_graph.Runner()
    assert_same_gradients(
        lambda x, w: torchkiln.rms_norm(x, 8, w, 1e-6),
        lambda x, w: cudnn.rms_norm(runner, x, 8, w, 1e-6),
        [x, w],
    )
    assert_same_gradients(
        lambda x, w, b: torchkiln.layer_norm(x, 8, w, b),
        lambda x, w, b: cudnn.layer_norm(runner, x, (8,), w, b),
        [x, w.float(), b.float()],
    )


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("residual", [False, True])
def test_batch_norm(residual: bool) -> None:
    case = next(cases(spec_of("bn_act"), CPU, torch.float32, (2 * 784, 4)))
    x, w, b, *_ = case.sample.args
    added = torch.randn_like(x) if residual else None
    runner = cudnn_graph.Runner()

    def ours(x: Tensor, w: Tensor, b: Tensor, r: Tensor | None) -> Tensor:
        return torchkiln.bn_act(x, w, b, None, None, r, training=True)

    def theirs(x: Tensor, w: Tensor, b: Tensor, r: Tensor | None) -> Tensor:
        return cudnn.bn_act(runner, x, w, b, None, None, r, training=True)

    assert_same_gradients(ours, theirs, [x, w, b, added])
    torch.testing.assert_close(ours(x, w, b, added), theirs(x, w, b, added))
    steps = [step for graph in cudnn_stand_in.BUILT for step in graph.steps]
    assert ("cmp_gt" in steps) == residual
    assert ("relu_backward" in steps) != residual


def spec_of(name: str) -> Any:
    return next(spec for spec in SPECS if spec.name == name)


def test_graphs_and_workspaces(stand_in: Any) -> None:
    """One graph per shape, dtype and direction; one workspace per runner."""
    x, w = torch.randn(4, 8), torch.randn(8)
    first, second = cudnn_graph.Runner(), cudnn_graph.Runner()
    for runner in (first, first, second):
        cudnn.rms_norm(runner, x, 8, w)
    (graph,) = cudnn_stand_in.BUILT
    one, again, other = graph.workspaces
    assert one is again
    assert one is not other
    assert stand_in.streams == 3 * [(7, 3)]
    recorded_x, recorded_w = leaves(x, w)
    cudnn.rms_norm(first, recorded_x, 8, recorded_w)
    assert [g.steps for g in cudnn_stand_in.BUILT] == [["rmsnorm"], ["rmsnorm_backward"]]
    cudnn.rms_norm(first, x[:2], 8, w)
    cudnn.rms_norm(first, x.half(), 8, w.half())
    assert len(cudnn_stand_in.BUILT) == 4


X, W, B = torch.ones(2, 4), torch.ones(4), torch.zeros(4)
IMAGE = torch.ones(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
TRAIN = {"training": True}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("function", "args", "kwargs", "why"),
    [
        (cudnn.rms_norm, (X.double(), 4, W.double()), {}, "float32, float16 and bfloat16"),
        (cudnn.rms_norm, (X[:0], 4, W), {}, "needs at least 1 row"),
        (cudnn.rms_norm, (X, (2, 4), W), {}, "norms of the last dimension only"),
        (cudnn.rms_norm, (X, 4), {}, "needs a weight"),
        (cudnn.rms_norm, (X, 4, W), {"offset": 1.0}, "has no offset"),
        (cudnn.rms_norm, (torch.ones(4, 4).T, 4, W), {}, "contiguous rows only"),
        (cudnn.layer_norm, (X, 4, W), {}, "needs weight and bias"),
        (
            cudnn.layer_norm,
            (X[:, :3].contiguous(), 3, W[:3], B[:3]),
            {},
            "has no plan for float32 2 x 3 x 1 x 1: No valid engine configs$",
        ),
        (cudnn.bn_act, (IMAGE, W, B, W, W), {}, "has no eval mode"),
        (cudnn.bn_act, (IMAGE, W, B, W, W), TRAIN, "without running statistics"),
        (cudnn.bn_act, (IMAGE, W, B), {"act": "silu", **TRAIN}, "has relu only"),
        (cudnn.bn_act, (IMAGE, W), TRAIN, "needs weight and bias"),
        (cudnn.bn_act, (IMAGE.contiguous(), W, B), TRAIN, "channels_last only"),
        (cudnn.bn_act, (X, W, B), TRAIN, "channels_last only"),
    ],
)
def test_why_a_call_has_no_graph(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> None:
    with pytest.raises(peers.Refused, match=why):
        function(cudnn_graph.Runner(), *args, **kwargs)


def row(name: str, direction: str) -> bench.Measurement:
    case = next(cases(spec_of(name), CPU, torch.float32, (8, 16)))
    found = time_case(case, direction, Settings(cpu_clock, ("cudnn",), 0.0), 1)
    assert found is not None
    return found


@pytest.mark.usefixtures("stand_in")
def test_rows_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "require_package", lambda *_: None)
    for direction in (FORWARD, BACKWARD):
        assert set(row("layer_norm", direction).times) == {"torchkiln", "cudnn"}
    silent = row("add_rms_norm", FORWARD)
    assert (set(silent.times), silent.missing) == ({"torchkiln"}, {})


def test_no_frontend_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.package, "find_spec", lambda _: None)
    assert row("rms_norm", FORWARD).missing == {"cudnn": "not installed"}
    monkeypatch.setattr(peers.package, "find_spec", lambda _: object())
    assert row("rms_norm", FORWARD).missing == {"cudnn": "has kernels for GPUs only"}


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "bn_act"])
def test_the_real_graphs(name: str) -> None:
    """Results and gradients agree with ours in bfloat16, also with a residual."""
    pytest.importorskip("cudnn")
    gpu, spec = torch.device("cuda:0"), spec_of(name)
    for case in (
        c for c in cases(spec, gpu, torch.bfloat16, (4 * 784, 256)) if c.variant != "eval"
    ):
        theirs = peers.MAKERS["cudnn"](case)
        made = []
        for function in (spec.op, theirs):
            given = spec.leaves(case.sample)
            y = given.call(function)
            torch.manual_seed(7)
            wanted = [given.args[i] for i in spec.wanted(given)]
            made.append((y, *torch.autograd.grad(y, wanted, torch.randn_like(y))))
        for one, other in zip(*made, strict=True):
            scale = one.float().abs().max().item()
            torch.testing.assert_close(one, other, atol=0.02 * scale, rtol=0.02)


def test_a_case_is_copied_for_no_other_peer() -> None:
    case = next(cases(spec_of("rms_norm"), CPU, torch.float32, (2, 4)))
    assert peers.own_tensors("cudnn", case) is case
    assert peers.remark("cudnn", case, BACKWARD) is None
    assert not peers.waits("cudnn", dataclasses.replace(case))
