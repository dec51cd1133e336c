"""Dropout beyond the contract: masks, generators, and reproducibility of the mask."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from dtypes import FLOATING
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchkiln
from torchkiln.testing.specs import FAMILIES


def draw(
    shape: tuple[int, ...],
    p: float,
    device: torch.device,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The mask of a call: true where an element is kept."""
    ones = torch.ones(shape, device=device, dtype=dtype)
    if seed is not None:
        torch.manual_seed(seed)
    return torchkiln.dropout_add(ones, torch.zeros_like(ones), p) != 0


def state(device: torch.device) -> Tensor:
    """The state of the device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@pytest.mark.parametrize("p", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_share_of_kept_elements(device: torch.device, p: float) -> None:
    """The share of kept elements is within 5 deviations, in all rows and columns and in each."""
    rows, columns = 1000, 500
    kept = draw((rows, columns), p, device, seed=1).double()
    for found, count in (
        (kept.mean(), rows * columns),
        (kept.mean(0), rows),
        (kept.mean(1), columns),
    ):
        deviation = math.sqrt(p * (1 - p) / count)
        # For rare events the binomial's tail is longer than the normal distribution's.
        assert (found - (1 - p)).abs().max() <= 5 * deviation + 3 / count


def test_neighbours_are_independent(device: torch.device) -> None:
    """Elements at the distances that kernels use are not correlated."""
    kept = draw((1 << 20,), 0.5, device, seed=2).double() - 0.5
    for distance in (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256, 1024, 4096, 1 << 15, 1 << 18):
        product = (kept[distance:] * kept[:-distance]).mean() * 4
        assert abs(product) <= 5 / math.sqrt(kept.numel() - distance), distance


def test_calls_draw_anew(device: torch.device) -> None:
    """Each call advances the generator, so two masks are equal only by chance."""
    torch.manual_seed(3)
    before = state(device)
    first, second = draw((64, 1000), 0.5, device), draw((64, 1000), 0.5, device)
    assert not torch.equal(state(device), before)
    agree = (first == second).double().mean()
    assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(first.numel())


def test_a_seed_brings_the_mask_back(device: torch.device) -> None:
    first = [draw((31, 33), 0.5, device, seed=s) for s in (4, 5)]
    assert not torch.equal(*first)
    for seed, mask in zip((4, 5), first, strict=True):
        assert torch.equal(draw((31, 33), 0.5, device, seed=seed), mask)
    torch.manual_seed(6)
    if device.type == "cuda":
        kept = torch.cuda.get_rng_state(device)
        mask = draw((31, 33), 0.5, device)
        torch.cuda.set_rng_state(kept, device)
    else:
        kept = torch.get_rng_state()
        mask = draw((31, 33), 0.5, device)
        torch.set_rng_state(kept)
    assert torch.equal(draw((31, 33), 0.5, device), mask)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_mask_depends_on_the_place_alone(device: torch.device, dtype: torch.dtype) -> None:
    """The mask is independent of dtype, strides, alignment, shape, bias and requires_grad."""
    expected = draw((37, 41), 0.3, device, seed=7)
    assert torch.equal(draw((37, 41), 0.3, device, seed=7, dtype=dtype), expected)
    assert torch.equal(draw((37 * 41,), 0.3, device, seed=7, dtype=dtype), expected.flatten())
    ones = torch.ones(41, 37, device=device, dtype=dtype).t()
    wide = torch.ones(37, 90, device=device, dtype=dtype)[:, 1:83:2]
    zeros = torch.zeros(37, 41, device=device, dtype=dtype)
    bias = torch.zeros(41, device=device, dtype=dtype)
    calls: list[Callable[[], Tensor]] = [
        lambda: torchkiln.dropout_add(ones, zeros, 0.3),
        lambda: torchkiln.dropout_add(wide, zeros, 0.3),
        lambda: torchkiln.dropout_add(ones.expand_as(zeros), zeros[:1].expand_as(zeros), 0.3),
        lambda: torchkiln.dropout_add(ones.clone().requires_grad_(), zeros, 0.3),
        lambda: torchkiln.bias_dropout_add(ones, bias, zeros, 0.3),
        lambda: torchkiln.bias_dropout_add(wide, bias.requires_grad_(), zeros, 0.3),
    ]
    for call in calls:
        torch.manual_seed(7)
        assert torch.equal(call() != 0, expected)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_draw_the_same(count: int) -> None:
    """A call that is shared by several threads has the mask of one thread."""
    cpu = torch.device("cpu")
    expected = draw((513, 517), 0.4, cpu, seed=8)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        assert torch.equal(draw((513, 517), 0.4, cpu, seed=8), expected)
    finally:
        torch.set_num_threads(before)


def test_a_longer_tensor_has_the_mask_of_a_shorter_one(device: torch.device) -> None:
    """An element's random number depends on its index, not on the size of the tensor."""
    short, long = draw((1000,), 0.5, device, seed=9), draw((1_000_003,), 0.5, device, seed=9)
    assert torch.equal(long[:1000], short)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_gradient_has_the_mask_of_the_forward(device: torch.device, p: float) -> None:
    """The mask is the forward's after other draws, and in each use of a retained graph."""
    x = torch.randn(33, 65, device=device, requires_grad=True)
    bias = torch.randn(65, device=device, requires_grad=True)
    residual = torch.randn(33, 65, device=device, requires_grad=True)
    out = torchkiln.bias_dropout_add(x, bias, residual, p)
    kept = (out - residual).detach() != 0
    torch.rand(1000, device=device)
    scale = 1 / (1 - p) if p < 1 else 0.0
    for _ in range(2):
        grads = torch.autograd.grad(out.sum(), (x, bias, residual), retain_graph=True)
        torch.testing.assert_close(grads[0], kept * scale)
        torch.testing.assert_close(grads[1], kept.sum(0) * scale)
        assert (grads[2] == 1).all()


@pytest.mark.parametrize(
    "shape", [(40003, 13), (70001, 1), (2053, 26), (71, 40001), (1, 300001)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_of_dense_rows(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Gradients agree with float64 for rows that are not whole vectors and are shared by blocks."""
    x = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    bias = torch.zeros(shape[1], device=device, dtype=dtype, requires_grad=True)
    out = torchkiln.bias_dropout_add(x, bias, torch.zeros_like(x), 0.3)
    grad = torch.randn(shape, device=device).to(dtype)
    of_x, of_bias = torch.autograd.grad(out, (x, bias), grad, retain_graph=True)
    expected = torch.where(out.detach() != 0, grad.double() / 0.7, 0)
    torch.testing.assert_close(of_x, expected.to(dtype))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(of_bias.double(), expected.sum(0), rtol=rounding, atol=2e-3)
    if shape[0] == 1:
        assert torch.equal(of_bias, of_x[0])
        assert torch.equal(torch.autograd.grad(out, bias, grad)[0], of_bias)


def test_nothing_is_drawn_without_need(device: torch.device) -> None:
    """In eval mode, and for p of 0 or 1, the generator does not advance."""
    x, residual = (torch.randn(5, 7, device=device, requires_grad=True) for _ in range(2))
    before = state(device)
    for p, training, expected in (
        (0.4, False, x + residual),
        (0.0, True, x + residual),
        (1.0, False, x + residual),
    ):
        torch.testing.assert_close(torchkiln.dropout_add(x, residual, p, training), expected)
    assert torch.equal(state(device), before)
    assert torch.equal(torchkiln.dropout_add(x, residual, 1.0), residual)


def test_dropped_infinities_leave_no_nan(device: torch.device) -> None:
    """Dropped elements are 0 even if they were NaN or infinite."""
    x = torch.full((1000,), math.inf, device=device)
    found = torchkiln.dropout_add(x, torch.zeros_like(x), 0.5)
    assert not found.isnan().any()
    assert 300 < int((found == 0).sum()) < 700
    assert (torchkiln.dropout_add(x, torch.zeros_like(x), 1.0) == 0).all()


def test_modules(device: torch.device) -> None:
    """In training equal seeds give equal results; after eval() the result is the sum."""
    x, residual = (torch.randn(64, 10, device=device) for _ in range(2))
    layer: nn.Module
    for layer in (
        torchkiln.nn.DropoutAdd(0.3),
        torchkiln.nn.BiasDropoutAdd(10, 0.3, device=device),
    ):
        torch.manual_seed(1)
        first = layer.train()(x, residual)
        assert not torch.equal(layer(x, residual), first)
        torch.manual_seed(1)
        assert torch.equal(layer(x, residual), first)
        assert torch.equal(layer.eval()(x, residual), x + residual)
    assert repr(torchkiln.nn.DropoutAdd(0.3)) == "DropoutAdd(p=0.3)"
    assert repr(torchkiln.nn.BiasDropoutAdd(10, 0.3)) == "BiasDropoutAdd(10, p=0.3)"
    assert torchkiln.nn.DropoutAdd().p == nn.Dropout().p
    assert list(layer.state_dict()) == ["bias"]
    assert list(torchkiln.nn.DropoutAdd().state_dict()) == []


@pytest.mark.parametrize("spec", FAMILIES["dropout"], ids=lambda spec: spec.name)
def test_a_graph_keeps_the_op(spec: Any, traced: Callable[..., set[str]]) -> None:
    """A graph has an op that draws the state and one that applies it; for p = 0 only the latter."""
    sample = spec.typical(torch.device("cpu"), torch.float32)
    op = "torchkiln._dropout_add_with_state.default"
    assert traced(spec.op, *sample.args) == {"torchkiln._dropout_state.default", op}
    assert traced(spec.op, *sample.args[:-1], 0.0) == {op}
    assert traced(spec.op, *sample.args[:-1], 0.5, False) == {op}


def save_products(_: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """A policy of selective checkpoints: save matrix products, compute all else again."""
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "all": {},
    "generators kept": {"preserve_rng_state": True},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, save_products)},
}


def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A matrix product between two dropouts."""
    y = torchkiln.dropout_add(x @ weight, x.sin(), 0.3)
    return torchkiln.bias_dropout_add(y.cos(), bias, y, 0.5).sin()


@pytest.mark.parametrize(
    ("backend", "kind"),
    [*product((None, "aot_eager"), CHECKPOINTS), ("inductor", "none"), ("inductor", "selective")],
)
@pytest.mark.filterwarnings("ignore")
def test_equal_seeds_give_equal_masks(device: torch.device, backend: str | None, kind: str) -> None:
    """Results and gradients are equal, eager, compiled, and if backward computes the op again."""
    if backend == "inductor" and device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    x, weight, bias = (
        torch.randn(shape, device=device, requires_grad=True) for shape in ((64, 32), (32, 32), 32)
    )
    options = CHECKPOINTS[kind]

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if options is None:
            return block(x, weight, bias)
        return checkpoint(block, x, weight, bias, use_reentrant=False, **options)

    torch.compiler.reset()
    function: Any = step
    if backend is not None:
        function = torch.compile(step, fullgraph=True, backend=backend)

    def run(function: Any, seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        out = function(x, weight, bias)
        torch.rand(5, device=device)  # backward must not read this state
        return out, *torch.autograd.grad(out.square().sum(), (x, weight, bias))

    expected = run(block, 5)
    first = run(function, 5)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(run(function, 6)[0], first[0])
    for found, wanted in zip(run(function, 5), first, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("train", [False, True])
def test_a_checkpoint_saves_the_state(train: bool) -> None:
    """A state that backward draws again would differ, so a compiled checkpoint must save it."""
    seen: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def step(x: Tensor) -> Tensor:
        return checkpoint(torchkiln.dropout_add, x.sin(), x, 0.5, train, use_reentrant=False).sin()

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(8, requires_grad=True)
    torch.compile(step, fullgraph=True, backend=backend)(x).sum().backward()
    assert seen.count("torchkiln._dropout_state.default") == train
    assert ("torchkiln._dropout_add_with_state.default" in seen) == train
    assert not any("rng" in target for target in seen)


@pytest.mark.cuda
# Torch itself captures an empty graph before.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_compiled_replays_of_a_graph() -> None:
    """With CUDA graphs, equal seeds give equal masks, and each call draws a new mask."""
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return checkpoint(
            torchkiln.dropout_add, x, torch.zeros_like(x), 0.5, use_reentrant=False
        ).clone()

    torch.compiler.reset()
    compiled: Any = torch.compile(step, fullgraph=True, mode="reduce-overhead")

    def run(seed: int | None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, grad)
        return out.detach().clone()

    for _ in range(3):
        run(None)
    first, second = run(1), run(None)
    assert not torch.equal(first, second)
    assert torch.equal(run(1), first)
    assert torch.equal(run(None), second)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_draw_anew(device: torch.device, backend: str) -> None:
    """Two calls within one graph and two runs of the graph have four different masks."""
    x = torch.ones(4096, device=device)

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros_like(x)
        return torchkiln.dropout_add(x, zeros), torchkiln.dropout_add(x, zeros)

    torch.compiler.reset()
    compiled: Any = torch.compile(twice, fullgraph=True, backend=backend)
    masks = [*compiled(x), *compiled(x)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            agree = (mask == other).double().mean()
            assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(4096)


def test_vmap_asks_how_to_draw(device: torch.device) -> None:
    """vmap has torch's choices: an error by default, one mask for all, or one mask per call."""
    x = torch.ones(3, 4000, device=device)
    call = torchkiln.dropout_add
    zeros = torch.zeros_like(x)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(x, zeros)
    same = torch.func.vmap(call, randomness="same")(x, zeros)
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    each = torch.func.vmap(call, randomness="different")(x, zeros)
    assert not torch.equal(each[0], each[1])
    for found in (same, each):
        assert set(found.unique().tolist()) == {0.0, 2.0}


@pytest.mark.cuda
@pytest.mark.parametrize("spec", FAMILIES["dropout"], ids=lambda spec: spec.name)
def test_replays_of_a_graph_draw_anew(spec: Any) -> None:
    """Forward and backward of a replay have the same mask; the next replay has another."""
    device = torch.device("cuda", 0)
    x = torch.ones(64, 128, device=device, requires_grad=True)
    zeros = torch.zeros(64, 128, device=device)
    bias = [torch.zeros(128, device=device)] if spec.name.startswith("bias") else []

    def step() -> tuple[Tensor, Tensor]:
        out = spec.op(x, *bias, zeros, 0.5)
        return out, torch.autograd.grad(out.sum(), x)[0]

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step()
    # torch 2.11 writes the graph's seed and offset in the stream of the capture before it begins,
    # and in the current stream before each replay. Nothing in torch orders the two streams.
    torch.cuda.synchronize(device)
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        assert torch.equal(out, grad)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.large
@pytest.mark.cuda
def test_mask_of_more_than_2_to_the_31_elements() -> None:
    """The share of kept elements is 1 - p around element 2**31, where the mask does not repeat."""
    p, window = 0.4, 1 << 16
    x = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16).expand(1 << 16, (1 << 15) + 8)
    flat = torchkiln.dropout_add(x, torch.zeros_like(x), p).flatten()
    starts = (0, 2**31 - window // 2, flat.numel() - window)
    assert starts[2] >= 2**31
    parts = [flat[start : start + window] != 0 for start in starts]
    for i, part in enumerate(parts):
        kept = part.double().mean().item()
        assert abs(kept - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / window)
        for other in parts[:i]:
            agree = (part == other).double().mean().item()
            expected = p * p + (1 - p) ** 2
            assert abs(agree - expected) <= 5 * math.sqrt(expected * (1 - expected) / window)
