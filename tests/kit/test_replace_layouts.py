"""Replaced modules whose arguments are transposed in memory."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from replace_models import OffsetRms, PlainLayer, Rms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchkiln
from torchkiln.patch.source import residual


def refuse(*_: Any) -> None:
    raise AssertionError("the original forward ran")


@pytest.mark.parametrize("cls", [OffsetRms, Rms, PlainLayer])
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_norms_of_permuted_heads(
    cls: type[nn.Module], columns: int, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for queries that are normalized after a transpose: the op runs, in the same strides."""
    torch.manual_seed(0)
    norm = cls(16).double()
    rows = torch.randn(2, 5, 3, columns, dtype=torch.float64)
    x = rows[..., :16].permute(*order, 3).requires_grad_()
    weights = torch.randn(x.shape, dtype=torch.float64)

    def results() -> tuple[Tensor, ...]:
        y = norm(x)
        return y, *torch.autograd.grad((y * weights).sum(), [x, *norm.parameters()])

    before = results()
    torchkiln.replace(norm)
    monkeypatch.setattr(cls, "forward", refuse)
    after = results()
    assert after[0].stride() == before[0].stride()
    for found, expected in zip(after, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class ContiguousRms(Rms):
    """A norm whose result is contiguous, whatever its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class ReversedRms(Rms):
    """A norm whose statistics come first, and give the result their strides."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny).contiguous()
        return scale * x * self.gamma


class TrainedRms(Rms):
    """A norm whose result is contiguous in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous() if self.training else x)


class Float32Rms(Rms):
    """A norm whose result is contiguous in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous() if x.dtype == torch.float32 else x)


class RankRms(Rms):
    """A norm whose result is contiguous for arguments of four dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous() if x.dim() == 4 else x)


@pytest.mark.parametrize("cls", [ContiguousRms, ReversedRms, TrainedRms, Float32Rms, RankRms])
def test_norms_with_other_strides(cls: type[nn.Module]) -> None:
    norm = cls(16)
    x = torch.randn(2, 5, 3, 16).transpose(1, 2)
    before = norm(x)
    assert before.stride() != x.stride()
    torchkiln.replace(norm)
    after = norm(x)
    assert after.stride() == before.stride()
    assert torch.equal(after, before)


def test_a_permuted_result_can_be_changed_in_place() -> None:
    norm, x = Rms(16), torch.randn(2, 5, 3, 16).transpose(1, 2)
    torchkiln.replace(norm)
    with torch.no_grad():
        y = norm(x)
    y += nn.Parameter(torch.ones(16))
    assert y.requires_grad


@pytest.mark.parametrize(
    "x", [torch.randn(6, 4, 32)[..., :16], torch.randn(4, 6, 16).transpose(0, 1)]
)
def test_permuted_norms_of_symbolic_sizes(x: Tensor) -> None:
    norm = Rms(16)
    torchkiln.replace(norm)
    compiled = torch.compile(norm, dynamic=True, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), norm(x))
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as fakes:
        assert norm(fakes.from_tensor(x)).shape == x.shape


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 5, 16).mT.contiguous().mT,
        torch.randn(5, 3, 16).expand(2, 5, 3, 16).transpose(0, 1),
        torch.randn(200).as_strided((2, 4, 3, 16), (1, 7, 7, 1)),
    ],
    ids=["columns", "expanded", "overlapping"],
)
def test_norms_of_other_layouts_run_the_original(x: Tensor) -> None:
    norm = OffsetRms(16)
    before = norm(x)
    assert torchkiln.replace(norm)[""].changed
    after = norm(x)
    assert after.stride() == before.stride()
    assert torch.equal(after, before)


class Layer(nn.Module):
    """A layer of an encoder whose input may be transposed, as behind convolutions in Whisper."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mix, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mix(self.norm_1(x))
        x = residual + x
        residual = x
        x = self.norm_2(x)
        x = self.mlp(x)
        return residual + x


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that the op adds, on the CPU, too."""
    found: list[torch.Size] = []

    def add(a: Tensor, b: Tensor) -> Tensor:
        found.append(a.shape)
        return torchkiln.add(a, b)

    monkeypatch.setattr(residual, "add", add)
    monkeypatch.setattr(residual, "TRANSPOSING", ("cpu",))
    return found


def test_sums_with_a_transposed_residual(sums: list[torch.Size]) -> None:
    """Both sums of a layer are bitwise torch's, in the strides of torch's."""
    layer = Layer().bfloat16()
    x = torch.randn(2, 16, 24, dtype=torch.bfloat16).mT.requires_grad_()

    def results() -> tuple[Tensor, ...]:
        y = layer(x)
        return y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])

    before = results()
    assert before[0].stride() == x.stride()
    assert torchkiln.replace(layer)[""].now == "add_layer_norm at norm_2"
    after = results()
    assert sums == [x.shape, x.shape]
    assert after[0].stride() == before[0].stride()
    for found, expected in zip(after, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    layer(x.detach().contiguous())
    torch.compile(layer, backend="eager")(x)
    assert len(sums) == 2


class Between(Layer):
    """A layer with a sum between two wide layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(512, 512), nn.Linear(512, 512)
        self.norm_1 = nn.LayerNorm(512)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        y = q + x
        y = y + self.k(x)
        return self.norm_1(y)


def test_sums_between_layers_of_one_input() -> None:
    report = torchkiln.replace(Between())
    assert report[""].now == "add_layer_norm at norm_1, one sum of gradients for q, k"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2.5),
        (torch.ones(3, 4), 2),
        (torch.ones(4, 3).T, torch.ones(4)),
        (torch.ones(4, 3).T, torch.ones(3, 4, dtype=torch.float64)),
        (torch.ones(4, 3, dtype=torch.int64).T, torch.ones(3, 4, dtype=torch.int64)),
        (torch.ones(3, 3), torch.eye(3).to_sparse()),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (nn.Parameter(torch.ones(4, 3).T), torch.ones(3, 4)),
        (torch.randn(4, 3, 16).transpose(0, 1)[..., :8], torch.randn(3, 4, 8)),
        (torch.randn(4, 1, 8).expand(4, 3, 8).transpose(0, 1), torch.randn(3, 4, 8)),
    ],
)
def test_other_sums_are_torchs(a: Any, b: Any, sums: list[torch.Size]) -> None:
    found, expected = residual.plus(a, b), a + b
    assert not sums
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert torch.equal(found.to_dense(), expected.to_dense())
        assert found.dtype == expected.dtype
        assert found.is_sparse or found.stride() == expected.stride()
    else:
        assert found == expected


def test_derivatives_of_a_transposed_sum(sums: list[torch.Size]) -> None:
    a, b = torch.randn(20, 17).T, torch.randn(17, 20)
    with forward_ad.dual_level():
        dual = residual.plus(forward_ad.make_dual(a, a), b)
        tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    assert torch.equal(tangent, a)
    mapped = torch.func.vmap(residual.plus)(torch.stack([a, a]), torch.stack([b, b]))
    assert torch.equal(mapped[0], a + b)
    assert sums
