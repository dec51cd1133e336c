"""The judge: a changed model beside an untouched one.

Two equal models are made, and one of them is changed. Both get the same calls, and what can be seen
of each call is compared: results, gradients, buffers, attributes, random states, exceptions. Results
and gradients may be as far from those of float64 as twice the original's, or a few roundings.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import torchkiln

EVENTS: list[Any] = []
"""Effects outside of a module: hooks and forwards of the zoo write them here."""

KINDS = torchkiln.patch.replacing.KINDS
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "replace": torchkiln.replace,
    "fuse": torchkiln.fuse,
    "recompute": lambda model: torchkiln.fuse(model, recompute=True),
    "all": lambda model: torchkiln.replace(model, only=KINDS),
}
LARGEST_RATIO = 2.0
MEAN_ROUNDINGS, WORST_ROUNDINGS, GRADIENT_ROUNDINGS = 2.0, 8.0, 4.0
"""Errors in units of eps that a result may have anyway; gradients have several times as many."""

HOOKS = tuple(vars(nn.Module()))
"""Attributes of every module; those of the class's own are compared."""

Inputs = Sequence[tuple[Any, ...]]
Action = Callable[[Any], Any]


@dataclass(frozen=True)
class Mode:
    """How the models are called."""

    training: bool
    grad: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def __str__(self) -> str:
        return f"{'training' if self.training else 'eval'}, {type(self.grad).__name__}"


MODES: tuple[Callable[[], Mode], ...] = (
    lambda: Mode(True),
    lambda: Mode(False),
    lambda: Mode(True),
    lambda: Mode(False, torch.no_grad()),
    lambda: Mode(False, torch.inference_mode()),
)


class Precision(TorchDispatchMode):
    """The largest eps of the dtypes that a model computes in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for x in tensors(result):
            self.eps = max(self.eps, torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0)
        return result


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


@dataclass
class Seen:
    """All that a call shows."""

    raised: str = ""
    form: Any = None
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    arguments: list[Tensor] = field(default_factory=list)
    attributes: Any = None
    events: list[Any] = field(default_factory=list)
    backward_events: Any = None
    state: Any = None
    eps: float = 0.0


class About(float):
    """A number that is equal to others near it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, rel_tol=1e-2, abs_tol=1e-9)

    def __ne__(self, other: object) -> bool:
        return not self == other


def shown(value: Any, depth: int = 3) -> Any:
    """An attribute in a form that can be compared; tensors by their shape and size."""
    if type(value) in (Tensor, nn.Parameter):
        size = About(value.detach().double().nan_to_num().norm())
        return ("tensor", value.dtype, tuple(value.shape), size, value.requires_grad)
    if isinstance(value, (list, tuple, set)) and depth:
        return [type(value).__name__, *(shown(x, depth - 1) for x in value)]
    if isinstance(value, dict) and depth:
        return {str(key): shown(x, depth - 1) for key, x in value.items()}
    if isinstance(value, (int, float, str, type(None))):
        return value
    inner = getattr(value, "__dict__", None)
    named = type(value).__name__
    return [named, shown(inner, depth - 1)] if inner and depth and not callable(value) else named


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """What the modules of a model hold beside parameters, buffers, children and hooks."""
    return {
        f"{name}.{key}": shown(value)
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if key not in HOOKS and key != "forward"
    } | {f"{name}.training": m.training for name, m in model.named_modules()}


def seeded(seed: int) -> None:
    """Seed torch, without GPUs, and Python."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


def own(x: Any, *, needs_grad: bool) -> Any:
    """A leaf with the values and strides of an argument."""
    if not isinstance(x, Tensor):
        return copy.deepcopy(x)
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    return new.requires_grad_(needs_grad and x.is_floating_point())


def outcome(
    model: nn.Module, given: Any, mode: Mode, seed: int, around: Action, *, wide: bool = False
) -> Seen:
    """Call a model, and go backward if the results have a graph; ``wide`` records its dtypes."""
    seen = Seen()
    model.train(mode.training)
    model.zero_grad()
    seeded(seed)
    EVENTS.clear()
    args, options = given
    leaves = [own(x, needs_grad=True) for x in args]
    precision = Precision()
    with warnings.catch_warnings(), precision if wide else nullcontext():
        warnings.simplefilter("ignore")
        try:
            with mode.grad, around(mode.training):
                passed = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                made = model(*passed, **options)
            seen.results, seen.form = tensors(made), forms(made, passed)
            seen.events = list(EVENTS)
            EVENTS.clear()
            backward(seen.results, seed)
        except Exception as error:  # forwards raise anything
            seen.raised = type(error).__name__
            seen.attributes = str(error)[:200]
            return seen
    seen.state = (torch.get_rng_state().sum().item(), hash(random.getstate()))
    seen.backward_events = Counter(map(str, EVENTS))
    wanted = [(f"argument {i}", x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    for name, x in [*wanted, *model.named_parameters()]:
        seen.gradients[name] = x.grad
    seen.buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
    seen.arguments = [x.detach() for x in passed if isinstance(x, Tensor)]
    seen.attributes, seen.eps = attributes_of(model), precision.eps
    return seen


def backward(results: Iterable[Tensor], seed: int) -> None:
    """Gradients of all results, with drawn cotangents."""
    roots = [y for y in results if y.requires_grad and y.is_floating_point()]
    generator = torch.Generator().manual_seed(seed)
    if roots:
        draws = [torch.randn(y.shape, generator=generator, dtype=torch.double) for y in roots]
        torch.autograd.backward(roots, [d.to(y.dtype) for d, y in zip(draws, roots, strict=True)])


def forms(made: Any, passed: list[Any]) -> list[Any]:
    """Structure, dtype, shape, strides and aliases of the results."""
    flat, tree = tree_flatten(made)
    found: list[Any] = [str(tree)]
    for y in flat:
        if not isinstance(y, Tensor):
            found.append(shown(y))
            continue
        steps = [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1 and y.numel()]
        alias = [i for i, x in enumerate(passed) if isinstance(x, Tensor) and y is x]
        found.append((y.dtype, tuple(y.shape), steps, y.requires_grad, y.is_leaf, alias))
    return found


def error_of(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """The root mean square and the largest error over finite elements."""
    difference = (found.double() - truth.double())[truth.isfinite() & found.isfinite()]
    if not difference.numel():
        return 0.0, 0.0
    return float(difference.square().mean().sqrt()), float(difference.abs().max())


def size_of(found: Iterable[Tensor]) -> float:
    """The largest finite number of tensors."""
    flat = [x.detach().double().abs().flatten() for x in found if x.numel()]
    kept = torch.cat([x[x.isfinite()] for x in flat]) if flat else torch.zeros(0)
    return float(kept.max()) if kept.numel() else 0.0


def far(
    one: Tensor, two: Tensor, truth: Tensor, eps: float, least: float = 0.0, *, loose: bool = False
) -> str:
    """How far ``two`` is off where ``one`` is not.

    ``least`` is a size that roundings refer to. Where ``loose``, as for gradients, there may be a
    number where the original has none, because a part of its formula overflows.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{two.dtype} {tuple(two.shape)}, not {one.dtype} {tuple(one.shape)}"
    one, two, truth = one.detach(), two.detach(), truth.detach()
    strange = ~two.isfinite() & ~one.isfinite() & (two != one) & ~(two.isnan() & one.isnan())
    strange |= (two.isfinite() != one.isfinite()) & (two.isfinite() != truth.isfinite())
    if loose:
        strange &= ~two.isfinite()
    if bool(strange.any()):
        return f"{int(strange.sum())} numbers are infinite or NaN in one of both alone"
    kept = truth.double()[truth.isfinite()]
    size = float(kept.square().mean().sqrt()) if kept.numel() else 0.0
    largest = float(kept.abs().max()) if kept.numel() else 0.0
    was, now = error_of(one, truth), error_of(two, truth)
    tiny = torch.finfo(one.dtype).tiny if one.is_floating_point() else 0.0
    limits = (
        LARGEST_RATIO * was[0] + MEAN_ROUNDINGS * eps * max(size, least) + tiny,
        LARGEST_RATIO * was[1] + WORST_ROUNDINGS * eps * max(largest, least) + tiny,
    )
    if now[0] <= limits[0] and now[1] <= limits[1]:
        return ""
    return f"{now[1]:.2g} off, the original {was[1]:.2g}, of {largest:.2g}"


def differences(one: Seen, two: Seen, truth: Seen, eps: float) -> Iterator[str]:
    """What a changed model shows that the original does not."""
    if one.raised or two.raised:
        if bool(one.raised) != bool(two.raised):
            texts = [s.attributes if s.raised else "" for s in (one, two)]
            yield f"raises {two.raised or 'nothing'}, not {one.raised or 'nothing'} {texts}"
        return
    for name in ("form", "events", "backward_events", "state", "attributes"):
        was, now = getattr(one, name), getattr(two, name)
        if was != now and isinstance(was, dict):
            was, now = (
                {k: v for k, v in a.items() if k not in b or b[k] != v}
                for a, b in ((was, now), (now, was))
            )
        if was != now:
            yield f"{name}: {now}, not {was}"
    truth = one if truth.raised else truth
    if one.form[0] != two.form[0] or one.gradients.keys() != two.gradients.keys():
        return
    eps = max(truth.eps, eps)
    whole = size_of(truth.results)
    for kind, size in (("results", whole), ("arguments", 0.0)):
        rows = zip(getattr(one, kind), getattr(two, kind), getattr(truth, kind), strict=True)
        yield from (f"{kind}: {text}" for row in rows if (text := far(*row, eps, size)))
    for name, x in one.buffers.items():
        if text := far(x, two.buffers[name], truth.buffers[name], eps):
            yield f"buffer {name}: {text}"
    scale = size_of(g for g in one.gradients.values() if g is not None)
    for name, g in one.gradients.items():
        other, wide = two.gradients[name], truth.gradients[name]
        if g is None or other is None or wide is None:
            if (g is None) != (other is None):
                yield f"gradient of {name}: {'none' if other is None else 'one'}"
        elif text := far(g, other, wide, GRADIENT_ROUNDINGS * eps, scale, loose=True):
            yield f"gradient of {name}: {text}"


def cast(value: Any, dtype: torch.dtype) -> Any:
    """An argument in another dtype."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def of_seed(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A model, always the same one."""
    seeded(7)
    return make().to(dtype)


def no_context(_: bool) -> AbstractContextManager[Any]:
    """Nothing around a call."""
    return nullcontext()


def same(
    make: Callable[[], nn.Module],
    inputs: Inputs,
    change: str = "replace",
    *,
    dtype: torch.dtype = torch.float32,
    before: Action | None = None,
    after: Action | None = None,
    around: Action = no_context,
    modes: Sequence[Callable[[], Mode]] = MODES,
    notes: list[str] | None = None,
) -> list[str]:
    """The differences between a model and its changed twin; none if the change is right.

    Args:
        make: makes the model.
        inputs: arguments of calls; a dict as the last one has keyword arguments.
        change: a key of ``CHANGES``.
        dtype: of parameters and arguments.
        before: done to the models before one of them is changed.
        after: done to both models later.
        around: a context for the calls, given whether they are of training.
        modes: how to call, in turn.
        notes: gets what was replaced.
    """
    one, two, truth = (of_seed(make, t) for t in (dtype, dtype, torch.float64))
    for model in (one, two, truth):
        if before:
            seeded(3)
            before(model)
    seeded(11)
    state = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    EVENTS.clear()
    report = CHANGES[change](two)
    problems: list[str] = []
    if EVENTS:
        problems.append(f"{change} itself: effects outside of the model: {EVENTS}")
    after_state = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    if not torch.equal(state[0], after_state[0]) or state[1:] != after_state[1:]:
        problems.append(f"{change} itself: random states")
    if attributes_of(one) != attributes_of(two):
        was, now = attributes_of(one), attributes_of(two)
        changed = {k for k in was.keys() | now.keys() if was.get(k) != now.get(k)}
        problems.append(f"{change} itself: attributes {changed}")
    done = [row.now for row in report.replaced]
    if notes is not None:
        notes.extend(done)
    if after:
        for model in (one, two, truth):
            seeded(5)
            after(model.to(dtype if model is not truth else torch.float64))
    lowest = torch.bfloat16 if isinstance(around(True), torch.autocast) else dtype
    eps = torch.finfo(lowest).eps
    redraws = any("dropout_add" in now for now in done)
    seed = 100
    for make_mode in modes:
        for args in inputs:
            seed += 1
            seen = []
            for model, to in ((one, dtype), (two, dtype), (truth, torch.float64)):
                given, wide = split(args, to), model is truth
                seen.append(outcome(model, given, make_mode(), seed, around, wide=wide))
            mode = make_mode()
            if mode.training and redraws and any(getattr(m, "p", 0) for m in two.modules()):
                problems += drops(two, split(args, dtype))
                continue
            shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
            problems += [f"{mode}, {shapes}: {text}" for text in differences(*seen, eps)]
    try:
        report.undo()
    except RuntimeError as error:
        # documented: something else has changed the class since
        return problems if after and "changed the class" in str(error) else [*problems, str(error)]
    return problems + undone(one, two, [split(args, dtype) for args in inputs[:2]], around)


def split(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keyword arguments in a dtype."""
    options = args[-1] if args and isinstance(args[-1], dict) else {}
    positional = args[: len(args) - bool(options)]
    return [cast(x, dtype) for x in positional], tree_map(lambda x: cast(x, dtype), options)


def drops(model: nn.Module, given: Any) -> list[str]:
    """Whether dropouts whose numbers are drawn otherwise are active."""
    model.train()
    with torch.no_grad():
        one, two = (tensors(model(*given[0], **given[1])) for _ in range(2))
    equal = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return ["training: the dropout is gone"] if equal else []


def undone(one: nn.Module, two: nn.Module, calls: list[Any], around: Action) -> list[str]:
    """What is left of the change."""
    if [type(m).__name__ for m in one.modules()] != [type(m).__name__ for m in two.modules()]:
        return ["undo: classes"]
    two.load_state_dict(one.state_dict(), strict=False)
    found: list[str] = []
    for seed, given in enumerate(calls):
        for training in (True, False):
            a, b = (outcome(m, given, Mode(training), seed, around) for m in (one, two))
            pairs = zip(
                [*a.results, *(g for g in a.gradients.values() if g is not None)],
                [*b.results, *(g for g in b.gradients.values() if g is not None)],
                strict=False,
            )
            equal = all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
            if a.raised != b.raised or a.form != b.form or a.events != b.events or not equal:
                found.append(f"undo: another result, {b.raised} {b.attributes if b.raised else ''}")
    return found[:1]
