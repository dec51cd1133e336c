"""Peers are called as their users call them; each peer that is left out has a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchkiln import bench
from torchkiln.bench import peers
from torchkiln.bench.case import BACKWARD, FORWARD, STEP, BenchCase, Function, call_of, cases
from torchkiln.bench.clock import cpu_clock, device_clock
from torchkiln.bench.measure import Settings, time_case, time_small
from torchkiln.bench.peers import formulas, liger, quack, torchao
from torchkiln.bench.report import tables
from torchkiln.bench.result import OURS
from torchkiln.testing import SPECS, OpSpec, Sample, Traffic, scaled_product
from torchkiln.testing.compare import outputs
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
FUSED = next(spec for spec in SPECS if spec.helpers)
X, W, B = torch.ones(2, 4), torch.ones(4), torch.zeros(4)
TARGET = torch.zeros(2, dtype=torch.int64)


def a_case(spec: OpSpec = FUSED) -> BenchCase:
    return next(cases(spec, CPU, torch.float32, (8, 16)))


def a_row(case: BenchCase, direction: str, *names: str) -> bench.Measurement:
    row = time_case(case, direction, Settings(cpu_clock, names, budget=0.0), 1)
    assert row is not None
    return row


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_the_compiled_peer(direction: str) -> None:
    row = a_row(a_case(), direction, "compile")
    assert set(row.times) == {OURS, "compile"}, row.missing


def test_a_peer_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: BenchCase) -> Function:
        raise RuntimeError(f"no compiler for {case.spec.name}\nand much more")

    monkeypatch.setitem(peers.MAKERS, "compile", broken)
    rows = [a_row(a_case(), direction, "compile", "eager") for direction in (FORWARD, BACKWARD)]
    for row in rows:
        assert set(row.times) == {OURS, "eager"}
        assert row.missing == {"compile": f"RuntimeError: no compiler for {FUSED.name}"}
    (table,) = tables(rows)
    name = FUSED.name
    why = f"no compile: RuntimeError: no compiler for {name}"
    assert table.notes == (f"{name} forward, {name} backward: {why}",)


class FakeGpuTensor:
    is_cuda = True


class FakeGpuSample(Sample):
    positions = (0, 1)


@pytest.mark.parametrize("name", ["liger", "quack"])
def test_a_peer_is_asked_only_for_what_it_has(name: str) -> None:
    known = dict(peers.makers(a_case(), ("eager", name)))
    assert set(known) == {"eager"}
    named = dataclasses.replace(ADD, name="rms_norm")
    assert set(dict(peers.makers(a_case(named), ("eager", name)))) == {"eager", name}


@pytest.mark.parametrize("name", ["liger", "quack"])
def test_a_peer_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.package, "find_spec", lambda _: None)
    row = a_row(a_case(dataclasses.replace(ADD, name="softmax")), FORWARD, name)
    assert set(row.times) == {OURS}
    assert row.missing == {name: "not installed"}
    (table,) = tables([row])
    assert table.notes == (f"softmax forward: no {name}: not installed",)


def test_a_peer_for_gpus_is_named_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.package, "find_spec", lambda _: object())
    row = a_row(a_case(dataclasses.replace(ADD, name="softmax")), FORWARD, "quack")
    assert row.missing == {"quack": "has kernels for GPUs only"}


def test_a_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "liger_kernel" / "ops"
    folder.mkdir(parents=True)
    lines = "class LigerSiLUMulFunction:\n    def apply(*given):\n        return given\n"
    (folder / "swiglu.py").write_text(lines)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    pair = (FakeGpuTensor(), FakeGpuTensor())
    case = dataclasses.replace(
        a_case(dataclasses.replace(ADD, name="swiglu")), sample=FakeGpuSample("two", pair)
    )
    ((_, make),) = peers.makers(case, ("liger",))
    assert make(case)(*pair) == pair


def given(*args: Any, **kwargs: Any) -> Any:
    """Replaces the function of a package: returns its arguments."""
    return args, kwargs


def ours_of(adapt: Callable[..., Any]) -> Function:
    return lambda *args, **kwargs: adapt(given, *args, **kwargs)


@pytest.mark.parametrize(
    ("adapt", "call", "expected"),
    [
        (liger.gated, (X, X), ((X, X), {})),
        (liger.layer_norm, (X, (4,), W, B, 1e-6), ((X, W, B, 1e-6), {})),
        (liger.rms_norm, (X, 4, W, 1e-6), ((X, W, 1e-6, 0.0, "llama", False), {})),
        (liger.add_rms_norm, (X, X, (4,), W, 1e-6), ((X, X, W, 1e-6, 0.0, "llama", False), {})),
        (liger.softmax, (X, -1), ((X,), {})),
        (quack.rms_norm, (X, (4,), W), ((X, W), {"eps": 2**-23, "weight_offset": 0.0})),
        (
            quack.add_rms_norm,
            (X, B, (4,), W, 1e-6),
            ((X, W), {"residual": B, "eps": 1e-6, "prenorm": True, "weight_offset": 0.0}),
        ),
        (quack.softmax, (X, 1), ((X,), {})),
        (quack.cross_entropy, (X, TARGET), ((X, TARGET), {})),
        (liger.linear_kl, (X, W, X, W), ((X, W, X, W, None, 0.0), {})),
    ],
)
def test_arguments_become_theirs(
    adapt: Callable[..., Any], call: tuple[Any, ...], expected: object
) -> None:
    assert_same(ours_of(adapt)(*call), expected)


def assert_same(found: Any, expected: Any) -> None:
    """Asserts equality; tensors must be the same objects."""
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert found is expected
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        assert found == expected


def test_the_loss_is_the_first_of_what_liger_returns() -> None:
    loss = liger.cross_entropy(given, X, TARGET, label_smoothing=0.1, z_loss=0.2)
    assert_same(loss, (X, TARGET, None, -100, 0.2, 0.1, "mean"))
    loss = liger.linear_cross_entropy(given, X, W, TARGET, B, z_loss=0.2, softcap=3.0)
    numbers = (-100, 0.2, 0.0, "mean", 3.0, False, torch.float32)
    assert_same(loss, (X, W, TARGET, B, None, *numbers))


@pytest.mark.parametrize(
    ("adapt", "args", "kwargs", "why"),
    [
        (liger.gated, (X,), {}, "takes gate and up as two tensors"),
        (liger.layer_norm, (X, (2, 4), W, B), {}, "supports norms of the last dimension only"),
        (liger.layer_norm, (X, (4,), W), {}, "needs weight and bias"),
        (liger.add_rms_norm, (X, X, (4,)), {}, "needs a weight"),
        (liger.softmax, (X, 0), {}, "supports the last dimension only"),
        (quack.softmax, (X, -1), {"causal": True}, "has neither scale nor mask"),
        (quack.softmax, (X, -1), {"scale": 0.5}, "has neither scale nor mask"),
        (liger.cross_entropy, (X, X), {}, "takes class indices"),
        (liger.linear_cross_entropy, (W, X, TARGET), {}, "takes rows as a matrix"),
    ],
)
def test_what_a_peer_would_do_otherwise_is_refused(
    adapt: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> None:
    with pytest.raises(peers.Refused, match=why):
        ours_of(adapt)(*args, **kwargs)


def test_a_gradient_made_in_forward_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that computes gradients in forward is timed as a step, with a remark and no rank."""
    calls = []

    def loss(x: Tensor, target: Tensor) -> Tensor:
        calls.append(x)
        return F.cross_entropy(x, target)

    monkeypatch.setitem(peers.MAKERS, "liger", lambda _: loss)
    spec = dataclasses.replace(
        ADD,
        name="cross_entropy",
        op=F.cross_entropy,
        composite=F.cross_entropy,
        traffic=lambda _: Traffic(64, 64),
        backward_traffic=lambda _: Traffic(64, 64),
        bench=lambda _device, _dtype, _shape: Sample("bench", (X, TARGET)),
    )
    forward, backward = (a_row(a_case(spec), d, "liger") for d in (FORWARD, BACKWARD))
    assert forward.remarks == {}
    assert forward.best_peer == "liger"
    assert set(backward.times) == {OURS, "liger"}
    assert backward.best_peer is None
    assert backward.speedup is None
    assert all(x is not X for x in calls), "the inputs that everyone shares"
    made = len([x for x in calls if x.requires_grad])
    assert made > backward.times["liger"].rounds, "each call goes forward, too"
    (table,) = tables([forward, backward])
    what = "forward and backward in one call, because its forward makes the gradient"
    assert table.notes == (f"cross_entropy backward: liger: {what}",)


def test_who_waits_for_the_gpu() -> None:
    loss = a_case(dataclasses.replace(ADD, name="cross_entropy"))
    assert peers.waits("liger", loss)
    assert not peers.waits("quack", loss)
    assert not peers.waits("liger", a_case())


@pytest.mark.parametrize("name", formulas.TRL)
def test_the_formulas_of_trl_are_those_of_the_ops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulas, "SEQUENCE", 40)
    spec = next(spec for spec in SPECS if spec.name == name)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.3)):
        for case in cases(spec, CPU, dtype, (150, 30)):
            ((_, make),) = peers.makers(case, ("trl",))
            found = outputs(case.sample.call(make(case)))
            for one, other in zip(found, outputs(case.sample.call(spec.op)), strict=True):
                torch.testing.assert_close(one.float(), other, rtol=0, atol=close)


def test_a_step_computes_the_gradients_that_are_timed() -> None:
    spec = next(spec for spec in SPECS if spec.name == "linear_kl")
    case, _ = cases(spec, CPU, torch.float32, (6, 30))
    grads: Any = call_of(case, spec.op, STEP)()
    (grad,) = grads
    assert grad.shape == case.sample.args[0].shape
    assert case.wanted == (0,)


def test_a_function_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    row = a_row(a_case(dataclasses.replace(ADD, name="linear_cross_entropy")), FORWARD, "torch")
    assert row.missing == {"torch": f"torch {torch.__version__} has no F.linear_cross_entropy"}


@pytest.mark.cuda
def test_a_peer_that_waits_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    chosen = Settings(device_clock(gpu), ("eager", "liger"), budget=0.1)
    spec = dataclasses.replace(ADD, name="cross_entropy")
    monkeypatch.setitem(peers.MAKERS, "liger", lambda case: case.spec.composite)
    row = time_small(spec, gpu, torch.float32, chosen, shape=(4, 64), direction=FORWARD)
    assert row is not None
    assert set(row.times) == {OURS, "eager"}
    assert row.missing == {"liger": "waits for the GPU, which a CUDA graph cannot"}


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_the_layer_of_torchao_in_a_graph() -> None:
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    x, weight = (t.bfloat16().requires_grad_() for t in (x, weight))
    layer = torchao.layer_of(weight, emulate=True)
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weight)
    grads = torch.autograd.grad(y.float().square().sum(), (x, weight))
    exact = torch.nn.functional.linear(x, weight)
    assert 1e-3 < (y - exact).norm() / exact.norm() < 0.1
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]


def test_torchao_has_the_layer_in_fp8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [op for op in ("linear", "linear_fp8") if peers.knows("torchao", op)] == ["linear_fp8"]
    monkeypatch.setattr(peers.package, "find_spec", lambda _: object())
    x, weight = (
        torch.randn(size, 40).as_subclass(OnGpu)
        for size in (32, 48)  # 40 is no multiple of 16
    )
    case = dataclasses.replace(
        a_case(dataclasses.replace(ADD, name="linear_fp8")),
        sample=FakeGpuSample("odd", (x, weight)),
    )
    with pytest.raises(peers.Refused, match="multiples of 16"):
        peers.MAKERS["torchao"](case)


class OnGpu(torch.Tensor):
    """A CPU tensor whose ``is_cuda`` is true."""

    is_cuda = True


def test_a_product_in_fp8_is_timed_beside_the_same_work() -> None:
    """On a CPU the peer eager is torch's casts and its product of the values in float32."""
    spec = next(spec for spec in SPECS if spec.name == "linear_fp8")
    for case in cases(spec, CPU, torch.bfloat16, (32, 64)):
        x, weight = case.sample.args
        expected = scaled_product.linear(x, weight, None, None)
        assert torch.equal(peers.eager(case)(x, weight), expected)
        assert not torch.equal(expected, F.linear(x, weight))
    assert peers.eager(a_case(ADD)) is ADD.composite
