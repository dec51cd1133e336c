"""The provider of vLLM's operators, against a stand-in for vLLM's module ``ir``.

The stand-in checks a registration as vLLM 0.33 does: the schema of the function, the parameters of
the condition, and one registration for each provider.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.hub import vllm


class Op:
    """A stand-in for vLLM's operators: providers by name, checked against the native function."""

    def __init__(self, native: Callable[..., Any], *, inplace: bool) -> None:
        self.native = native
        self.inplace = inplace
        self.impls: dict[str, dict[str, Any]] = {}

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            assert provider not in self.impls
            assert self.inplace or not inplace
            assert supports_args is not None
            for one in (function, supports_args):
                if parameters(one) != parameters(self.native):
                    raise ValueError(f"{provider}: another signature")
            infer = torch.library.infer_schema
            if infer(function, mutates_args=[]) != infer(self.native, mutates_args=[]):
                raise ValueError(f"{provider}: another schema")
            self.impls[provider] = {"call": function, "takes": supports_args, "on": supported}
            return function

        return register


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def native_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    assert variance_size is None
    rows = x.float()
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    return (rows if weight is None else rows.to(weight.dtype) * weight).to(x.dtype)


def native_sum(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    total = (x.float() + x_residual.float()).to(x.dtype)
    return native_norm(total, weight, epsilon, variance_size), total


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The operators of the stand-in, which is installed as the module ``vllm``."""
    package, ir, ops = (ModuleType(name) for name in ("vllm", "vllm.ir", "vllm.ir.ops"))
    ops.rms_norm = Op(native_norm, inplace=False)  # type: ignore[attr-defined]
    ops.fused_add_rms_norm = Op(native_sum, inplace=True)  # type: ignore[attr-defined]
    package.ir, ir.ops = ir, ops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    return ops


def test_the_plug_in_is_found_and_needs_no_vllm() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "torchkiln")
    assert point.load() is vllm.register


def test_a_second_registration_changes_nothing(ops: Any) -> None:
    vllm.register()
    before = dict(ops.rms_norm.impls)
    vllm.register()
    assert ops.rms_norm.impls == before
    assert ops.rms_norm.impls["torchkiln"]["on"] == torch.cuda.is_available()
    assert set(ops.fused_add_rms_norm.impls) == {"torchkiln"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_results_are_those_of_vllm(
    ops: Any, device: torch.device, dtype: torch.dtype, has_weight: bool
) -> None:
    """Results may differ by a step in 1 % of the elements: sums of squares have another order."""
    vllm.register()
    x, other = (torch.randn(64, 512, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(512, device=device).to(dtype) if has_weight else None
    norm = ops.rms_norm.impls["torchkiln"]
    assert norm["takes"](x, weight, 1e-6)
    found, expected = norm["call"](x, weight, 1e-6), native_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    if dtype != torch.float32:
        assert (found != expected).float().mean() < 0.01
    total = ops.fused_add_rms_norm.impls["torchkiln"]
    assert total["takes"](x, other, weight, 1e-6)
    expected, summed = native_sum(x, other, weight, 1e-6)
    results = total["call"](x, other, weight, 1e-6)
    assert results[0] is x
    assert results[1] is other
    torch.testing.assert_close(x, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(other, summed)


def test_calls_with_another_result_are_not_taken(ops: Any) -> None:
    vllm.register()
    takes = ops.rms_norm.impls["torchkiln"]["takes"]
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert not takes(x, torch.ones(8), 1e-6)  # the weight's dtype differs
    assert not takes(x, None, 1e-6, 4)
    assert not takes(x.long(), None, 1e-6)
    takes = ops.fused_add_rms_norm.impls["torchkiln"]["takes"]
    assert not takes(x, x[:, ::2].repeat(1, 2).T.contiguous().T, None, 1e-6)
    assert not takes(x, x.float(), None, 1e-6)


def test_a_graph_contains_the_op(ops: Any) -> None:
    """Tracing the provider's function, as vLLM does, gives a graph with torchkiln's op."""
    vllm.register()
    call = ops.rms_norm.impls["torchkiln"]["call"]
    traced = make_fx(lambda x, weight: call(x, weight, 1e-6), tracing_mode="fake")
    graph = traced(torch.ones(2, 8), torch.ones(8))
    assert "torchkiln.rms_norm" in graph.code


def test_another_signature_is_left_alone(ops: Any, caplog: pytest.LogCaptureFixture) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    ops.rms_norm = Op(norm, inplace=False)
    del ops.fused_add_rms_norm
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert not ops.rms_norm.impls
    assert "torchkiln.hub.vllm: rms_norm: ValueError: torchkiln: another signature" in caplog.text


def refusing(error: type[Exception]) -> Any:
    """An operator whose registration raises ``error``."""

    def register_impl(*_: Any, **__: Any) -> Any:
        raise error("refused")

    return SimpleNamespace(impls={}, register_impl=register_impl)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("no package", "ModuleNotFoundError"),
        ("no ir", "ImportError"),
        ("no ops", "AttributeError"),
        ("no impls", "AttributeError"),
        ("assertion", "AssertionError: refused"),
        ("keyword", "TypeError: refused"),
    ],
)
def test_nothing_stops_vllm(
    ops: Any,
    broken: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = sys.modules["vllm"]
    if broken == "no package":
        monkeypatch.setitem(sys.modules, "vllm", None)
    elif broken == "no ir":
        del package.ir
    elif broken == "no ops":
        del package.ir.ops
    elif broken == "no impls":
        ops.rms_norm = SimpleNamespace()
    else:
        ops.rms_norm = refusing(AssertionError if broken == "assertion" else TypeError)
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert f"torchkiln.hub.vllm: rms_norm: {words}" in caplog.text
    is_found = broken in ("no impls", "assertion", "keyword")
    assert ("torchkiln" in ops.fused_add_rms_norm.impls) == is_found  # the other is registered
