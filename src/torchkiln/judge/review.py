"""Judges the reference first: a problem whose answer carries no information cannot be judged."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchkiln.judge.exchange import secret
from torchkiln.judge.problem import Problem
from torchkiln.testing.sample import Sample

NEAR_ZERO = 1e-6
"""Largest output, relative to the largest input, of a problem without an answer."""
VARIATION = 1e-9
"""Least relative variation along an axis."""
WASTED = 0.1
"""Largest share of elements that a reference may compute for nothing."""


class Record(TorchDispatchMode):
    """Records the ATen ops of a call: what each reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, tuple[int, ...], tuple[Any, ...], tuple[int, ...], int]] = []
        self.alive: list[Any] = []
        self.terms = 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for True, torch would import its compiler: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an op, and run it."""
        result = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        plain = tuple(
            repr(v) for v in tree_leaves((args, kwargs or {})) if not isinstance(v, Tensor)
        )
        self.alive += [*read, *made]
        is_view = any(r.alias_info is not None for r in func._schema.returns)
        count = 0 if is_view else sum(t.numel() for t in made)
        ids = tuple(map(id, made))
        self.ops.append((str(func), tuple(map(id, read)), plain, ids, count))
        self.terms = max(self.terms, sum_length(func, read, made))
        return result


def sum_length(func: Any, read: list[Tensor], made: list[Tensor]) -> int:
    """Terms of the sums that an op computes."""
    name = func._schema.name
    if not read or not made or not made[0].numel():
        return 1
    if any(word in name for word in ("mm", "matmul", "linear", "dot", "mv")):
        matrix = next((t for t in read if t.dim() >= 2), read[0])
        return int(max(matrix.shape, default=1)) if name != "aten::linear" else read[0].shape[-1]
    if "conv" in name:
        return math.prod(read[1].shape[1:])
    if any(word in name for word in ("sum", "mean", "norm", "var", "std", "cum", "softmax")):
        largest = max(t.numel() for t in read)
        smallest = made[0].numel()
        rows = max(read[0].shape, default=1) if smallest == largest else largest // smallest
        return int(rows)
    return 1


def record(problem: Problem, sample: Sample) -> tuple[Record, tuple[Tensor, ...]]:
    """Run the reference in the dtype of the sample, and record its ops."""
    with torch.no_grad(), Record() as seen:
        made = sample.call(problem.spec.composite)
    return seen, tuple(t for t in tree_leaves(made) if isinstance(t, Tensor))


def redundant(seen: Record, results: tuple[Tensor, ...]) -> str | None:
    """Work whose result is not used, or that is done twice."""
    if any(name.endswith("_") or "_." in name for name, *_ in seen.ops):
        return None  # an op in place: the record does not order its reads and writes
    used = set(map(id, results))
    wasted: Counter[str] = Counter()
    total = 0
    for name, read, _plain, made, count in reversed(seen.ops):
        total += count
        if used & set(made):
            used |= set(read)
        else:
            wasted[name] += count
    if total and sum(wasted.values()) > WASTED * total:
        return f"the result of {wasted.most_common(1)[0][0]} is not used"
    calls = Counter(
        (name, read, plain) for name, read, plain, _, count in seen.ops if count * 10 > total
    )
    for (name, read, _), times in calls.items():
        if times > 1 and read and "rand" not in name:
            return f"{name} is called {times} times with the same arguments"
    return None


def weaknesses(problem: Problem) -> list[str]:
    """The reasons why the problem cannot tell right from wrong; empty if it can."""
    first, second = problem.given(secret(), 0), problem.given(secret(), 0)
    truth, other = problem.truth(first), problem.truth(second)
    seen, results = record(problem, first)
    problem.terms = seen.terms
    found = []
    if not any(y.numel() for y in truth):
        return ["it has no output"]
    largest = max((float(a.abs().max()) for a in _floats(first) if a.numel()), default=1.0)
    if all(torch.equal(y, z) for y, z in zip(truth, other, strict=True)):
        return ["its output does not depend on the inputs"]
    if not any(bool(y.isfinite().any()) for y in truth):
        return ["its output is not finite"]
    if all(float(torch.nan_to_num(y).abs().max()) <= NEAR_ZERO * largest for y in truth):
        found.append(f"its output is near zero: at most {NEAR_ZERO:g} of the largest input")
    for i, y in enumerate(truth):
        found += [f"output {i} {words}" for words in flat_axes(y)]
    found += ignored(problem, first, truth)
    if words := redundant(seen, results):
        found.append(f"it does redundant work: {words}")
    return found


def _floats(sample: Sample) -> list[Tensor]:
    return [a for a in sample.args if isinstance(a, Tensor) and a.is_floating_point()]


def flat_axes(y: Tensor) -> list[str]:
    """Axes along which an output does not vary."""
    if y.dim() == 0 or not bool(y.isfinite().all()):
        return []
    size = float(y.abs().max()) or 1.0
    return [
        f"does not vary along axis {d} of {y.shape[d]}"
        for d in range(y.dim())
        if y.shape[d] > 1 and float((y.amax(d) - y.amin(d)).max()) <= VARIATION * size
    ]


def ignored(problem: Problem, sample: Sample, truth: tuple[Tensor, ...]) -> list[str]:
    """Inputs and weights that do not change the output."""
    count = len(sample.args) - len(problem.weights)
    found = []
    for i in sample.positions:
        value = sample.args[i]
        if not value.is_floating_point() or not value.numel():
            continue
        generator = torch.Generator(device=value.device).manual_seed(secret())
        factor = torch.rand(value.shape, generator=generator, device=value.device) + 0.5
        changed = sample.substitute(i, value * factor + 0.1 * factor * (value == 0))
        try:
            now = problem.truth(changed)
        except Exception:
            continue
        is_buffer = i >= count and problem.weights[i - count] not in problem.parameters
        if not is_buffer and all(map(same, now, truth)):
            what = f"input {i}" if i < count else f"weight {problem.weights[i - count]}"
            found.append(f"its output ignores {what}")
    return found


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by no more than rounding in float64."""
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    change = torch.nan_to_num((one - other).abs(), nan=0.0, posinf=torch.inf)
    return float(change.max()) <= VARIATION * float(torch.nan_to_num(other).abs().max())


def perturbed(problem: Problem, sample: Sample, seed: int) -> Sample:
    """The call with other weights, so that weights of 0 and 1 have an effect."""
    if not problem.weights:
        return sample
    generator = torch.Generator(device=problem.device).manual_seed(seed)
    count = len(sample.args) - len(problem.weights)
    weights = [
        w + 0.1 * torch.randn(w.shape, generator=generator, device=w.device, dtype=w.dtype)
        if name in problem.parameters
        else w
        for name, w in zip(problem.weights, sample.args[count:], strict=True)
    ]
    return replace(sample, args=(*sample.args[:count], *weights))
