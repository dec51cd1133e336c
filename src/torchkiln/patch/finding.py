"""The modules to which ``torchkiln.replace`` gives a new forward, and the rows of its report."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from torchkiln.patch.graph import batch_norm
from torchkiln.patch.plan import Candidate, Match, Plan, made_class
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.registry import Registry
from torchkiln.patch.report import Replacement
from torchkiln.patch.search import Search, replaced_before
from torchkiln.patch.source.heads import Head as OfHead
from torchkiln.patch.source.heads import find as find_heads
from torchkiln.patch.source.rewritten import Rewrites
from torchkiln.typing import Head

Skip = Callable[[str, nn.Module], bool] | Sequence[str]
"""A condition on name and module, or patterns of names as for :mod:`fnmatch`."""


def with_rows(
    model: nn.Module,
    fused: Sequence[tuple[nn.Module, batch_norm.FusedForward]],
    rows: Sequence[Replacement],
) -> Iterator[Candidate]:
    """The modules with fused batch norms, each with the rows of its batch norms."""
    names = {module: name for name, module in model.named_modules()}
    for module, plan in fused:
        own = {f"{names[module]}.{child}".lstrip(".") for child in module._modules}
        yield Candidate(tuple(r for r in rows if r.changed and r.name in own), module, plan)


def fused_parts(fused: Iterable[tuple[nn.Module, batch_norm.FusedForward]]) -> set[nn.Module]:
    """The modules that calls of fused batch norms contain, such as activations."""
    return {module.get_submodule(name) for module, plan in fused for name, _ in plan.reads.parts}


def matched(
    model: nn.Module,
    search: Search,
    rows: list[Replacement],
    skip: Skip,
    kinds: tuple[str, ...],
    parts: set[nn.Module],
) -> list[tuple[Replacement, nn.Module, Match]]:
    """The modules that compute the formula of an op, except ``parts`` of other formulas.

    Adds rows for modules without one.
    """
    matches: list[tuple[Replacement, nn.Module, Match]] = []
    default = first_dtype(model.parameters()) or torch.float32
    known = {row.name for row in rows}
    for name, module in model.named_modules():
        row = Replacement(name, type(module).__name__)
        if name in known:
            continue
        if is_skipped(name, module, skip):
            row.reason = "skip"
        elif module in parts:
            row.reason = "its formula is part of that of its parent"
        else:
            found = search.find(module, default, row, kinds)
            if found is not None:
                matches.append((row, module, found))
                if found.plan.kind == "glu":
                    parts.update(leaves_without_parameters(module))
            elif not row.reason:
                continue
        rows.append(row)
    return matches


def why_torchs_batch_norm(
    skip: Skip, registry: Registry, name: str, module: nn.Module, *, asked: bool
) -> str | None:
    """The reason to leave a batch norm unchanged, or ""; None if its class has another forward."""
    if type(module) in registry.entries:
        return None
    if is_skipped(name, module, skip):
        return "skip"
    tensors = [*module.parameters(), *module.buffers()]
    if not asked and any(tensor.device.type == "cpu" for tensor in tensors):
        return "on a CPU torch is often as fast; torchkiln.fuse replaces it"
    return ""


def free_modules(
    model: nn.Module, rows: Iterable[Replacement], skip: Skip, taken: Collection[nn.Module]
) -> dict[str, nn.Module]:
    """The modules whose forward may be rewritten, by name; not those in ``taken``."""
    known = {row.name for row in rows if row.kind}
    return {
        name: module
        for name, module in model.named_modules()
        if not (is_skipped(name, module, skip) or replaced_before(module))
        and name not in known
        and module not in taken
    }


def found_heads(
    model: nn.Module, free: Mapping[str, nn.Module], skip: Skip, rows: list[Replacement], head: Head
) -> dict[nn.Module, OfHead]:
    """The modules that make a loss of a head's logits. Adds rows for heads that are not fused."""
    skipped = functools.partial(is_skipped, skip=skip)
    heads = find_heads(model, free, skipped, loss_only=head == "loss")
    for name, reason in heads.reasons.items():
        was = type(model.get_submodule(name)).__name__
        path = f"{name}.linear_cross_entropy".lstrip(".")
        rows.append(Replacement(path, was, "head", reason=reason))
    return heads.found


def rewritten(
    free: Mapping[str, nn.Module], rewrites: Rewrites, rows: list[Replacement]
) -> list[tuple[Replacement, nn.Module, Plan]]:
    """The plans of modules with a rewritten forward. Adds rows."""
    found: list[tuple[Replacement, nn.Module, Plan]] = []
    for name, module in free.items():
        row = Replacement(name, type(module).__name__)
        plan = rewrites.find(module, row)
        if plan is not None:
            found.append((row, module, plan))
        if row.kind:
            rows[:] = [other for other in rows if other.name != name] + [row]
    return found


def is_skipped(name: str, module: nn.Module, skip: Skip) -> bool:
    """Whether the caller excludes a module."""
    if callable(skip):
        return skip(name, module)
    patterns = [skip] if isinstance(skip, str) else skip
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def leaves_without_parameters(module: nn.Module) -> list[nn.Module]:
    """The children without parameters, except dropouts: possible activations."""
    return [
        child
        for child in module.children()
        if next(child.parameters(), None) is None and not isinstance(child, nn.Dropout)
    ]


def made(plans: Iterable[tuple[Replacement, nn.Module, Plan]]) -> Iterator[Candidate]:
    """The plans for which a class can be made; rows of other plans get the reason."""
    for row, module, plan in plans:
        try:
            made_class(type(module), plan)
        except Exception as error:
            row.reason = f"its class has no subclass: {error}"
        else:
            yield Candidate((row,), module, plan)
