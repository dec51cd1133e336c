"""``torchkiln.replace``: rotary position embeddings that a forward calls."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.patch.formula import rotation, rotation_proof
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.source import angles
from torchkiln.patch.source.rope_calls import rope_of

SCALE = torch.ones(1)
"""A tensor that is no argument."""


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def as_llama(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def as_gpt_neox(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = cos.shape[-1]
    q, q_pass = q[..., :size], q[..., size:]
    k, k_pass = k[..., :size], k[..., size:]
    q, k = as_llama(q, k, cos, sin)
    return torch.cat([q, q_pass], dim=-1), torch.cat([k, k_pass], dim=-1)


def as_cohere(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, cos, sin = q.float(), k.float(), cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin
    return q.to(dtype), k.to(dtype)


def as_glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1)
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


def of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    a, b = q.chunk(2, -1)
    c, d = k.chunk(2, -1)
    q = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return q, torch.cat([c * cos - d * sin, d * cos + c * sin], -1)


FUNCTIONS: dict[Callable[..., Any], dict[tuple[int, int], tuple[int, bool, str, bool, bool]]] = {
    as_llama: {
        (4, 3): (-3, False, "halves", False, False),
        (4, 2): (-2, False, "halves", False, False),
        (3, 2): (-2, False, "halves", False, False),
    },
    as_gpt_neox: {
        (4, 3): (-3, False, "halves", True, True),
        (4, 2): (-2, False, "halves", True, True),
        (3, 2): (-2, False, "halves", True, True),
    },
    as_cohere: {
        (4, 3): (-3, True, "neighbours", False, False),
        (4, 2): (-2, True, "neighbours", False, False),
        (3, 2): (-2, True, "neighbours", False, False),
    },
    as_glm: {
        (4, 3): (-3, True, "first", False, False),
        (4, 2): (-2, True, "first", False, False),
        (3, 2): (-2, True, "first", False, False),
    },
    of_pairs: {
        (4, 2): (-3, False, "pairs", False, True),
        (3, 2): (-3, False, "pairs", False, True),
    },
}


def proofs(function: Any) -> dict[tuple[int, int], rotation.Rotation]:
    return rotation_proof.Prover(function, function).rotations()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_formulas(function: Callable[..., Any]) -> None:
    """Dimension of the heads, order of pairs, columns of cos, part of a head, layout."""
    found = proofs(function)
    settings = {ranks: (*one.form, one.is_partial, one.is_dense) for ranks, one in found.items()}
    assert settings == FUNCTIONS[function]


def test_a_constant_names_the_dimension_of_the_heads() -> None:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return as_llama(q, k, cos, sin, 2)

    found = rotation_proof.Prover(rotate, as_llama).rotations()  # type: ignore[arg-type]
    assert {ranks: one.form.heads_dim for ranks, one in found.items()} == {(4, 3): -2}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounds_once_and_is_as_close_to_float64(
    function: Callable[..., Any], dtype: torch.dtype
) -> None:
    for ranks, one in proofs(function).items():
        for dtypes in (pair for pair in one.dtypes if pair[0] == dtype):
            size = rotation.Sizes(2, 8, 4, 64, 64, 64)
            given = rotation.sample(one.form, ranks, size).cast(dtypes)
            truth = one.rotated(*given.cast((torch.float64, torch.float64)))
            for was, now, exact in zip(function(*given), one.rotated(*given), truth, strict=True):
                assert was.dtype == now.dtype == dtype
                once = exact.to(dtype)
                errors = [float((x.double() - exact).square().mean()) for x in (was, now, once)]
                assert errors[1] <= errors[0] * 1.001
                if dtype != torch.float32:
                    assert errors[1] <= errors[2] * 1.001


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("order", rotation.ORDERS)
def test_results_have_the_layout_of_the_function(function: Callable[..., Any], order: str) -> None:
    for ranks, one in proofs(function).items():
        given = rotation.sample(one.form, ranks, rotation.WHOLE[0], order=order)
        found, expected = one.rotated(*given), function(*given)
        assert [x.stride() for x in found] == [x.stride() for x in expected]


def clamped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.clamp(-1e5, 1e5), k, cos, sin)


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = as_llama(q, k, cos, sin)
    return q * 1.0, k


def of_a_size(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.shape[1] > 100:
        return q, k
    return as_llama(q, k, cos, sin)


def of_a_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q[..., :128], k, cos, sin)


def of_a_tuple(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama((q, k)[q.shape[1] // 99], k, cos, sin)


def of_a_device(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama((q, k)[q.is_cuda], k, cos, sin)


def detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k.detach(), cos, sin)


def without_gradients(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return as_llama(q, k, cos, sin)


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k, cos, -sin)


def rounded(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.bfloat16().to(q.dtype), k, cos, sin)


def with_a_global(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = as_llama(q, k, cos, sin)
    return q * SCALE, k


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k, cos.neg_().neg_(), sin)


def without_dimensions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.squeeze(), k, cos, sin)


def of_bits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.view(torch.int64).view(q.dtype), k, cos, sin)


def written(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k, torch.neg(torch.neg(cos), out=torch.neg(cos)), sin)


def of_three(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (*as_llama(q, k, cos, sin), q)


OTHERS = {
    clamped: "it calls clamp",
    scaled: "it computes with a number",
    of_a_size: "it has a branch",
    of_a_part: "a constant that may be a size",
    of_a_tuple: "it has a branch",
    of_a_device: "it has a branch",
    detached: "it calls detach",
    without_gradients: "it calls _NoParamDecoratorContextManager",
    backwards: "it computes another formula",
    rounded: "it makes a copy in another dtype",
    with_a_global: "it uses a tensor that is no argument",
    in_place: "it calls neg_",
    without_dimensions: "it calls squeeze",
    of_bits: "it reads bits in another dtype",
    written: "it writes to a tensor",
    of_three: "it computes another formula",
}


@pytest.mark.parametrize("function", OTHERS)
def test_other_formulas_stay(function: Callable[..., Any]) -> None:
    with pytest.raises(NoFormulaError, match=OTHERS[function]):
        proofs(function)


class Angles(nn.Module):
    """Cos and sin as of Llama."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.scale: Any = 1.5
        self.register_buffer("frequencies", 2.0 ** -torch.arange(size // 2), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1], device=x.device)[None, :, None]
        with torch.autocast(x.device.type, enabled=False):
            freqs = places.float() * self.frequencies  # type: ignore[operator]
            emb = torch.cat((freqs, freqs), dim=-1)
            cos = emb.cos() * self.scale
            sin = emb.sin() * self.scale
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class OtherHalves(Angles):
    """Angles with two different halves."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies  # type: ignore[operator]
        other = 2 * freqs
        emb = torch.cat((freqs, other), dim=-1)
        return emb.cos(), emb.sin()


class ChangedInPlace(Angles):
    """Angles whose halves differ after a change in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies  # type: ignore[operator]
        emb = torch.cat((freqs, freqs), dim=-1)
        same = emb.float()
        same[..., 0] = 7
        return emb.cos(), emb.sin()


class ChangedByAssignment(Angles):
    """Angles whose halves differ after a sum in place, of which no name is left."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies  # type: ignore[operator]
        emb = torch.cat((freqs, freqs), dim=-1)
        same = emb.float()
        same += torch.arange(emb.shape[-1])
        return emb.cos(), emb.sin()


class Attention(nn.Module):
    """Scores of rotated queries and keys."""

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
    """Heads behind the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 8))
        k = self.k(x).unflatten(-1, (-1, 8))
        cos, sin = self.angles(x)
        q, k = as_llama(q, k, cos, sin, unsqueeze_dim=2)
        return torch.cat([q.flatten(1), k.flatten(1)], -1)


class OfAVariable(Attention):
    """A dimension that is no constant."""

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
    """The dtypes of the calls of the op by replaced forwards, after the search."""
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
    assert not calls  # changes of such tensors are not counted
    other = made(Attention)
    for one in (model, other):
        one.angles.register_forward_hook(change_result)
    assert torch.equal(model(x), other(x))
    assert not calls


def test_a_changed_function(calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, x = made(Attention), made(Attention), batch()
    torchkiln.replace(model, only="rope")
    for name, function in (("rotate_half", torch.neg), ("as_llama", as_rotated_keys)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, function)
            assert torch.equal(model(x), other(x))
    assert not calls
    model(x)
    assert calls


def test_other_layouts_and_dtypes(calls: list[torch.dtype]) -> None:
    torchkiln.replace(made(Attention), only="rope")  # proves the function
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


def test_compiles_in_one_graph(calls: list[torch.dtype]) -> None:
    model, x = made(Attention), batch()
    expected = model(x)
    torchkiln.replace(model, only="rope")
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert not calls
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
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


def test_the_sizes_that_are_tried_differ() -> None:
    for sizes in itertools.chain([rotation.WHOLE, rotation.PARTIAL]):
        assert all(a != b for a, b in zip(*sizes, strict=True))


SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

MODELS: dict[str, tuple[dict[str, Any], tuple[int, bool, str, bool, bool]]] = {
    "Llama": (GROUPED, (-3, False, "halves", False, False)),
    "Qwen2": (GROUPED, (-3, False, "halves", False, False)),
    "Qwen3": ({**GROUPED, "head_dim": 8}, (-3, False, "halves", False, False)),
    "Gemma": ({**GROUPED, "head_dim": 8}, (-3, False, "halves", False, False)),
    "GPTNeoX": ({**SIZES, "rotary_pct": 0.5}, (-3, False, "halves", True, True)),
    "Glm": ({**GROUPED, "head_dim": 8}, (-3, True, "first", True, True)),
    "Cohere": (GROUPED, (-3, True, "neighbours", False, False)),
}
"""Settings, and dimension of the heads, order, columns of cos, part and layout of the rotation."""


def causal(name: str, settings: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The forms of the rotations by the op in replaced forwards."""
    found: list[tuple[Any, ...]] = []
    rotated = rotation.Rotation.rotated

    def kept(self: rotation.Rotation, *args: Tensor) -> tuple[Tensor, Tensor]:
        found.append((*self.form, self.is_partial, self.is_dense))
        return rotated(self, *args)

    monkeypatch.setattr(rotation.Rotation, "rotated", kept)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_with_caches_and_checkpoints(name: str, forms: list[tuple[Any, ...]]) -> None:
    settings, form = MODELS[name]
    model = causal(name, settings)
    tokens = torch.randint(2, 99, (2, 12))
    options = {"max_new_tokens": 6, "do_sample": False}
    caches = (None, "static")

    def outcome() -> list[Tensor]:
        found = model(tokens, labels=tokens)
        found.loss.backward()
        gradients = [x.grad for x in model.parameters()]
        model.zero_grad()
        return [found.logits.detach(), *gradients]

    def texts() -> list[Tensor]:
        return [model.generate(tokens, cache_implementation=c, **options) for c in caches]

    expected, expected_texts = outcome(), texts()
    report = torchkiln.replace(model, only="rope")
    assert [row.now for row in report.changed].count("rope") == 2
    for checkpoints in (False, True):
        if checkpoints:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()
            model.train()
        forms.clear()
        for one, other in zip(outcome(), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert forms == [form] * (4 if checkpoints else 2)
    model.eval()
    forms.clear()
    assert all(map(torch.equal, texts(), expected_texts))
    assert len(forms) == 2 * 2 * 6
    report.undo()
    assert torch.equal(outcome()[0], expected[0])


def test_rotations_by_several_positions_stay() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen2VLTextConfig"):
        pytest.skip("this version of transformers has no such class")
    config = transformers.Qwen2VLTextConfig(**GROUPED, rope_parameters=SECTIONS)
    model = made(transformers.Qwen2VLTextModel, config).eval()
    tokens = torch.randint(2, 99, (2, 12))
    expected = model(tokens).last_hidden_state
    report = torchkiln.replace(model, only="rope")
    assert not report.changed
    assert report["layers.0.self_attn"].reason.startswith("no module is known to make cos and sin")
    assert torch.equal(model(tokens).last_hidden_state, expected)


def test_other_orders_of_elements_stay() -> None:
    """DeepSeek-V3 has the pairs of a head as neighbours before and as halves after."""
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "n_routed_experts": 4}
    model = causal("DeepseekV3", {**GROUPED, **ranks, **heads, "n_group": 1, "topk_group": 1})
    reasons = {row.reason for row in torchkiln.replace(model).rows if row.kind == "rope"}
    assert reasons == {"apply_rotary_pos_emb_interleave: it computes another formula"}
