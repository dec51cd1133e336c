"""The backend of ``torch.compile``: graphs that it rewrites, and graphs that it must not change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchkiln.patch.compiled.backend import backend

X, W = torch.randn(3, 5, 16), torch.randn(16)
HEADS = torch.randn(2, 4, 7, 8)
ANGLES = torch.randn(1, 7, 4)
LABELS = torch.arange(12) % 9


torch.library.define("torchkiln_test_compiled::increase", "(Tensor(a!) x) -> ()")


@torch.library.impl("torchkiln_test_compiled::increase", ("cpu", "Meta"))
def increase(x: Tensor) -> None:
    """An op that changes x without a new ``_version``."""
    x.data.add_(1)


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def checked(caplog: pytest.LogCaptureFixture, function: Callable[..., Any], *args: Tensor) -> str:
    """Compares a function and its compiled form; returns the ops in the graph."""
    caplog.set_level(logging.INFO, "torchkiln.compile")
    compiled = torch.compile(function, backend=backend, options={"then": "eager"}, fullgraph=True)
    found = []
    for call in (function, compiled):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        given = [x * 1 if x.is_floating_point() else x for x in leaves]
        with torch.random.fork_rng():
            results = call(*given)
        results = results if isinstance(results, tuple) else (results,)
        real = [x for x in results if x.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        gradients = torch.autograd.grad(
            real, wanted, list(map(torch.ones_like, real)), allow_unused=True
        )
        found.append((results, gradients, given))
    was, now = found
    torch.testing.assert_close(now[1], was[1])
    torch.testing.assert_close(now[2], was[2])  # changes in place
    for one, other in zip(now[0], was[0], strict=True):
        torch.testing.assert_close(one, other, check_stride=True)
    return ", ".join(r.getMessage() for r in caplog.records if r.name == "torchkiln.compile")


def rms(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def centered(x: Tensor, w: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w


def half(x: Tensor, w: Tensor) -> Tensor:
    return (1.0 + w.float()) * F.rms_norm(x.float(), (16,), None, 1e-6)


def narrowed(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return rms(x, w)


def changed_behind(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    y = rms(h, w).detach()
    h.add_(1)
    return y, h


def changed_before(x: Tensor, w: Tensor) -> Tensor:
    h = x * 2
    h += 1
    return rms(h, w)


def changed_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x.detach() * 2
    view = h.view(-1)
    y = rms(h, w)
    with torch.no_grad():
        view.mul_(2)
    return y.detach(), h


def changed_element(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    y = rms(h.detach(), w.detach())
    h[0] = 0
    return y, h


def changed_by_relu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return rms(h.detach(), w.detach()), F.relu(h, inplace=True)


def changed_argument(x: Tensor, w: Tensor) -> Tensor:
    y = rms(x, w).detach()
    x.add_(1)
    return y + x


def changed_by_op(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x.detach() * 2
    y = rms(h, w.detach())
    torch.ops.torchkiln_test_compiled.increase(h)
    return y * x, h


def changed_result(x: Tensor, w: Tensor) -> Tensor:
    y = rms(x, w)
    y += 1
    return y


def used_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(mean + 1e-6)), mean


def hooked_inside(x: Tensor, w: Tensor) -> Tensor:
    square = x.pow(2)
    square.register_hook(lambda gradient: gradient * 2)
    return w * (x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6))


def hooked(x: Tensor, w: Tensor) -> Tensor:
    y = rms(x, w)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def detached(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-6))


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x * root)


def clamped(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.clamp(-20, 20).pow(2).mean(-1, keepdim=True) + 1e-6))


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = checkpoint(rms, x, w, use_reentrant=False)
    return y


def summed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + x.flip(0)
    return rms(total, w), total * 2


def summed_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.add(x, x.flip(0), alpha=2)
    return rms(total, w), total


def summed_wide(x: Tensor, w: Tensor) -> Tensor:
    return rms(x + x[:1], w)


def summed_without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        total = x + x.flip(0)
    return rms(total, w)


NORMS = {
    rms: "1 rms_norm",
    centered: "1 rms_norm",
    half: "1 rms_norm",
    narrowed: "1 rms_norm",
    hooked: "1 rms_norm",
    changed_result: "1 rms_norm",  # without the weight, whose product is changed in place
    summed: "1 add_rms_norm",
    summed_twice: "1 rms_norm",
    summed_wide: "1 rms_norm",
    summed_without_gradient: "1 rms_norm",
    **dict.fromkeys(
        (
            *(changed_behind, changed_before, changed_view, changed_element, changed_by_relu),
            *(
                changed_by_op,
                changed_argument,
                used_inside,
                hooked_inside,
                detached,
                without_gradient,
                clamped,
            ),
            checkpointed,
        ),
        "no op found",
    ),
}


@pytest.mark.parametrize(
    ("function", "ops"), NORMS.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_norms(caplog: pytest.LogCaptureFixture, function: Any, ops: str) -> None:
    assert checked(caplog, function, X, W) == ops


def test_half_precision_under_autocast_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert checked(caplog, narrowed, X.bfloat16(), W.bfloat16()) == "no op found"


def test_calls_in_inference_mode(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchkiln.compile")
    for function, ops in ((rms, "1 rms_norm"), (changed_before, "no op found")):
        compiled = torch.compile(function, backend=backend, options={"then": "eager"})
        with torch.inference_mode():
            torch.testing.assert_close(compiled(X * 1, W), function(X * 1, W))
        assert caplog.records.pop().getMessage() == ops


def test_layouts_stay(caplog: pytest.LogCaptureFixture) -> None:
    assert checked(caplog, lambda x, w: rms(x.transpose(0, 1), w), X, W) == "no op found"


def used_gate(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = F.silu(a)
    return h * b, h


def used_layer(a: Tensor, b: Tensor) -> Tensor:
    h = F.linear(a, b[0, :4])
    return F.gelu(h) + h


GATES: dict[str, tuple[Callable[..., Any], str]] = {
    "silu": (lambda a, b: F.silu(a) * b, "1 swiglu"),
    "written out": (lambda a, b: b * (a * torch.sigmoid(a)), "1 swiglu"),
    "tanh": (lambda a, b: F.gelu(a, approximate="tanh") * b, "1 geglu_tanh"),
    "halves": (lambda a, _: F.silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1], "1 swiglu"),
    "used": (used_gate, "no op found"),
    "limited": (lambda a, b: F.silu(a) * b.clamp(-1, 1), "1 swiglu"),
    "limited gate": (lambda a, b: F.silu(a.clamp(-1, 1)) * b, "1 swiglu"),
    "wide": (lambda a, b: F.silu(a[:1]) * b, "no op found"),
    "layer": (lambda a, b: F.gelu(F.linear(a, b[0, :4])), "1 linear"),
    "layer used": (used_layer, "1 gelu"),
    "slow gelu": (lambda a, _: 0.5 * a * (1 + torch.erf(a * 0.5**0.5)), "1 gelu"),
    "one kernel": (lambda a, _: F.silu(a), "no op found"),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(caplog: pytest.LogCaptureFixture, name: str) -> None:
    function, ops = GATES[name]
    assert checked(caplog, function, X, X.flip(0)) == ops


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat((x, x), -1)
    return both.cos(), both.sin() * 2.0


def whole(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, k, *doubled(x))


def in_part(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    pairs = rotated(q[..., :4], k[..., :4], *doubled(x[..., :2]))
    q, k = (torch.cat((one, y[..., 4:]), -1) for one, y in zip(pairs, (q, k), strict=True))
    return q, k


def between(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens come before heads in memory, as after a projection."""
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    return rotated(q.transpose(1, 2), k.transpose(1, 2), *doubled(x))


def unequal(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat((x, x * 2), -1)
    return rotated(q, k, both.cos(), both.sin())


def given_angles(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, k, x.flip(-1).repeat(1, 1, 2), x.repeat(1, 1, 2))


ROTATIONS = {
    whole: "1 rope",
    in_part: "1 rope",
    between: "1 rope",
    unequal: "no op found",
    given_angles: "no op found",
}


@pytest.mark.parametrize(
    ("function", "ops"), ROTATIONS.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_rotations(caplog: pytest.LogCaptureFixture, function: Any, ops: str) -> None:
    assert checked(caplog, function, HEADS, HEADS[:, :2], ANGLES.detach()) == ops


def test_one_token_is_rotated(caplog: pytest.LogCaptureFixture) -> None:
    """With one token, strides of that dimension do not prevent the rotation."""

    def projected(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q.transpose(1, 2), k.transpose(1, 2), *doubled(x))

    given = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), ANGLES[:, :1]
    caplog.set_level(logging.INFO, "torchkiln.compile")
    compiled = torch.compile(projected, backend=backend, options={"then": "eager"})
    torch.testing.assert_close(compiled(*given), projected(*given))
    assert caplog.records[0].getMessage() == "1 rope"


def loss(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float().view(-1, 9), LABELS, **options)


def used_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return F.cross_entropy(y.view(-1, 9), LABELS), y


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "alone": (lambda x, _: F.cross_entropy(x.view(-1, 8), LABELS % 8), "1 cross_entropy"),
    "of each row": (lambda x, w: loss(x, w, reduction="none"), "1 linear_cross_entropy"),
    "smoothed": (
        lambda x, w: loss(x, w, label_smoothing=0.1, ignore_index=3),
        "1 linear_cross_entropy",
    ),
    "logits used": (used_logits, "1 cross_entropy"),
    "weights": (lambda x, w: loss(x, w, weight=torch.ones(9)), "1 cross_entropy"),
    "old options": (lambda x, w: loss(x, w, size_average=True), "no op found"),
    "turned": (
        lambda x, w: F.cross_entropy(F.linear(x, w).reshape(9, 12).t(), LABELS),
        "1 cross_entropy",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:size_average")
def test_losses(caplog: pytest.LogCaptureFixture, name: str) -> None:
    function, ops = LOSSES[name]
    assert checked(caplog, function, torch.randn(3, 4, 8), torch.randn(9, 8)) == ops


def test_bits_of_logits_in_another_dtype_stay(caplog: pytest.LogCaptureFixture) -> None:
    def of(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).view(torch.float16), LABELS)

    given = torch.randn(12, 8).bfloat16(), torch.randn(9, 8).bfloat16()
    caplog.set_level(logging.INFO, "torchkiln.compile")
    compiled = torch.compile(of, backend=backend, options={"then": "eager"})
    truth = F.cross_entropy(F.linear(*given).view(torch.float16).double(), LABELS)
    torch.testing.assert_close(compiled(*given), truth.half())
    assert caplog.records[0].getMessage() == "1 cross_entropy"


def test_half_precision_logits_are_not_copied() -> None:
    """The op reads bfloat16 logits without a copy; its loss is float32, as that of x.float()."""
    logits, labels = torch.randn(12, 9).bfloat16(), LABELS

    def of(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels)

    seen: list[str] = []

    def shown(module: Any, inputs: Any) -> Any:
        found = backend(module, inputs, options={"then": "eager"})
        seen.append(str(module.graph))
        return found

    torch.testing.assert_close(torch.compile(of, backend=shown)(logits), of(logits))
    assert "cross_entropy" in seen[0]
    assert "float" not in seen[0].replace("torch.float32", "")


def test_rows_of_another_number_need_no_new_graph(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchkiln.compile")
    compiled = torch.compile(
        summed, backend=backend, options={"then": "eager"}, fullgraph=True, dynamic=True
    )
    for rows in (3, 8, 5):
        x = torch.randn(rows, 5, 16)
        torch.testing.assert_close(compiled(x, W), summed(x, W))
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage() == "1 add_rms_norm"
