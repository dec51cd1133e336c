"""Rotary position embeddings in a graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchkiln.ops.rope import rope
from torchkiln.patch.compare import Comparison
from torchkiln.patch.compiled.facts import Facts, is_like, tensor_of, value_of
from torchkiln.patch.compiled.norms import Wanted, name_of
from torchkiln.patch.compiled.region import Region, before, behind, region
from torchkiln.patch.compiled.search import once
from torchkiln.patch.formula.rotation import FORMS, RANKS, Form, Sizes
from torchkiln.patch.formula.rotation_proof import Prover, compared

ELEMENTWISE = ("cos", "sin", "to", "float", "mul", "unsqueeze", "type_as")
"""Functions and methods that keep equal columns equal; ``mul`` only by a number."""


class Turned(NamedTuple):
    """A possible rotation of a tensor by two angles."""

    x: fx.Node
    result: fx.Node
    angles: tuple[fx.Node, fx.Node]


def rewrite(facts: Facts, wanted: Wanted) -> list[str]:
    """Replaces rotations of queries and keys; returns the names of the new ops."""
    made: list[str] = []
    known: list[list[Turned]] = []
    for node in list(facts.graph.nodes):
        if name_of(node) not in ("cat", "stack") or not node.users:
            continue
        found = list(turned(node))
        if not found:
            continue
        if known and (done := pair_of(facts, known[-1], found, wanted)):
            made += done
            known.pop()
        else:
            known.append(found)
    return made


def turned(node: fx.Node) -> Iterator[Turned]:
    """Possible rotations around a call of ``cat`` or ``stack``, which makes the turned half."""
    for x in before(node):
        given = tensor_of(x)
        if given is None:
            continue
        for result in behind(node):
            value = tensor_of(result)
            if result is node or value is None or not is_like(value, given):
                continue
            angles = angles_of(x, result)
            if len(angles) == 2 and all(a not in (x, result) for a in angles):
                yield Turned(x, result, (angles[0], angles[1]))


def angles_of(x: fx.Node, result: fx.Node) -> list[fx.Node]:
    """The tensors besides ``x`` that a result depends on; for an ``unsqueeze``, its argument."""
    inside = {x}
    calls: list[fx.Node] = []
    node = x
    while node is not result:
        node = node.next
        if node.op == "output":
            return []
        if not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
            calls.append(node)
    angles: dict[fx.Node, None] = {}
    needed = {result}
    for call in reversed(calls):
        if call not in needed:
            continue
        for given in call.all_input_nodes:
            if given in inside:
                needed.add(given)
                continue
            angle: Any = given
            while name_of(angle) == "unsqueeze" and tensor_of(angle.args[0]) is not None:
                angle = angle.args[0]
            if tensor_of(angle) is None:
                return []
            angles[angle] = None
    return sorted(angles)


def pair_of(facts: Facts, one: list[Turned], two: list[Turned], wanted: Wanted) -> list[str]:
    """Replaces the rotations of queries and keys by the same angles."""
    for q, k in itertools.product(one, two):
        if (
            q.angles != k.angles
            or q.result is k.result
            or value_of(q.x).dim() != value_of(k.x).dim()
        ):
            continue
        for cos, sin in (q.angles, q.angles[::-1]):
            sources = (q.x, k.x, cos, sin)
            part = region(facts, sources, (q.result, k.result))
            form = form_of(part) if part else None
            if part is None or form is None or not has_columns(form, cos, sin):
                continue
            if facts.is_narrowed(q.result) or not wanted("rope", value_of(q.x)):
                return []
            if done := replaced(facts, part, form):
                return done
    return []


def form_of(part: Region) -> Form | None:
    """The form of the op that computes a region."""
    q, k, cos, sin = (value_of(node) for node in part.sources)
    is_alike = q.dtype == k.dtype and cos.dtype == sin.dtype and q.shape[-1] == k.shape[-1]
    if not is_alike or (q.dim(), cos.dim()) not in RANKS or cos.shape[-1] != sin.shape[-1]:
        return None
    module = part.module()
    sizes = int(q.shape[-1]), int(cos.shape[-1])
    dtypes = q.dtype, cos.dtype
    key = (vars(module)["source"], sizes, q.dim(), cos.dim(), dtypes, q.device)
    form: Form | None = once(key, lambda: proven(module, q, cos))
    return form


def proven(module: Any, q: Tensor, cos: Tensor) -> Form | None:
    """The form of the op, proven for the widths of these tensors."""
    function = type(module).forward
    prover = Prover(partial(function, module), function)
    ranks = q.dim(), cos.dim()
    head, columns = int(q.shape[-1]), int(cos.shape[-1])
    for form in FORMS:
        rotary = 2 * columns if form.factors == "pairs" else columns
        if rotary > head or rotary % 2:
            continue
        sizes = Sizes(5, 6, 3, 9, rotary, head), Sizes(3, 2, 4, 7, rotary, head)
        if not prover.is_rotation(form, ranks, sizes):
            continue
        found = compared(
            partial(function, module), form, ranks, (q.dtype, cos.dtype), q.device, size=sizes[0]
        )
        return form if isinstance(found, Comparison) and not found.refusal(exact=False) else None
    return None


def has_columns(form: Form, *angles: fx.Node) -> bool:
    """Whether the graph shows that columns of cos and sin are equal as the form requires."""
    return form.factors in ("pairs", "first") or all(
        doubled(angle) == form.factors for angle in angles
    )


def doubled(node: Any) -> str:
    """Which columns of cos or sin are equal, as in :class:`Form`; empty if unknown."""
    while isinstance(node, fx.Node) and name_of(node) in ELEMENTWISE:
        first, *others = node.args
        is_number = name_of(node) != "mul" or isinstance(others[0], (int, float))
        if not is_number or (name_of(node) == "unsqueeze" and others not in ([0], [1])):
            return ""
        node = first
    if not isinstance(node, fx.Node):
        return ""
    if name_of(node) == "cat" and isinstance(node.args[0], (tuple, list)):
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        parts = node.args[0]
        is_last = dim in (-1, value_of(node).dim() - 1)
        return "halves" if is_last and len(parts) == 2 and parts[0] is parts[1] else ""
    if name_of(node) == "repeat_interleave":
        given = [*node.args[1:], node.kwargs.get("dim")][:2]
        return "neighbours" if given in ([2, -1], [2, value_of(node).dim() - 1]) else ""
    return ""


def replaced(facts: Facts, part: Region, form: Form) -> list[str]:
    """Replaces a region by the op, with results in the same layout."""
    q, k, cos, sin = part.sources
    after = max(part.sources)
    users = [user for result in part.results for user in result.users if user not in part.nodes]
    if any(user < after for user in users):
        return []
    columns = int(value_of(cos).shape[-1])
    new: list[fx.Node] = []
    like = part.result
    if form.factors == "first":
        narrow = partial(facts.call, after, like, torch.narrow)
        new += [narrow(angle, -1, 0, columns // 2) for angle in (cos, sin)]
        after, (cos, sin) = new[0], new
    both = facts.call(
        after,
        like,
        rope,
        q,
        k,
        cos,
        sin,
        interleaved=form.interleaved,
        rotary_dim=2 * columns if form.factors == "pairs" else columns,
        heads_dim=form.heads_dim,
    )
    if value_of(both) is None:
        facts.erase([*new, both])
        return []
    second = facts.call(both, like, operator.getitem, both, 1)
    first = facts.call(both, like, operator.getitem, both, 0)
    results = dict(zip(part.results, (first, second), strict=True))
    return ["rope"] if facts.swap(results, part.nodes, [*new, both]) else []
