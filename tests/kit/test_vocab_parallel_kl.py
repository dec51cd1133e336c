"""The divergence of classes that are distributed over processes, against its float64 formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

DIVERGENCE = """
import itertools
import math
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torchkiln.distributed import vocab_parallel_linear_kl

torch.manual_seed(0)
mesh = init_device_mesh(device, (size,))
DIMS = (None, 0, None, 0, 0, 0)  # of classes in x, weight, y, weight_y, bias, bias_y


def formula(tensors, temperature=1.0, direction="forward", beta=0.5):
    x, weight, y, weight_y, bias, bias_y = tensors
    log_p = F.log_softmax(F.linear(x, weight, bias) / temperature, -1)
    log_q = F.log_softmax(F.linear(y, weight_y, bias_y) / temperature, -1)

    def kl(logs, others):
        p = logs.exp()
        return (p * (logs - others).masked_fill(p == 0, 0)).sum(-1)

    if direction == "js":
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    return kl(log_q, log_p) if direction == "forward" else kl(log_p, log_q)


def layers(shape, classes, dtype=torch.float64):
    shapes = ((*shape, 6), (classes, 6), (*shape, 4), (classes, 4), (classes,), (classes,))
    return [torch.randn(each, dtype=torch.float64).to(dtype).requires_grad_() for each in shapes]


def own(t, dim, cuts):
    t = t.detach()
    part = t if dim is None else t.narrow(dim, cuts[rank], cuts[rank + 1] - cuts[rank])
    return part.clone().requires_grad_()


def compare(whole, cuts, *, spread=False, rows=None, wanted=range(6), **options):
    # The sum of two exponentials of -infinity has no gradient.
    double = [t.detach().double().clamp(min=-1e5).requires_grad_() for t in whole]
    expected = formula(double, **options)
    if rows is not None:
        expected = expected * torch.zeros(expected.numel()).index_fill(0, rows, 1).view_as(expected)
    mine = [own(t, dim, cuts) for t, dim in zip(whole, DIMS)]
    if spread:
        places = [Replicate() if dim is None else Shard(dim) for dim in DIMS]
        mine = [distribute_tensor(t.detach(), mesh, [p]) for t, p in zip(whole, places)]
        mine = [t.requires_grad_() for t in mine]
    for i in set(range(6)) - set(wanted):
        mine[i].requires_grad_(False)
    found = vocab_parallel_linear_kl(*mine, rows=rows, **options)
    half = whole[0].dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=1e-4 if half else 1e-9, atol=1e-9)
    grad = torch.randn(expected.shape, dtype=torch.float64).to(found.dtype)
    truth = torch.autograd.grad(expected, [double[i] for i in wanted], grad.double())
    for i, one, other in zip(
        wanted, torch.autograd.grad(found, [mine[i] for i in wanted], grad), truth
    ):
        other = other.detach()
        if isinstance(one, DTensor):
            assert one.placements == mine[i].placements
            one = one.full_tensor()
        elif DIMS[i] is not None:
            other = own(other, 0, cuts).detach()
        atol = 2**-6 * float(other.abs().max()) if half and other.numel() else 1e-9
        torch.testing.assert_close(one.double(), other, rtol=1e-9, atol=atol)


even = [i * 8 for i in range(size + 1)]
uneven = [0, *(5 + 9 * i for i in range(1, size)), 9 * size + 1]
numbers = {"temperature": 1.3, "beta": 0.3}
options = [{"direction": name, **numbers} for name in ("forward", "reverse", "js")]
rows = torch.tensor([7, 0, 3, 8])
for each, cuts in itertools.product(options, (even, uneven)):
    compare(layers((2, 5), cuts[-1]), cuts, **each)
    compare(layers((2, 5), cuts[-1]), cuts, rows=rows, **each)
for each in options:
    compare(layers((8200,), even[-1]), even, wanted=[0], **each)  # several chunks
    compare(layers((7,), even[-1]), even, wanted=[1, 5], **each)
    compare(layers((2, 5), even[-1]), even, spread=True, **each)
    compare(layers((0,), even[-1]), even, **each)
    compare(layers((2, 5), even[-1]), even, rows=rows[:0], **each)
    compare(layers((9,), even[-1], torch.bfloat16), even, **each)
    # Shares of shards that differ by more than the range of float64, and shards without a class.
    far = layers((5,), even[-1])
    with torch.no_grad():
        far[4][: even[1]] -= 900
        far[5][even[-2] :] += 30
    if each["direction"] != "forward":
        compare(far, even, wanted=[0, 1, 4], **each)
    with torch.no_grad():
        far[4][: even[1]] = far[5][: even[1]] = -torch.inf
    if size > 1:
        compare(far, even, wanted=[0, 2], **each)

# A class that only one layer can draw is infinitely far from the other one, in its shard, too.
given = layers((3,), even[-1])
with torch.no_grad():
    given[4][even[-2] :] = -torch.inf
    if size > 1:
        mine = [own(t, dim, even) for t, dim in zip(given, DIMS)]
        assert vocab_parallel_linear_kl(*mine).isinf().all()
        assert vocab_parallel_linear_kl(*mine, direction="reverse").isfinite().all()

# Equal logits are uniform, whatever their size: the rounding of their log-sum-exps cancels.
x, y = torch.randn(5, 6), torch.randn(5, 4)
weight, weight_y = torch.zeros(8, 6), torch.randn(8, 4)
for each in options:
    results = []
    for value in (0.0, 1e6, torch.finfo(torch.float32).min / 4):
        bias = torch.full((8,), value, requires_grad=True)
        found = vocab_parallel_linear_kl(x, weight, y, weight_y, bias, **each)
        results.append((found, *torch.autograd.grad(found.sum(), bias)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)

# Equal layers have no divergence.
for each in options:
    found = vocab_parallel_linear_kl(y, weight_y, y, weight_y, **each)
    torch.testing.assert_close(found, torch.zeros(5), rtol=0, atol=1e-6)

# One gather in forward, for js also a sum; in backward a sum for each gradient of states.
for each, first in zip(options, (1, 1, 2)):
    for wanted in ([0], [0, 1], [0, 2], [1]):
        mine = [own(t, dim, even) for t, dim in zip(layers((9,), even[-1]), DIMS)]
        for i in set(range(6)) - set(wanted):
            mine[i].requires_grad_(False)
        with CommDebugMode() as forward:
            found = vocab_parallel_linear_kl(*mine, **each)
        with CommDebugMode() as backward:
            found.sum().backward()
        sums = sum(i in wanted for i in (0, 2))
        assert [forward.get_total_counts(), backward.get_total_counts()] == [first, sums]

# In a graph.
x, weight, y, weight_y = [own(t, d, even) for t, d in zip(layers((9,), even[-1]), DIMS)][:4]
for each in options:
    call = lambda x: vocab_parallel_linear_kl(2 * x, weight, y, weight_y, **each)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [(f(x), *torch.autograd.grad(f(x).sum(), (x, weight))) for f in (call, compiled)]
    torch.testing.assert_close(*results)

x, weight = torch.randn(3, 6), torch.randn(8, 6)
with torch.autocast(device, dtype=torch.bfloat16):
    found = vocab_parallel_linear_kl(x, weight, x, weight)
    assert found.dtype == torch.float32
mine = [own(t, dim, even) for t, dim in zip(layers((3,), even[-1]), DIMS)]
x, weight, y, weight_y = mine[:4]
spread = distribute_tensor(weight.detach(), mesh, [Shard(0)])
other = distribute_tensor(torch.randn(11 * size, 4, dtype=torch.float64), mesh, [Shard(0)])
refused = [
    (lambda: vocab_parallel_linear_kl(x, weight, y[:2], weight_y), "y: got shape [2, 4], expected"),
    (lambda: vocab_parallel_linear_kl(x, spread, y, other), "expected the classes of weight"),
    (lambda: vocab_parallel_linear_kl(*mine, rows=torch.ones(2)), "rows: got torch.float32 [2]"),
    (lambda: vocab_parallel_linear_kl(*mine, direction="back"), "direction: got 'back'"),
    (lambda: vocab_parallel_linear_kl(*mine, direction="js", beta=1.0), "beta: got 1"),
]
require_refused(refused)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_divergences_are_those_of_one_process(
    processes: int, device: torch.device, tmp_path: Path
) -> None:
    run_processes(DIVERGENCE, device, processes, tmp_path)
