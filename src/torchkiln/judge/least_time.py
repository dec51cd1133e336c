"""The least time of a call: no right candidate moves fewer bytes or multiplies fewer numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchkiln.bench.clock import Call, Times, device_clock, in_turns
from torchkiln.bench.roofline import PRODUCT, Work, ceilings
from torchkiln.judge.problem import Problem
from torchkiln.testing.compare import outputs
from torchkiln.testing.sample import Sample

MEMORY, ARITHMETIC = "faster than the memory", "faster than the arithmetic"

SHARE = {"cpu": 0.2, "cuda": 0.6}
"""Least time of a candidate, as a share of the shortest copy. Caches of a CPU are faster."""

SHARE_OF_PRODUCT = 0.4
"""Least time, as a share of the shortest product. Half the operations suffice for ``x @ x.T``."""

BUDGET = 1.0
"""Seconds for the shortest copy and product: on a busy machine most calls are interrupted."""

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
"""Ops that count as products; a Fourier transform may replace a convolution with far less work."""


def needed_bytes(problem: Problem, sample: Sample) -> tuple[int, int]:
    """Bytes that any right candidate reads or writes, and those that it writes.

    An input counts with the share of its elements that change the output.
    """
    written = sum(math.prod(s) * d.itemsize for s, d in problem.expected(sample))
    wanted = problem.spec.wanted(sample)
    leaves = problem.spec.leaves(sample, wanted)
    read = 0
    try:
        result = outputs(leaves.call(problem.spec.reference))
        total = sum((y * torch.rand_like(y)).sum() for y in result)
        assert isinstance(total, Tensor)
        grads = torch.autograd.grad(total, leaves.take(wanted), allow_unused=True)
    except RuntimeError:  # the reference has no gradients
        return written, written
    for grad in grads:
        if grad is not None:
            read += int(grad.count_nonzero()) * grad.itemsize
    return read + written, written


class LargestProduct(TorchDispatchMode):
    """Counts the operations of the largest product of two arguments."""

    def __init__(self, known: set[int], most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.most, self.operations = known, most, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for True, torch would import its compiler: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and count its operations."""
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in PRODUCTS and result.numel() <= self.most:
            pair = args[-2:]
            if all(map(self.is_argument, pair)):
                count = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
                filled = math.prod(share_of_nonzero(t) for t in pair)
                self.operations = max(self.operations, int(count * filled))
        return result

    def is_argument(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of an argument, with no element twice."""
        storage = tensor.untyped_storage()
        return storage.data_ptr() in self.known and tensor.nbytes <= storage.nbytes()


def share_of_nonzero(tensor: Tensor) -> float:
    """The share of elements other than 0."""
    return int(tensor.count_nonzero()) / max(tensor.numel(), 1)


def needed_operations(problem: Problem, sample: Sample) -> int:
    """Operations that any right candidate executes; the reference may have more.

    Other formulas than the reference's may need fewer. So only the largest product of two inputs or
    parameters counts, if it is no larger than the output; factors and outputs of 0 do not count.
    """
    count = len(sample.args) - len(problem.weights)
    named = zip(problem.weights, sample.args[count:], strict=True)
    free = [*sample.args[:count], *(t for name, t in named if name in problem.parameters)]
    known = {t.untyped_storage().data_ptr() for t in free if isinstance(t, Tensor)}
    whole = torch.cat([y.flatten() for y in problem.truth(sample)])
    with torch.no_grad(), LargestProduct(known, whole.numel()) as seen:
        sample.call(problem.spec.composite)
    return int(seen.operations * share_of_nonzero(whole))


def product_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Dtypes in which a device multiplies fast: some kernels in float32 use narrower ones."""
    if device.type == "cuda":
        return torch.float32, torch.float16
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (torch.float32, torch.bfloat16) if is_wide else (torch.float32,)


@dataclass(frozen=True)
class LeastTime:
    """Times of calls of torch with as much work as a problem needs."""

    moved: int
    operations: int
    copy: float
    """Shortest seconds of a copy, or of a read."""
    product: float
    """Shortest seconds of a product in a fast dtype; 0 if the problem has few operations."""
    ceiling: float
    """Median seconds of the copy, or of a product in float32 if that takes longer."""
    device: torch.device

    @classmethod
    def of(cls, problem: Problem, sample: Sample) -> Self:
        """Measure the copy and the product for the work of a problem."""
        device = problem.device
        moved, written = needed_bytes(problem, sample)
        operations = needed_operations(problem, sample)
        calls: dict[str, Call] = {}
        for dtype in product_dtypes(device):
            made = ceilings(Work(moved, operations, dtype), written, device)
            calls |= {f"{n} {dtype}" if n == PRODUCT else n: call for n, call in made.items()}
        found = in_turns(device_clock(device), calls, BUDGET)
        copies = [v for n, v in found.items() if not n.startswith(PRODUCT)]
        products = [v for n, v in found.items() if n.startswith(PRODUCT)]
        ceiling = min(Times.of(v).seconds for v in copies)
        if products:  # the first product is in float32
            ceiling = max(ceiling, Times.of(products[0]).seconds)
        copy, product = min(map(min, copies)), min(map(min, products), default=0.0)
        return cls(moved, operations, copy, product, ceiling, device)

    def findings(self, seconds: float) -> Iterator[tuple[str, str]]:
        """The trick, and the evidence, for each kind of work that takes longer than ``seconds``."""
        for trick, work, least in (
            (MEMORY, f"{self.moved} bytes", SHARE[self.device.type] * self.copy),
            (ARITHMETIC, f"{self.operations} operations", SHARE_OF_PRODUCT * self.product),
        ):
            if seconds < least:
                words = f"{work} in {seconds * 1e6:.3g} us, expected at least {least * 1e6:.3g} us"
                yield trick, words
