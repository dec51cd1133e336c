"""``torchkiln.replace``: rotary position embeddings that a forward calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import rotations
import torch
from rotations import as_llama, rotate_half
from torch import Tensor, nn

import torchkiln
from torchkiln.patch.formula import rotation
from torchkiln.patch.source import angles, rope_calls
from torchkiln.patch.source.rope_calls import rope_of


class Angles(nn.Module):
    """Cos and sin as in Llama."""

    frequencies: Tensor

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.scale: Any = 1.5
        self.register_buffer("frequencies", 2.0 ** -torch.arange(size // 2), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1], device=x.device)[None, :, None]
        with torch.autocast(x.device.type, enabled=False):
            freqs = places.float() * self.frequencies
            emb = torch.cat((freqs, freqs), dim=-1)
            cos = emb.cos() * self.scale
            sin = emb.sin() * self.scale
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class OtherHalves(Angles):
    """Cos and sin whose two halves differ."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies
        other = 2 * freqs
        emb = torch.cat((freqs, other), dim=-1)
        return emb.cos(), emb.sin()


class ChangedInPlace(Angles):
    """Cos and sin whose halves differ, because a copy is changed in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies
        emb = torch.cat((freqs, freqs), dim=-1)
        same = emb.float()
        same[..., 0] = 7
        return emb.cos(), emb.sin()


class ChangedByAssignment(Angles):
    """Cos and sin whose halves differ, because ``+=`` changes a variable that is not returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies
        emb = torch.cat((freqs, freqs), dim=-1)
        same = emb.float()
        same += torch.arange(emb.shape[-1])
        return emb.cos(), emb.sin()


class Attention(nn.Module):
    """Products of rotated queries and keys."""

    def __init__(self, angles: nn.Module | None = None) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 32), nn.Linear(16, 16)
        self.angles = Angles() if angles is None else angles

    def change(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        cos, sin = self.angles(x)
        cos = self.change(cos)
        q, k = as_llama(q, k, cos, sin)
        return torch.cat([q.mT.flatten(1), k.mT.flatten(1)], -1)


class InFront(Attention):
    """The dimension of heads follows that of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 8))
        k = self.k(x).unflatten(-1, (-1, 8))
        cos, sin = self.angles(x)
        q, k = as_llama(q, k, cos, sin, unsqueeze_dim=2)
        return torch.cat([q.flatten(1), k.flatten(1)], -1)


class OfAVariable(Attention):
    """The dimension is a variable, not a constant."""

    def forward(self, x: Tensor, dim: int = 1) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        cos, sin = self.angles(x)
        q, k = as_llama(q, q, cos, sin, unsqueeze_dim=dim)
        return q + k


def as_rotated_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q, k * cos.unsqueeze(1) + rotate_half(k) * sin.unsqueeze(1)


class Squared(Attention):
    def change(self, x: Tensor) -> Tensor:
        return x.square()


class Added(Attention):
    def change(self, x: Tensor) -> Tensor:
        return x.add_(torch.arange(x.shape[-1]))


class Viewed(Attention):
    def change(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1]]


class Copied(Attention):
    def change(self, x: Tensor) -> Tensor:
        return copy.deepcopy(x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of each rotation that the op computes in a replaced forward, after replace()."""
    found: list[torch.dtype] = []
    rotated = rotation.Rotation.rotated

    def counted(self: rotation.Rotation, q: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        found.append(q.dtype)
        return rotated(self, q, *args)

    monkeypatch.setattr(rotation.Rotation, "rotated", counted)
    return found


def made(cls: Callable[..., nn.Module], *args: Any) -> Any:
    torch.manual_seed(0)
    return cls(*args)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 16, dtype=dtype)


@pytest.mark.parametrize("make", [Attention, InFront])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_results_gradients_and_undo(
    make: type[nn.Module], dtype: torch.dtype, calls: list[torch.dtype]
) -> None:
    model, x = made(make).to(dtype), batch(dtype)

    def outcome() -> list[Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), [*model.q.parameters()])]

    expected = outcome()
    report = torchkiln.replace(model, only="rope")
    settings = {row.name: (row.kind, row.now) for row in report.changed}
    assert settings == {"": ("rope", "rope"), "angles": ("rope", "cos and sin for rope")}
    row = report[""]
    assert row.error_was is not None
    assert row.error_now is not None
    assert row.error_now <= row.error_was
    assert not calls
    found = outcome()
    assert calls == [dtype]
    error = 1e-9 if dtype == torch.float64 else 0.02
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one, other, rtol=error, atol=error * float(other.detach().abs().max())
        )
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), found[0])
    assert len(calls) == 3
    report.undo()
    assert type(model) is make
    assert torch.equal(model(x), expected[0])
    assert len(calls) == 3


@pytest.mark.parametrize("make", [OtherHalves, ChangedInPlace, ChangedByAssignment])
def test_angles_that_may_differ_stay(make: type[nn.Module]) -> None:
    model, x = made(Attention, make()), batch()
    expected = model(x)
    report = torchkiln.replace(model, only="rope")
    assert not report.changed
    assert report[""].reason == "no module is known to make cos and sin that have each factor twice"
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("make", [Squared, Added, Viewed, Copied])
def test_other_tensors_than_those_of_the_module_run_as_before(
    make: type[nn.Module], calls: list[torch.dtype]
) -> None:
    model, x = made(make), batch()
    expected = model(x)
    assert torchkiln.replace(model, only="rope")[""].changed
    assert torch.equal(model(x), expected)
    assert not calls


def test_a_scale_that_is_a_tensor(calls: list[torch.dtype]) -> None:
    model, x = made(Attention), batch()
    torchkiln.replace(model, only="rope")
    model.angles.scale = torch.arange(8.0)
    expected = made(Attention)
    expected.angles.scale = model.angles.scale
    assert torch.equal(model(x), expected(x))
    assert not calls
    model.angles.scale = 2
    model(x)
    assert calls


def change_result(_: nn.Module, __: Any, found: tuple[Tensor, Tensor]) -> None:
    found[0].mul_(torch.arange(8))


def test_inference_mode_and_changed_results(calls: list[torch.dtype]) -> None:
    model, x = made(Attention), batch()
    torchkiln.replace(model, only="rope")
    with torch.inference_mode():
        model(x)
    assert not calls  # inference tensors have no counter of changes
    other = made(Attention)
    for one in (model, other):
        one.angles.register_forward_hook(change_result)
    assert torch.equal(model(x), other(x))
    assert not calls


def test_a_changed_function(calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, x = made(Attention), made(Attention), batch()
    torchkiln.replace(model, only="rope")
    changes = (vars(rotations), "rotate_half", torch.neg), (globals(), "as_llama", as_rotated_keys)
    for place, name, function in changes:
        with monkeypatch.context() as patch:
            patch.setitem(place, name, function)
            assert torch.equal(model(x), other(x))
    assert not calls
    model(x)
    assert calls


def test_other_layouts_and_dtypes(calls: list[torch.dtype]) -> None:
    torchkiln.replace(made(Attention), only="rope")  # compares the function with the op
    rotate = rope_of(as_llama)
    cos = torch.randn(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.noted((cos.clone(), cos.clone()), "halves")
    (wanted, _) = angles.noted((cos.clone(), cos.clone()), "halves")
    wanted.requires_grad_()
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    wide = torch.randn(2, 4, 5, 16)[..., ::2]
    given: dict[str, tuple[bool, tuple[Any, ...]]] = {
        "plain": (True, (q, k, cos, sin)),
        "turned": (
            True,
            (q.mT.contiguous().mT.transpose(1, 2).contiguous().transpose(1, 2), k, cos, sin),
        ),
        "one head": (True, (q[:, :1], k[:, :1], cos, sin)),
        "one token": (False, (q[:, :, :1], k[:, :, :1], cos[:, :1], sin[:, :1])),
        "expanded": (False, (q[:, :1].expand(2, 4, 5, 8), k, cos, sin)),
        "steps": (False, (wide, k, cos, sin)),
        "columns": (False, (q.mT.contiguous().mT, k, cos, sin)),
        "batches last": (
            False,
            (q.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), k, cos, sin),
        ),
        "half": (False, (q.half(), k.half(), cos, sin)),
        "mixed": (False, (q, k.double(), cos, sin)),
        "broadcast": (False, (q[:1], k[:1], cos, sin)),
        "unknown": (False, (q, k, cos.clone(), sin)),
        "another rank": (False, (q, k[0, 0], cos, sin)),
        "a gradient": (False, (q, k, wanted, sin)),
    }
    for name, (is_ours, args) in given.items():
        calls.clear()
        found, expected = rotate(*args), as_llama(*args)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride(), name
            assert one.dtype == other.dtype, name
        assert bool(calls) == is_ours, name


def test_autocast_keeps_the_dtype(calls: list[torch.dtype]) -> None:
    for dtype, is_ours in ((torch.float32, False), (torch.bfloat16, True)):
        model, x = made(Attention).to(dtype), batch(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(x)
            torchkiln.replace(model, only="rope")
            calls.clear()
            found = model(x)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert bool(calls) == is_ours


def test_exported_and_traced_models_run_as_before(calls: list[torch.dtype]) -> None:
    model, x = made(Attention), batch()
    expected = model(x)
    torchkiln.replace(model, only="rope")
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert not calls
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        assert torch.equal(torch.jit.trace(model, (x,))(x), expected)


def test_transforms_run_as_before(calls: list[torch.dtype]) -> None:
    model, x = made(Attention), batch()
    expected = torch.func.vmap(model)(x[None])
    torchkiln.replace(model, only="rope")
    assert torch.equal(torch.func.vmap(model)(x[None]), expected)
    assert not calls


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool, calls: list[torch.dtype]) -> None:
    model, x = made(Attention).double(), batch(torch.float64).requires_grad_()
    torchkiln.replace(model, only="rope")
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert len(calls) == 3


def test_kinds_skipped_modules_and_exact() -> None:
    for options in ({"only": "norm"}, {"exact": True}, {"skip": ["*"]}):
        changed = torchkiln.replace(made(Attention), **options).changed
        assert not any(row.kind == "rope" for row in changed)
    row = torchkiln.replace(made(Attention), exact=True)[""]
    assert (row.kind, row.reason) == ("rope", "not bitwise equal")
    report = torchkiln.replace(made(Attention), skip=["angles"])
    assert report[""].reason.startswith("no module is known")
    report = torchkiln.replace(made(Attention), dry_run=True)
    assert report[""].outcome == report["angles"].outcome == "would replace"
    row = torchkiln.replace(made(OfAVariable))[""]
    assert row.reason == "as_llama: its further arguments are no constants"


def test_an_example_decides_by_the_time_of_the_model() -> None:
    report = torchkiln.replace(made(Attention), only="rope", example=batch())
    assert report.seconds_now is not None
    assert report[""].reason in {"", "the model is slower on the example"}


def test_known_angles_are_not_kept() -> None:
    before = len(angles.KNOWN)
    cos, sin = angles.noted((torch.ones(2), torch.ones(2)), "halves")
    assert angles.factors_of(cos) == angles.factors_of(sin) == "halves"
    del cos, sin
    assert len(angles.KNOWN) == before


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_search_in_other_modes(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Attention(), nn.LayerNorm(8))
    expected = [row.now for row in torchkiln.replace(model, dry_run=True).rows]
    monkeypatch.setattr(rope_calls, "KNOWN", type(rope_calls.KNOWN)())
    with mode():
        report = torchkiln.replace(model)
    assert [row.now for row in report.rows] == expected
    assert "0" in {row.name for row in report.changed}
