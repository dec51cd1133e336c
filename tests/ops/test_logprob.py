"""logprob and linear_logprob beyond the contract."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln


def formula(
    logits: Tensor, target: Tensor, temperature: float = 1.0, ignored: int = -100
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy in torch's ops, in the dtype of the logits."""
    logs = F.log_softmax(logits / temperature, -1)
    p = logs.exp()
    at = target.masked_fill(target == ignored, 0).unsqueeze(-1)
    logp = logs.gather(-1, at).squeeze(-1)
    entropy = -(p * logs.masked_fill(p == 0, 0)).sum(-1)
    return tuple(y.masked_fill(target == ignored, 0) for y in (logp, entropy))  # type: ignore[return-value]


def gradient(results: Any, inputs: Any, factors: Any) -> tuple[Tensor, ...]:
    """Gradients of the results, weighted per row by ``factors``; None leaves a result out."""
    chosen = [(y, g) for y, g in zip(results, factors, strict=True) if g is not None]
    return torch.autograd.grad([y for y, _ in chosen], inputs, [g for _, g in chosen])


def logits_of(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits of a bfloat16 layer in another dtype.

    On a GPU, float32 logits are sums of tensor cores, which have larger errors.
    """
    z = F.linear(x.to(dtype), weight.to(dtype))
    if z.is_cuda and dtype == torch.float32:
        with torch.no_grad():
            z.copy_(torch.mm(x.bfloat16(), weight.T, out_dtype=dtype))
    return z


@pytest.mark.parametrize("used", ["both", "logp", "entropy"])
@pytest.mark.parametrize("order", ["random", "ascending", "descending", "far apart"])
def test_gradients_of_each_result(order: str, used: str, device: torch.device) -> None:
    logits = 3 * torch.randn(5, 4099, dtype=torch.float64, device=device)
    if order == "far apart":
        logits[:, ::7] -= 2e4
    elif order != "random":  # in sorted rows the maximum changes often
        logits = logits.sort(-1, descending=order == "descending").values * 20
    logits.requires_grad_()
    target = torch.tensor([0, 4098, -100, 77, 2048], device=device)
    factors = torch.randn(2, 5, dtype=torch.float64, device=device)
    given = [None if used == "entropy" else factors[0], None if used == "logp" else factors[1]]
    found = torchkiln.logprob(logits, target, temperature=0.8, entropy=True)
    truth = formula(logits, target, 0.8)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    (one,), (other,) = (gradient(y, [logits], given) for y in (found, truth))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)
    assert (one[2] == 0).all()


def test_masked_logits_have_no_share(device: torch.device) -> None:
    logits = torch.randn(3, 40, device=device)
    logits[:, 10:] = -torch.inf
    logits[1, :9] = -torch.inf  # a single class remains
    logits.requires_grad_()
    target = torch.tensor([2, 9, 4], device=device)
    logp, entropy = torchkiln.logprob(logits, target, entropy=True)
    assert entropy[1] == 0
    assert logp[1] == 0
    wide = logits.detach()[:, :10].double().requires_grad_()
    truth = formula(wide, target)
    torch.testing.assert_close((logp.double(), entropy.double()), truth, rtol=1e-5, atol=1e-6)
    factors = torch.randn(2, 3, device=device)
    (one,) = gradient((logp, entropy), [logits], factors)
    (other,) = gradient(truth, [wide], factors.double())
    torch.testing.assert_close(one[:, :10].double(), other, rtol=1e-4, atol=1e-6)
    assert (one[:, 10:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [7, 300, 20001])
def test_a_row_of_the_lowest_numbers_is_uniform(
    count: int, dtype: torch.dtype, device: torch.device
) -> None:
    lowest = torch.finfo(dtype).min / 2
    logits = torch.full((2, count), lowest, dtype=dtype, device=device).requires_grad_()
    target = torch.tensor([1, count - 1], device=device)
    found = torchkiln.logprob(logits, target, temperature=0.7, entropy=True)
    expected = torch.full_like(found[0], -math.log(count))
    torch.testing.assert_close(found, (expected, -expected))
    (grad,) = torch.autograd.grad(found[0].sum(), logits)
    slopes = F.one_hot(target, count) - torch.full_like(grad, 1 / count, dtype=torch.float64)
    torch.testing.assert_close(grad, (slopes / 0.7).to(dtype))


def test_a_target_that_is_masked_has_no_probability(device: torch.device) -> None:
    logits = torch.randn(2, 9, device=device)
    logits[0, 3] = -torch.inf
    logp = torchkiln.logprob(logits, torch.tensor([3, 3], device=device))
    assert logp[0] == -torch.inf
    assert logp[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strided_rows(dtype: torch.dtype, device: torch.device) -> None:
    whole = torch.randn(4, 6, 80, device=device).to(dtype)
    target = torch.randint(33, (4, 6), device=device)
    views = {
        "a slice of the classes": (whole[..., 5:38], target),
        "classes not adjacent": (
            whole[..., :33].transpose(0, 2).contiguous().transpose(0, 2),
            target,
        ),
        "a slice of the rows": (whole[:, 1:, :33], target[:, 1:]),
        "an expanded row": (whole[:1, :1, :33].expand(4, 6, 33), target),
    }
    for name, (view, of) in views.items():
        x = view.detach().requires_grad_()
        found = torchkiln.logprob(x, of, entropy=True)
        wide = view.detach().double().requires_grad_()
        truth = formula(wide, of)
        factors = torch.randn(2, *of.shape, device=device)
        (one,) = gradient(found, [x], factors)
        (other,) = gradient(truth, [wide], factors.double())
        torch.testing.assert_close(
            [y.double() for y in found], list(truth), rtol=1e-5, atol=1e-5, msg=name
        )
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=rounding, msg=name)


def test_it_is_the_loss(device: torch.device) -> None:
    logits = torch.randn(50, 1000, device=device)
    target = torch.randint(1000, (50,), device=device)
    loss = torchkiln.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(torchkiln.logprob(logits, target), -loss, rtol=1e-6, atol=1e-6)


def test_second_derivatives(device: torch.device) -> None:
    logits = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([1, -100, 5], device=device)

    def both(x: Tensor) -> Any:
        return torchkiln.logprob(x, target, temperature=1.3, entropy=True)

    assert torch.autograd.gradcheck(both, (logits,))
    assert torch.autograd.gradgradcheck(both, (logits,))
    x = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(6, 5, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, device=device, requires_grad=True)
    rows = torch.tensor([3, 0, 2], device=device)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        target = torch.tensor([1, 2, -100, 5], device=device)
        return torchkiln.linear_logprob(
            x, weight, target, bias, temperature=1.3, softcap=2.0, rows=rows, entropy=True
        )

    assert torch.autograd.gradcheck(layer, (x, weight, bias))
    assert torch.autograd.gradgradcheck(layer, (x, weight, bias))


def test_the_empty_entropy_takes_a_gradient(device: torch.device) -> None:
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    x, weight = (torch.randn(n, 4, device=device, requires_grad=True) for n in (3, 5))
    target = torch.tensor([0, 4, 2], device=device)
    for inputs, (logp, empty) in (
        ([logits], torch.ops.torchkiln.logprob(logits, target)),
        ([x, weight], torch.ops.torchkiln.linear_logprob(x, weight, target)),
    ):
        expected = torch.autograd.grad(logp.sum(), inputs, retain_graph=True)
        found = torch.autograd.grad(logp.sum() + empty.sum(), inputs)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40, 1e300, torch.inf, torch.nan])
def test_a_temperature_without_a_reciprocal_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature: got .*, expected a finite number"):
        torchkiln.logprob(torch.zeros(2, 5), torch.zeros(2).long(), temperature=temperature)


def test_a_state_of_another_dtype_is_refused() -> None:
    logits, target = torch.randn(3, 5, dtype=torch.float64), torch.zeros(3).long()
    _, entropy, state = torch.ops.torchkiln._logprob_forward(logits, target, 1.0, -100, True)
    grad = torch.ones_like(entropy)
    for kept, name in (((entropy, state.float()), "state"), ((entropy.float(), state), "entropy")):
        with pytest.raises(RuntimeError, match=f"{name}: got float32 .*, expected contiguous"):
            torch.ops.torchkiln._logprob_backward(logits, target, grad, grad, *kept, 1.0, -100)


def test_a_class_out_of_range_is_refused() -> None:
    logits, target = torch.randn(2, 4), torch.tensor([1, 4])
    words = "target: got 4, expected one of 4 classes, 0 to 3, or ignore_index, -100"
    with pytest.raises(IndexError, match=words):
        torchkiln.logprob(logits, target)
    with pytest.raises(IndexError, match=words):
        torchkiln.linear_logprob(torch.randn(2, 3), torch.randn(4, 3), target)


def test_logits_have_the_dtype_of_x_or_of_the_results() -> None:
    x, weight, target = torch.randn(2, 3), torch.randn(4, 3), torch.tensor([1, 0])
    words = "dtype: got float16, expected float32 or bfloat16: the dtype of the logits"
    with pytest.raises(RuntimeError, match=words):
        torchkiln.linear_logprob(x.bfloat16(), weight.bfloat16(), target, dtype=torch.float16)


LEAVES = ("x", "weight", "bias")


@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 3) for w in itertools.combinations(LEAVES, n)], ids="-".join
)
def test_any_subset_of_gradients_over_several_chunks(
    wanted: tuple[str, ...], device: torch.device
) -> None:
    draw: dict[str, Any] = {"dtype": torch.float64, "device": device}
    made = {
        "x": torch.randn(8200, 3, **draw),
        "weight": torch.randn(7, 3, **draw),
        "bias": torch.randn(7, **draw),
    }
    leaves = [made[name].requires_grad_() for name in wanted]
    target = torch.randint(7, (8200,), device=device)
    target[5::9] = -100
    found = torchkiln.linear_logprob(made["x"], made["weight"], target, made["bias"], entropy=True)
    truth = formula(F.linear(made["x"], made["weight"], made["bias"]), target)
    torch.testing.assert_close(found, truth)
    factors = torch.randn(2, 8200, **draw)
    for one, other in zip(
        gradient(found, leaves, factors), gradient(truth, leaves, factors), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("as_mask", [False, True])
def test_rows_that_do_not_count(as_mask: bool, device: torch.device) -> None:
    draw: dict[str, Any] = {"dtype": torch.float64, "device": device}
    x = torch.randn(3, 5, 4, **draw).requires_grad_()
    weight = torch.randn(9, 4, **draw).requires_grad_()
    target = torch.randint(9, (3, 5), device=device)
    mask = torch.rand(3, 5, device=device) < 0.4
    mask[0, 0] = True
    rows = mask if as_mask else mask.flatten().nonzero().squeeze(1).flip(0)
    found = torchkiln.linear_logprob(x, weight, target, rows=rows, entropy=True)
    truth = [y * mask for y in formula(F.linear(x, weight), target)]
    torch.testing.assert_close(found, tuple(truth))
    factors = torch.randn(2, 3, 5, **draw)
    ours, theirs = (gradient(y, [x, weight], factors) for y in (found, truth))
    torch.testing.assert_close(ours, theirs)
    assert (ours[0][~mask] == 0).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_dtype_of_the_logits(softcap: float | None, device: torch.device) -> None:
    x = torch.randn(64, 128, device=device).bfloat16()
    weight = torch.randn(500, 128, device=device).bfloat16()
    target = torch.randint(500, (64,), device=device)
    logits = F.linear(x.double(), weight.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    truth = torch.stack(formula(logits, target))
    errors = []
    for dtype in (None, torch.bfloat16):
        found = torchkiln.linear_logprob(
            x, weight, target, softcap=softcap, entropy=True, dtype=dtype
        )
        errors.append((torch.stack(found).double() - truth).abs().max())
        assert found[0].dtype == torch.float32
    assert errors[0] < 1e-4
    assert 1e-3 < errors[1] < 0.2


def test_errors_of_half_precision(device: torch.device) -> None:
    """Errors against float64 are at most twice those of torch in float32 on the same inputs."""
    x = torch.randn(96, 256, device=device).bfloat16()
    weight = (torch.randn(3001, 256, device=device) / 8).bfloat16()
    target = torch.randint(3001, (96,), device=device)
    factors = torch.randn(2, 96, device=device)

    def results(dtype: torch.dtype) -> list[Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        if dtype == torch.bfloat16:
            found: Any = torchkiln.linear_logprob(leaf, weight, target, entropy=True)
        else:
            found = formula(logits_of(leaf, weight, dtype), target)
        grads = gradient(found, [leaf], factors.to(found[0].dtype))
        return [y.detach().double() for y in (*found, *grads)]

    exact, torchs, ours = map(results, (torch.float64, torch.float32, torch.bfloat16))
    for one, other, truth in zip(ours[:2], torchs[:2], exact[:2], strict=True):
        assert (one - truth).abs().max() <= 2 * (other - truth).abs().max()
    # Torch's gradient in bfloat16 is rounded from that of float32.
    rounded = torchs[2].bfloat16().double()
    assert (ours[2] - exact[2]).norm() <= 2 * (rounded - exact[2]).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_bias(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(40, 16, device=device).to(dtype).requires_grad_()
    weight = torch.randn(11, 16, device=device).to(dtype).requires_grad_()
    bias = torch.randn(11, device=device, requires_grad=True)
    target = torch.randint(11, (40,), device=device)
    found = torchkiln.linear_logprob(x, weight, target, bias, entropy=True)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = formula(F.linear(*wide), target)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    factors = torch.randn(2, 40, device=device)
    ours = gradient(found, [x, weight, bias], factors)
    theirs = gradient(truth, wide, factors.double())
    rounding = 4 * torch.finfo(dtype).eps
    for one, other in zip(ours, theirs, strict=True):
        atol = rounding * float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=atol)
    assert ours[2].dtype == torch.float32


def test_indices_of_rows_in_a_graph(device: torch.device) -> None:
    x = torch.randn(6, 5, device=device, requires_grad=True)
    weight = torch.randn(9, 5, device=device)
    target = torch.randint(9, (6,), device=device)

    def call(rows: Tensor) -> Any:
        return torchkiln.linear_logprob(2 * x, weight, target, rows=rows, entropy=True)

    rows = torch.tensor([4, 1], device=device)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows), call(rows))
    (one,), (other,) = (torch.autograd.grad(sum(f(rows)).sum(), x) for f in (compiled, call))
    torch.testing.assert_close(one, other)


def test_autocast_computes_the_products_in_half_precision(device: torch.device) -> None:
    x, weight = torch.randn(6, 32, device=device), torch.randn(9, 32, device=device)
    target = torch.randint(9, (6,), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found = torchkiln.linear_logprob(x, weight, target)
    assert found.dtype == torch.float32
    expected = torchkiln.linear_logprob(x.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(found, expected)


def test_modules_are_the_functions(device: torch.device) -> None:
    """The head of a model can take the place of the layer."""
    options: dict[str, Any] = {"temperature": 0.8, "ignore_index": 3, "entropy": True}
    module = torchkiln.nn.LinearLogprob(5, 9, True, softcap=2.0, device=device, **options)
    x, target = torch.randn(2, 4, 5, device=device), torch.randint(9, (2, 4), device=device)
    target[0, 1] = 3
    logits = module.linear(x).double()
    capped = 2 * torch.tanh(logits / 2)
    expected = formula(capped, target, 0.8, 3)
    for found in (module(x, target), torchkiln.nn.Logprob(**options)(capped.float(), target)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    mask = target > 4
    logp, entropy = module(x, target, mask)
    torch.testing.assert_close(logp.double(), expected[0] * mask, rtol=1e-5, atol=1e-5)
    (logp + entropy).sum().backward()
    assert module.linear.weight.grad is not None
    module.linear, module.entropy = torch.nn.Linear(6, 7), False
    assert module(torch.randn(2, 6), torch.tensor([1, 6])).shape == (2,)
    assert not torchkiln.nn.Logprob().state_dict()


@pytest.mark.large
@pytest.mark.cuda
def test_more_than_2_to_the_31_elements() -> None:
    """Rows before and after element 2**31 have the results of a separate call."""
    device = torch.device("cuda", 0)
    rows, count = 2**16 + 1, 2**15 + 1
    row = torch.arange(count, device=device).remainder(241).div(60).bfloat16()
    factor = torch.arange(rows, device=device).remainder(7).sub(3).bfloat16()
    logits = (factor.unsqueeze(1) * row).requires_grad_()
    target = torch.arange(rows, device=device).remainder(count)
    found = torchkiln.logprob(logits, target, entropy=True)
    (grad,) = gradient(found, [logits], torch.ones(2, rows, device=device))
    middle = 2**31 // count
    for start in (0, middle - 2, rows - 3):
        some = slice(start, start + 3)
        part = logits.detach()[some].double().requires_grad_()
        truth = formula(part, target[some])
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one[some].double(), other, rtol=1e-6, atol=1e-6)
        (other,) = gradient(truth, [part], torch.ones(2, 3, device=device))
        torch.testing.assert_close(grad[some].double(), other, rtol=0.01, atol=1e-6)
