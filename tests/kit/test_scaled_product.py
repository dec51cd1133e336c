"""torch's layer in E4M3, beside which the speed of linear_fp8 is compared at small sizes."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.patch.fp8 import missing
from torchkiln.testing import scaled_product
from torchkiln.testing.specs.quantize import LINEAR_FP8, layer

CPU = torch.device("cpu")


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("shape", [(128, 256), (33, 130), (1, 3), (200, 128)])
def test_casts_are_those_of_the_op(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    x[0, :2] = 0
    data, scale = scaled_product.cast(x, 1)
    rows, weight = torchkiln.quantize(x), torchkiln.quantize_weight(x)
    assert torch.equal(data.view(torch.uint8), rows.data.view(torch.uint8))
    assert torch.equal(scale, rows.scale)
    for one, other in zip(scaled_product.cast_weight(x), weight, strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("is_given", [False, True])
def test_the_layer_is_that_of_the_op(*, is_given: bool) -> None:
    shapes, grad = ((2, 33, 130), (65, 130), (65,)), torch.randn(2, 33, 65)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in shapes)
    given = torchkiln.quantize_weight(weight) if is_given else None
    found = scaled_product.linear(x, weight, bias, given)
    expected = torchkiln.linear_fp8(x, weight, bias)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y, (x, weight, bias), grad) for y in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(256, 384, 128), (33, 130, 65), (1, 7, 3)])
def test_the_layer_on_a_gpu(shape: tuple[int, int, int]) -> None:
    if reason := missing("cuda", torch.cuda.current_device()):
        pytest.skip(reason)
    rows, k, n = shape
    x, weight = (torch.randn(one, k, device="cuda", requires_grad=True) for one in (rows, n))
    grad = torch.randn(rows, n, device="cuda")
    expected = torchkiln.linear_fp8(x, weight)
    of_expected = torch.autograd.grad(expected, (x, weight), grad)
    for given in (None, torchkiln.quantize_weight(weight)):
        found = scaled_product.linear(x, weight, None, given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (x, weight), grad), of_expected)


def test_operands_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in steps of 16, scales of a block column adjacent, four squares at a time."""
    seen: list[Tensor] = []

    def scaled_mm(a: Tensor, b: Tensor, *rest: object, output_dtype: torch.dtype) -> Tensor:
        seen.extend((a, b, *(one for one in rest if isinstance(one, Tensor))))
        return torch.zeros(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    x, weight = (torch.randn(rows, 390).as_subclass(OnGpu) for rows in (33, 130))
    y = scaled_product.linear(x, weight, None, None)
    assert y.shape == (33, 130)
    left, right, scale, squares = seen
    assert (left.shape, right.shape) == ((48, 400), (400, 144))
    assert left.is_contiguous()
    assert right.T.is_contiguous()
    assert (scale.shape, scale.stride()) == ((48, 4), (1, 48))
    assert (squares.shape, squares.stride()) == ((4, 2), (1, 4))


@pytest.mark.parametrize(
    ("rows", "n", "k", "is_compared_with_half"),
    [
        (4096, 4096, 4096, True),
        (64, 4096, 4096, False),
        (4096, 4104, 4096, False),
        (8192, 1024, 1024, False),
    ],
)
def test_peers_follow_replace(
    rows: int, n: int, k: int, is_compared_with_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where replace gives a layer to FP8, the op is timed beside torch's in half precision."""
    seen: list[str] = []
    monkeypatch.setattr(F, "linear", lambda *_: seen.append("half"))
    monkeypatch.setattr(scaled_product, "linear", lambda *_: seen.append("fp8"))
    x = torch.empty(rows, k, device="meta").as_subclass(OnGpu)
    layer.usual(x, torch.empty(n, k, device="meta"))
    assert seen == ["half" if is_compared_with_half else "fp8"]


def test_the_peer_on_a_cpu_quantises(monkeypatch: pytest.MonkeyPatch) -> None:
    """replace gives no layer on a CPU to FP8, so that torch's casts are part of its time."""
    monkeypatch.setattr(F, "linear", lambda *_: pytest.fail("torch's layer in the dtype of x"))
    monkeypatch.setattr(scaled_product, "linear", lambda x, *_: x)
    x = torch.empty(4096, 4096, device="meta")
    assert layer.usual(x, x) is x


def test_drawn_layers() -> None:
    assert LINEAR_FP8.drawn is not None
    wide, most = 0, 1 << 22
    for seed in range(40):
        sample = LINEAR_FP8.drawn(CPU, torch.bfloat16, Random(seed), most)
        x, weight = sample.args
        assert max(x.numel(), weight.numel(), len(x) * len(weight)) <= most
        assert sample.kwargs["quantized"].data.shape == weight.shape
        wide += weight.shape[1] >= min(1024, math.isqrt(most))
    assert 15 <= wide <= 35
