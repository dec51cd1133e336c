"""Losses whose classes are distributed over processes agree with those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

LOGITS = """
import itertools
import torchkiln
from torchkiln.distributed import vocab_parallel_cross_entropy

torch.manual_seed(0)
OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "ignore_index": 3},
    {"label_smoothing": 0.2, "z_loss": 0.01},
    {"label_smoothing": 1.0, "reduction": "none"},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.3, "z_loss": 0.1, "reduction": "sum"},
    {"softcap": 3.0, "z_loss": 0.02},
    {"loss_dtype": torch.float32, "reduction": "none"},
]


def compare(shape, cuts, *, offset=0.0, dtype=torch.float64, **options):
    classes, (begin, end) = shape[-1], (cuts[rank], cuts[rank + 1])
    whole = (3 * torch.randn(shape, dtype=torch.float64) + offset).to(dtype).requires_grad_()
    target = torch.randint(classes, shape[:-1])
    target.flatten()[1::4] = options.get("ignore_index", -100)
    factors = torch.rand(classes, dtype=torch.float64).to(dtype) + 0.1
    weight = factors if options.pop("weight", False) else None
    rows = whole.reshape(-1, classes)
    expected = torchkiln.cross_entropy(rows, target.reshape(-1), weight, **options)
    grad = torch.randn(expected.shape, dtype=expected.dtype)
    expected.backward(grad)

    mine = whole.detach()[..., begin:end].clone().requires_grad_()
    own = None if weight is None else weight[begin:end].clone()
    loss = vocab_parallel_cross_entropy(
        mine, target, None, own, classes=classes, first_class=begin, **options
    )
    assert loss.dtype == expected.dtype
    loss.backward(grad.view(loss.shape))
    close = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(loss, expected.view(loss.shape), **close)
    torch.testing.assert_close(mine.grad, whole.grad[..., begin:end], **close)


even = [i * 8 for i in range(size + 1)]
uneven = [0, *(5 + 9 * i for i in range(1, size)), 9 * size + 1]
for cuts, options in itertools.product((even, uneven), OPTIONS):
    compare((7, cuts[-1]), cuts, **options)
compare((2, 3, even[-1]), even, reduction="none")
compare((9, even[-1]), even, dtype=torch.bfloat16, label_smoothing=0.1)
compare((9, even[-1]), even, dtype=torch.float16, weight=True)

# A large offset costs no digits.
torch.manual_seed(1)
logits = torch.randn(5, 8 * size) + 10000
target = torch.arange(5)
found = vocab_parallel_cross_entropy(logits[:, 8 * rank : 8 * rank + 8], target)
torch.testing.assert_close(
    found.double(), torch.nn.functional.cross_entropy(logits.double(), target), rtol=1e-6, atol=0
)

# The last shard holds padding, and small logits beside it.
logits = torch.randn(4, 8 * size) - 500
logits[:, -8:] = -torch.inf
logits.requires_grad_()
expected = torchkiln.cross_entropy(logits, torch.arange(4))
expected.backward()
mine = logits.detach()[:, 8 * rank : 8 * rank + 8].clone().requires_grad_()
found = vocab_parallel_cross_entropy(mine, torch.arange(4))
found.backward()
torch.testing.assert_close(found, expected)
torch.testing.assert_close(mine.grad, logits.grad[:, 8 * rank : 8 * rank + 8])

# No rows, and no row that counts.
empty = torch.randn(0, 8, requires_grad=True)
found = vocab_parallel_cross_entropy(empty, torch.zeros(0, dtype=torch.int64), reduction="sum")
found.backward()
assert found == 0 and empty.grad.shape == (0, 8)
mine = torch.randn(3, 8, requires_grad=True)
found = vocab_parallel_cross_entropy(mine, torch.full((3,), -100))
found.backward()
assert found.isnan() and (mine.grad == 0).all()

# The shards of torch.chunk, and what DTensor says.
classes = 8 * size - 1
logits = torch.randn(6, classes, dtype=torch.float64)
target = torch.randint(classes, (6,))
expected = torchkiln.cross_entropy(logits, target)
mine = logits.chunk(size, -1)[rank]
torch.testing.assert_close(vocab_parallel_cross_entropy(mine, target, classes=classes), expected)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh(device, (size,))
spread = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
found = vocab_parallel_cross_entropy(spread, target)
(grad,) = torch.autograd.grad(found, spread)
torch.testing.assert_close(found, expected)
assert grad.placements == (Shard(1),)
logits.requires_grad_()
torchkiln.cross_entropy(logits, target).backward()
torch.testing.assert_close(grad.full_tensor(), logits.grad)

copies = distribute_tensor(logits.detach(), mesh, [Replicate()])

# In a graph.
compiled = torch.compile(
    lambda x: vocab_parallel_cross_entropy(2 * x, target, classes=classes),
    backend="aot_eager",
    fullgraph=True,
)
wide = mine.detach().clone().requires_grad_()
found = compiled(wide)
found.backward()
torch.testing.assert_close(found, torchkiln.cross_entropy(2 * logits, target))
assert wide.grad is not None

# Errors reach all processes before they communicate.
refused = [
    (lambda: vocab_parallel_cross_entropy(mine, target, classes=classes + 99), "as torch.chunk"),
    (lambda: vocab_parallel_cross_entropy(mine, target[:3]), "a class, counted over all shards"),
    (lambda: vocab_parallel_cross_entropy(mine, target, reduction="max"), "reduction: got 'max'"),
    (lambda: vocab_parallel_cross_entropy(mine, target, softcap=0.0), "softcap: got 0.0"),
    (lambda: vocab_parallel_cross_entropy(mine, target, first_class=1), "classes: got None"),
    (lambda: vocab_parallel_cross_entropy(copies, target), "redistribute"),
]
if device == "cpu":  # on a GPU the kernel ends with a failed assertion
    beyond = lambda: vocab_parallel_cross_entropy(mine, target + 99, classes=classes)
    refused.append((beyond, "expected one of"))
require_refused(refused, (ValueError, IndexError))
"""

LINEAR = """
import itertools
import torchkiln
from torchkiln.distributed import linear_loss, vocab_parallel_linear_cross_entropy

torch.manual_seed(0)
OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "ignore_index": 3, "bias": True},
    {"label_smoothing": 0.2, "z_loss": 0.01, "weight": True, "bias": True},
    {"softcap": 3.0, "z_loss": 0.02, "bias": True},
    {"softcap": 3.0, "reduction": "none", "weight": True},
    {"temperature": 0.7, "bias": True},
    {"temperature": 1.5, "softcap": 3.0, "reduction": "none"},
]


def compare(shape, cuts, *, dtype=torch.float64, **options):
    classes, (begin, end) = cuts[-1], (cuts[rank], cuts[rank + 1])
    made = lambda *sizes: torch.randn(sizes, dtype=torch.float64).to(dtype)
    x, weight = made(*shape).requires_grad_(), made(classes, shape[-1]).requires_grad_()
    bias = made(classes).requires_grad_() if options.pop("bias", False) else None
    factors = made(classes).abs() + 0.1 if options.pop("weight", False) else None
    target = torch.randint(classes, shape[:-1])
    target.flatten()[1::4] = options.get("ignore_index", -100)
    leaves = [t for t in (x, weight, bias) if t is not None]
    expected = torchkiln.linear_cross_entropy(
        x, weight, target, linear_bias=bias, weight=factors, **options
    )
    grad = made(*expected.shape).to(expected.dtype)
    expected.backward(grad)
    grads = [t.grad for t in leaves]

    mine = [x.detach().clone(), *(t.detach()[begin:end].clone() for t in leaves[1:])]
    mine = [t.requires_grad_() for t in mine]
    own = None if factors is None else factors[begin:end].clone()
    loss = vocab_parallel_linear_cross_entropy(
        mine[0], mine[1], target, linear_bias=mine[2] if mine[2:] else None, classes=classes,
        first_class=begin, weight=own, **options,
    )
    loss.backward(grad)
    close = {} if dtype == torch.float64 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(mine[0].grad, grads[0], **close)
    for found, whole in zip(mine[1:], grads[1:]):
        torch.testing.assert_close(found.grad, whole[begin:end], **close)


even = [i * 8 for i in range(size + 1)]
uneven = [0, *(5 + 9 * i for i in range(1, size)), 9 * size + 1]
linear_loss.LEAST_ROWS = linear_loss.MOST_ROWS = 4  # several chunks
for cuts, options in itertools.product((even, uneven), OPTIONS):
    compare((2, 5, 6), cuts, **options)
compare((9, 6), even, dtype=torch.bfloat16)
compare((0, 6), even, reduction="sum")

x = torch.randn(3, 6, requires_grad=True)
weight = torch.randn(8, 6)
found = vocab_parallel_linear_cross_entropy(x, weight, torch.full((3,), -100))
found.backward()
assert found.isnan() and (x.grad == 0).all()
with torch.autocast(device, dtype=torch.bfloat16):
    found = vocab_parallel_linear_cross_entropy(x, weight, torch.arange(3))
assert found.dtype == torch.float32
"""


LOGPROB = """
import itertools
import torchkiln
from torchkiln.distributed import linear_loss, vocab_parallel_linear_logprob, vocab_parallel_logprob
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

torch.manual_seed(0)
mesh = init_device_mesh(device, (size,))
OPTIONS = [
    {},
    {"entropy": True},
    {"entropy": True, "temperature": 0.6, "ignore_index": 3},
]


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def compare(call, expected, leaves, mine, cuts, dims, entropy, close):
    found = call(mine)
    pairs = list(zip(found, expected)) if entropy else [(found, expected)]
    grads = [torch.randn_like(y) for _, y in pairs]
    truth = torch.autograd.grad([y for _, y in pairs], leaves, grads)
    ours = torch.autograd.grad([y for y, _ in pairs], mine, grads)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    for one, other, dim in zip(ours, truth, dims):
        if isinstance(one, DTensor):
            one = one.full_tensor()
        elif dim is not None:
            other = other.narrow(dim, cuts[rank], cuts[rank + 1] - cuts[rank])
        torch.testing.assert_close(one, other, **close)


def both(
    shape, cuts, *, dtype=torch.float64, softcap=None, has_bias=True, spread=False, rows=None,
    **options,
):
    classes, features = cuts[-1], 6
    target = torch.randint(classes, shape)
    target.flatten()[1::4] = options.get("ignore_index", -100)
    entropy = options.get("entropy", False)
    close = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    place = {} if spread else {"classes": classes, "first_class": cuts[rank]}
    own = lambda t, dim: t.detach().narrow(dim, cuts[rank], cuts[rank + 1] - cuts[rank])

    def shard(t, dim):
        if spread:
            placement = Replicate() if dim is None else Shard(dim)
            return distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
        return (t.detach() if dim is None else own(t, dim)).clone().requires_grad_()

    whole = normal(*shape, classes, dtype=dtype).requires_grad_()
    compare(
        lambda given: vocab_parallel_logprob(given[0], target, **place, **options),
        torchkiln.logprob(whole, target, **options),
        [whole], [shard(whole, len(shape))], cuts, [len(shape)], entropy, close,
    )
    leaves = [normal(*shape, features, dtype=dtype), normal(classes, features, dtype=dtype)]
    leaves += [normal(classes, dtype=dtype)] if has_bias else []
    leaves, dims = [t.requires_grad_() for t in leaves], [None, 0, 0][: len(leaves)]
    options |= {"softcap": softcap, "rows": rows}
    compare(
        lambda given: vocab_parallel_linear_logprob(
            *given[:2], target, *given[2:], **place, **options
        ),
        torchkiln.linear_logprob(*leaves[:2], target, *leaves[2:], **options),
        leaves, [shard(t, d) for t, d in zip(leaves, dims)], cuts, dims, entropy, close,
    )


even = [i * 8 for i in range(size + 1)]
uneven = [0, *(5 + 9 * i for i in range(1, size)), 9 * size + 1]
linear_loss.LEAST_ROWS = linear_loss.MOST_ROWS = 4  # several chunks
for cuts, options in itertools.product((even, uneven), OPTIONS):
    both((2, 5), cuts, **options)
both((7,), even, entropy=True, softcap=3.0, has_bias=False)
both((9,), even, entropy=True, dtype=torch.bfloat16)
both((0,), even, entropy=True)
both((2, 5), even, entropy=True, spread=True)
rows = torch.tensor([7, 0, 3, 8, 2])
both((2, 5), uneven, entropy=True, ignore_index=3, rows=rows)
both((2, 5), even, rows=torch.zeros(10, dtype=bool).index_fill(0, rows, True).view(2, 5))
both((2, 5), even, entropy=True, spread=True, rows=rows)
both((2, 5), even, entropy=True, rows=rows[:0])

# One gather in forward; in backward one sum, of the gradients of x.
from torch.distributed.tensor.debug import CommDebugMode

logits, target = normal(9, 8).requires_grad_(), torch.arange(9)
x, weight = normal(9, 6).requires_grad_(), normal(8, 6).requires_grad_()
for call, expected in (
    (lambda: vocab_parallel_logprob(logits, target, entropy=True), [1, 0]),
    (lambda: vocab_parallel_linear_logprob(x, weight, target, entropy=True), [1, 1]),
):
    with CommDebugMode() as forward:
        logp, entropy = call()
    with CommDebugMode() as backward:
        (logp + entropy).sum().backward()
    assert [forward.get_total_counts(), backward.get_total_counts()] == expected

with torch.autocast(device, dtype=torch.bfloat16):
    found = vocab_parallel_linear_logprob(x.float(), weight.float(), target)
expected = vocab_parallel_linear_logprob(x.bfloat16(), weight.bfloat16(), target)
assert found.dtype == torch.float32 and torch.equal(found, expected)

refused = [
    (lambda: vocab_parallel_logprob(normal(3, 8), torch.arange(2)), "a class, counted over all"),
    (lambda: vocab_parallel_logprob(normal(3, 8), torch.arange(3), temperature=0.0), "temperature"),
    (
        lambda: vocab_parallel_linear_logprob(normal(3, 5), normal(8, 6), torch.arange(3)),
        "weight: got",
    ),
    (
        lambda: vocab_parallel_linear_logprob(
            normal(3, 6), normal(8, 6), torch.arange(3), rows=torch.ones(2)
        ),
        "rows: got torch.float32 [2], expected torch.int64 [any]",
    ),
]
require_refused(refused)
"""


def test_log_probabilities_are_those_of_one_process(device: torch.device, tmp_path: Path) -> None:
    run_processes(LOGPROB, device, 4, tmp_path)


def test_the_losses_are_those_of_one_process(device: torch.device, tmp_path: Path) -> None:
    run_processes(LOGITS + LINEAR, device, 4, tmp_path)
