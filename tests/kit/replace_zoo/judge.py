"""The judge: compares a changed model with an unchanged one.

Of two equal models one is changed. Both get the same calls. All that a call makes visible is
compared: results, gradients, buffers, attributes, random states, exceptions. An error against
float64 may be at most twice that of the unchanged model, or a few roundings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import torchkiln
from replace_zoo.seen import (
    EVENTS,
    MODES,
    Action,
    Inputs,
    Mode,
    Seen,
    attributes_of,
    outcome,
    seeded,
    tensors,
)

KINDS = torchkiln.patch.replacing.KINDS
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "replace": torchkiln.replace,
    "fuse": torchkiln.fuse,
    "recompute": lambda model: torchkiln.fuse(model, recompute=True),
    "all": lambda model: torchkiln.replace(model, only=KINDS),
}
LARGEST_RATIO = 2.0
MEAN_ROUNDINGS, WORST_ROUNDINGS, GRADIENT_ROUNDINGS = 2.0, 8.0, 4.0
"""Errors in units of eps that a result may always have; gradients may have several times more."""


def error_of(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """The root mean square and the largest error over finite elements."""
    difference = (found.double() - truth.double())[truth.isfinite() & found.isfinite()]
    if not difference.numel():
        return 0.0, 0.0
    return float(difference.square().mean().sqrt()), float(difference.abs().max())


def size_of(found: Iterable[Tensor]) -> float:
    """The largest absolute value of all finite numbers."""
    flat = [x.detach().double().abs().flatten() for x in found if x.numel()]
    kept = torch.cat([x[x.isfinite()] for x in flat]) if flat else torch.zeros(0)
    return float(kept.max()) if kept.numel() else 0.0


def far(
    one: Tensor, two: Tensor, truth: Tensor, eps: float, least: float = 0.0, *, loose: bool = False
) -> str:
    """A message if the error of ``two`` exceeds that of ``one`` by more than rounding; else "".

    Roundings are relative to the largest number, at least to ``least``. With ``loose``, used for
    gradients, ``two`` may be finite where a part of the formula of ``one`` overflows.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{two.dtype} {tuple(two.shape)}, not {one.dtype} {tuple(one.shape)}"
    one, two, truth = one.detach(), two.detach(), truth.detach()
    strange = ~two.isfinite() & ~one.isfinite() & (two != one) & ~(two.isnan() & one.isnan())
    strange |= (two.isfinite() != one.isfinite()) & (two.isfinite() != truth.isfinite())
    strange &= ~(two.isnan() & truth.isnan()) & (two.double() != truth.double())
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
    """Messages for each difference of the changed model (``two``) from the original (``one``)."""
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
    """A tensor of floats in another dtype; every other argument as it is."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def of_seed(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A model with the same random parameters in each call."""
    seeded(7)
    return make().to(dtype)


def no_context(_: bool) -> AbstractContextManager[Any]:
    """A context that does nothing."""
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
    inputs: arguments of each call; if the last one is a dict, it holds keyword arguments.
    change: a key of ``CHANGES``.
    dtype: of parameters and arguments.
    before: an action on both models before one of them is changed.
    after: an action on both models after the change.
    around: makes a context for a call from its ``training`` flag.
    modes: the modes of the calls, in this order.
    notes: a list to which the replacements are appended.
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
    done = [row.now for row in report.changed]
    if notes is not None:
        notes.extend(done)
    if after:
        for model in (one, two, truth):
            seeded(5)
            after(model)
            model.to(torch.float64 if model is truth else dtype)
    lowest = torch.bfloat16 if isinstance(around(True), torch.autocast) else dtype
    eps = torch.finfo(lowest).eps
    redraws = any("dropout_add" in now for now in done)
    seed = 100
    for make_mode in modes:
        for args in inputs:
            seed += 1
            calls = [
                partial(outcome, model, split(args, to), seed=seed, around=around, wide=is_wide)
                for model, to, is_wide in (
                    *((one, dtype, False), (two, dtype, False)),
                    (truth, torch.float64, True),
                )
            ]
            seen = [call(mode=make_mode()) for call in calls]
            if is_spoiled(seen[0]) and not seen[1].raised:
                # Torch saved a tensor that is then changed in place, the op did not.
                # With copies of saved tensors, torch computes gradients, too.
                with torch.autograd.graph.allow_mutation_on_saved_tensors():
                    seen = [call(mode=make_mode()) for call in calls]
            mode = make_mode()
            if mode.training and redraws and any(getattr(m, "p", 0) for m in two.modules()):
                problems += drops(two, split(args, dtype))
                continue
            shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
            problems += [
                f"{mode}, {shapes}: {text}" for text in differences(seen[0], seen[1], seen[2], eps)
            ]
    try:
        report.undo()
    except RuntimeError as error:
        # documented: undo() refuses a class that was changed later
        return problems if after and "changed the class" in str(error) else [*problems, str(error)]
    return problems + undone(one, two, [split(args, dtype) for args in inputs[:2]], around)


def is_spoiled(seen: Seen) -> bool:
    """Whether backward raised because a saved tensor was changed in place."""
    return bool(seen.raised) and "modified by an inplace operation" in str(seen.attributes)


def split(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a call, floating-point tensors cast to ``dtype``."""
    options = args[-1] if args and isinstance(args[-1], dict) else {}
    positional = args[: len(args) - bool(options)]
    return [cast(x, dtype) for x in positional], tree_map(lambda x: cast(x, dtype), options)


def drops(model: nn.Module, given: Any) -> list[str]:
    """A message if two calls in training have equal results: no dropout was active."""
    model.train()
    with torch.no_grad():
        one, two = (tensors(model(*given[0], **given[1])) for _ in range(2))
    equal = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return ["training: the dropout is gone"] if equal else []


def undone(one: nn.Module, two: nn.Module, calls: list[Any], around: Action) -> list[str]:
    """Differences from the original that remain after ``undo()``."""
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
