"""linear_kl beyond the contract: errors, masks, gradients, row lengths, temperature."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_logprob import logits_of
from torch import Tensor

import torchkiln
from torchkiln.typing import Direction

DIRECTIONS: tuple[Direction, ...] = ("forward", "reverse", "js")


def formula(z: Tensor, u: Tensor, direction: Direction = "forward", beta: float = 0.5) -> Tensor:
    """The divergence between student's logits z and teacher's logits u."""
    log_p, log_q = F.log_softmax(z, -1), F.log_softmax(u, -1)

    def kl(logs: Tensor, others: Tensor) -> Tensor:
        p = logs.exp()
        return (p * (logs - others).masked_fill(p == 0, 0)).sum(-1)

    if direction == "js":
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    return kl(log_q, log_p) if direction == "forward" else kl(log_p, log_q)


NAMES = ("x", "weight", "y", "weight_y", "bias", "bias_y")


def layers(rows: int, classes: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Random arguments of a call, by name."""
    sizes: list[tuple[int, ...]] = [(rows, 6), (classes, 6), (rows, 4), (classes, 4)]
    sizes += [(classes,), (classes,)]
    made = zip(NAMES, sizes, strict=True)
    return {name: torch.randn(*size, device=device).to(dtype) for name, size in made}


def truth(given: dict[str, Any], temperature: float = 1.0, **options: Any) -> Tensor:
    """The divergence in torch's ops for these arguments."""
    z = F.linear(given["x"], given["weight"], given["bias"]) / temperature
    u = F.linear(given["y"], given["weight_y"], given["bias_y"]) / temperature
    return formula(z, u, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "wanted",
    [("x",), ("x", "weight"), ("bias",), ("y", "weight_y"), ("x", "y"), ("bias_y",), NAMES],
    ids="-".join,
)
def test_any_subset_of_gradients_over_several_chunks(
    wanted: tuple[str, ...], direction: Direction, device: torch.device
) -> None:
    given = layers(8200, 7, device, torch.float64)
    leaves = [given[name].requires_grad_() for name in wanted]
    options: dict[str, Any] = {"temperature": 1.3, "direction": direction, "beta": 0.3}
    found, expected = torchkiln.linear_kl(**given, **options), truth(given, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    factors = torch.randn(8200, dtype=torch.float64, device=device)
    ours, theirs = (torch.autograd.grad(y, leaves, factors) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_second_derivatives(direction: Direction, device: torch.device) -> None:
    given = layers(3, 5, device, torch.float64)
    leaves = tuple(given[name].requires_grad_() for name in NAMES)

    def call(*args: Tensor) -> Tensor:
        rows = torch.tensor([2, 0], device=device)
        return torchkiln.linear_kl(*args, temperature=0.8, direction=direction, rows=rows)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_errors_of_half_precision(direction: Direction, device: torch.device) -> None:
    """Errors against float64 are at most twice those of torch in float32 on the same inputs."""
    x, y = (torch.randn(96, 256, device=device).bfloat16() for _ in range(2))
    weight, weight_y = ((torch.randn(3001, 256, device=device) / 8).bfloat16() for _ in range(2))
    factors = torch.randn(96, device=device)

    def results(dtype: torch.dtype, is_ours: bool = False) -> list[Tensor]:
        leaf = x.to(dtype).requires_grad_()
        if is_ours:
            found = torchkiln.linear_kl(leaf, weight, y, weight_y, direction=direction)
        else:
            z, z_y = logits_of(leaf, weight, dtype), logits_of(y, weight_y, dtype)
            found = formula(z, z_y, direction)
        (grad,) = torch.autograd.grad(found, leaf, factors.to(found.dtype))
        return [found.detach().double(), grad.double()]

    exact, torchs = results(torch.float64), results(torch.float32)
    ours = results(torch.bfloat16, is_ours=True)
    assert (ours[0] - exact[0]).abs().max() <= 2 * (torchs[0] - exact[0]).abs().max()
    # Torch's gradient in bfloat16 is rounded from that of float32.
    rounded = torchs[1].bfloat16().double()
    error = (ours[1] - exact[1]).norm() / (rounded - exact[1]).norm()
    assert error <= 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_layers_have_no_divergence(direction: Direction, device: torch.device) -> None:
    x = torch.randn(9, 40, device=device, requires_grad=True)
    weight = torch.randn(513, 40, device=device)
    found = torchkiln.linear_kl(x, weight, x.detach(), weight, direction=direction)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-6)
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_classes_that_neither_layer_can_draw(direction: Direction, device: torch.device) -> None:
    given = layers(5, 40, device, torch.float64)
    given["bias"][30:] = given["bias_y"][30:] = -torch.inf
    given["x"].requires_grad_()
    found = torchkiln.linear_kl(**given, direction=direction)
    some = {k: v[:30] if k not in {"x", "y"} else v for k, v in given.items()}
    expected = truth(some, direction=direction)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y.sum(), given["x"]) for y in (found, expected))
    # Where a gradient is 0, a weight times it is 0.
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_classes_that_one_layer_cannot_draw(device: torch.device) -> None:
    given = layers(5, 40, device, torch.float32)
    given["bias"][3] = -torch.inf
    assert torchkiln.linear_kl(**given).isinf().all()
    assert torchkiln.linear_kl(**given, direction="reverse").isfinite().all()
    found = torchkiln.linear_kl(**given, direction="js").double()
    wide = {name: each.double() for name, each in given.items()}
    torch.testing.assert_close(found, truth(wide, direction="js"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_distributions_that_are_far_apart(direction: Direction, device: torch.device) -> None:
    given = layers(6, 50, device, torch.float32)
    given["weight"] *= 40
    given["x"].requires_grad_()
    wide = {k: v.detach().double() for k, v in given.items()}
    wide["x"].requires_grad_()
    found = torchkiln.linear_kl(**given, direction=direction)
    expected = truth(wide, direction=direction)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    (one,) = torch.autograd.grad(found.sum(), given["x"])
    (other,) = torch.autograd.grad(expected.sum(), wide["x"])
    torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
def test_incoming_gradients_of_any_size(
    size: float, direction: Direction, device: torch.device
) -> None:
    """Gradients agree with float64 for incoming ones of any size, though products read float16."""
    given = layers(512, 300, device, torch.float16)
    given["bias"] = given["bias"].float()
    leaves = [given[name].requires_grad_() for name in ("weight", "bias")]
    wide = {k: v.detach().double() for k, v in given.items()}
    exact = [wide[name].requires_grad_() for name in ("weight", "bias")]
    factors = size * (1 + torch.rand(512, device=device))
    options: dict[str, Any] = {"direction": direction, "temperature": 0.7, "beta": 0.2}
    ours = torch.autograd.grad(torchkiln.linear_kl(**given, **options), leaves, factors)
    theirs = torch.autograd.grad(truth(wide, **options), exact, factors.double())
    assert (ours[1] - theirs[1]).norm() <= 1e-4 * theirs[1].norm()
    # float16 numbers below 6e-8 are 0.
    rounding = torch.finfo(torch.float16).eps * theirs[0].norm() + 3e-8 * 1800**0.5
    assert (ours[0] - theirs[0]).norm() <= rounding


@pytest.mark.parametrize("is_mask", [False, True])
def test_rows_that_do_not_count(is_mask: bool, device: torch.device) -> None:
    x, y = (torch.randn(3, 5, 4, device=device, dtype=torch.float64) for _ in range(2))
    weight, weight_y = (torch.randn(9, 4, device=device, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 5, device=device) < 0.4
    mask[0, 0] = True
    y[~mask] = torch.nan  # must not be read
    x.requires_grad_()
    rows = mask if is_mask else mask.flatten().nonzero().squeeze(1).flip(0)
    found = torchkiln.linear_kl(x, weight, y, weight_y, rows=rows)
    expected = formula(x[mask] @ weight.T, y[mask] @ weight_y.T)
    torch.testing.assert_close(found[mask], expected)
    assert (found[~mask] == 0).all()
    ours, theirs = (torch.autograd.grad(each.sum(), x)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert (ours[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_bias(dtype: torch.dtype, device: torch.device) -> None:
    given = layers(40, 11, device, dtype)
    given["bias"], given["bias_y"] = given["bias"].float(), given["bias_y"].float()
    wide = {k: v.double().requires_grad_() for k, v in given.items()}
    leaves = [each.requires_grad_() for each in given.values()]
    found, expected = torchkiln.linear_kl(**given), truth(wide)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(found.sum(), leaves)
    theirs = torch.autograd.grad(expected.sum(), list(wide.values()))
    for one, other in zip(ours, theirs, strict=True):
        atol = 4 * torch.finfo(dtype).eps * float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=atol, atol=atol)
    assert ours[4].dtype == ours[5].dtype == torch.float32


def test_forward_differentiates_for_x_alone() -> None:
    """Backward multiplies no matrices if only x has a gradient."""
    given = layers(6, 9, torch.device("cpu"), torch.float32)
    for leaves, expected in ((("x",), 0), (("x", "weight"), 1), (("y",), 1), (("x", "y"), 1)):
        call = {k: v.detach().requires_grad_(k in leaves) for k, v in given.items()}
        found = torchkiln.linear_kl(**call)
        with torch.profiler.profile() as profile:
            found.sum().backward()
        products = [e for e in profile.events() if e.name in {"aten::addmm", "aten::mm"}]
        products += [e for e in profile.events() if e.name in {"aten::addmm_", "aten::addmm_out"}]
        assert bool(products) == bool(expected), leaves


def test_a_state_of_another_dtype_is_refused() -> None:
    given = layers(3, 5, torch.device("cpu"), torch.float64)
    args = [*given.values(), 1.0, "forward", 0.5, None]
    found, state, _ = torch.ops.torchkiln._linear_kl_forward(*args, None, False)
    for kept, words in ((state.float(), "float32"), (state[:-1], r"shape \[17\]")):
        with pytest.raises(RuntimeError, match=f"state: got .*{words}"):
            torch.ops.torchkiln._linear_kl_backward(*args, found, kept, [True, True, True])
        with pytest.raises(RuntimeError, match=f"state: got .*{words}"):
            torch.ops.torchkiln._linear_kl_forward(*args, kept, False)


def test_the_module_has_two_layers(device: torch.device) -> None:
    """The heads of two models can take their places; the teacher's has no gradient."""
    module = torchkiln.nn.LinearKL(
        6, 9, True, teacher_features=4, temperature=1.3, direction="js", beta=0.3, device=device
    )
    student, teacher = module.linear, module.teacher
    given = layers(7, 9, device, torch.float32)
    mask = torch.arange(7, device=device) % 3 > 0
    found = module(given["x"], given["y"], mask)
    found.sum().backward()
    assert student.bias.grad is not None
    assert teacher.weight.grad is teacher.bias.grad is None
    weights = (student.weight, teacher.weight, student.bias, teacher.bias)
    given |= dict(zip(("weight", "weight_y", "bias", "bias_y"), weights, strict=True))
    expected = truth(given, 1.3, direction="js", beta=0.3)
    torch.testing.assert_close(found, expected * mask)
    module.linear, module.teacher = torch.nn.Linear(5, 8), torch.nn.Linear(6, 8)
    assert module(torch.randn(2, 5), torch.randn(2, 6)).shape == (2,)
    with pytest.raises(
        ValueError, match=r"nn\.LinearKL: direction: got 'back', expected one of fo"
    ):
        torchkiln.nn.LinearKL(6, 9, direction="back")  # type: ignore[arg-type]


def test_in_a_graph(device: torch.device) -> None:
    given = layers(6, 9, device, torch.float32)
    rows = torch.tensor([4, 1], device=device)
    given["x"].requires_grad_()

    def call(rows: Tensor) -> Tensor:
        return torchkiln.linear_kl(**given, rows=rows, direction="js")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows), call(rows))
    ours, theirs = (torch.autograd.grad(f(rows).sum(), given["x"]) for f in (compiled, call))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("classes", [1, 255, 257, 1023, 4099])
def test_rows_of_any_length(classes: int, device: torch.device) -> None:
    """Rows of any length, beginning at any element, agree with float64."""
    for direction, dtype in itertools.product(DIRECTIONS, (torch.float32, torch.bfloat16)):
        given = layers(5, classes, device, dtype)
        wide = {k: v.double() for k, v in given.items()}
        given["x"].requires_grad_()
        wide["x"].requires_grad_()
        found, expected = (
            torchkiln.linear_kl(**given, direction=direction),
            truth(wide, direction=direction),
        )
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        (one,) = torch.autograd.grad(found.sum(), given["x"])
        (other,) = torch.autograd.grad(expected.sum(), wide["x"])
        atol = 32 * torch.finfo(dtype).eps * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_logits_with_a_temperature(direction: Direction, device: torch.device) -> None:
    """Equal logits of any size are a uniform distribution, as their roundings cancel."""
    x, y = torch.randn(2, 4, 8, device=device)
    weight, weight_y = torch.zeros(300, 8, device=device), torch.randn(300, 8, device=device)
    results = []
    for size in (0.0, 1e6, torch.finfo(torch.float32).min / 4):
        bias = torch.full((300,), size, device=device, requires_grad=True)
        options: dict[str, Any] = {"temperature": 0.9, "direction": direction}
        found = torchkiln.linear_kl(x, weight, y, weight_y, bias, **options)
        results.append((found, *torch.autograd.grad(found.sum(), bias)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)
