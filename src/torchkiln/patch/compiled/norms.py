"""Norms, and the residual sums before them, in a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from torchkiln.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torchkiln.patch.compiled.facts import Facts, is_like, tensor_of, value_of
from torchkiln.patch.compiled.region import Region, before, behind, region
from torchkiln.patch.compiled.search import plan_of
from torchkiln.patch.formula import norm
from torchkiln.patch.formula.norm import Norm

CALLS = (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)
"""The functions of torch that compute a norm."""

REDUCTIONS = ("mean", "var", "var_mean", "std", "norm", "vector_norm", "sum")
"""Functions and methods that a norm calls."""

OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (rms_norm, add_rms_norm),
    "layer_norm": (layer_norm, add_layer_norm),
}

Wanted = Callable[[str, Tensor], bool]
"""A function of an op's name and a tensor: whether to use torchkiln's op."""


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_call(node: fx.Node) -> bool:
    """Whether a node calls a function or a method."""
    return node.op in ("call_function", "call_method")


def rewrite(facts: Facts, wanted: Wanted) -> list[str]:
    """Replaces the norms of a graph; returns the names of the new ops."""
    made: list[str] = []
    for node in list(facts.graph.nodes):
        is_norm = node.target in CALLS or name_of(node) in REDUCTIONS
        if is_call(node) and node.users and is_norm:
            tried = (replaced(facts, *found, wanted) for found in norms_at(facts, node))
            made += next(filter(None, tried), [])
    return made


def norms_at(facts: Facts, node: fx.Node) -> Iterator[tuple[Region, Norm]]:
    """The regions around a reduction that compute a norm, the largest first."""
    for x in before(node):
        given = tensor_of(x)
        if given is None or given.dim() == 0:
            continue
        for result in behind(node):
            value = tensor_of(result)
            if value is None or not is_like(value, given):
                continue
            part = region(facts, [x], [result], given.shape[-1:])
            if part is None or any(value_of(v).dtype != given.dtype for v in part.vectors):
                continue
            plan = plan_of(facts, part, part.module(), norm.find)
            if isinstance(plan, Norm):
                yield part, plan


def replaced(facts: Facts, part: Region, plan: Norm, wanted: Wanted) -> list[str]:
    """Replaces a norm, with the sum before it if there is one; returns the name of the op."""
    (x,) = part.sources
    of_node = {name: node for node, name in part.inputs.items()}
    given: dict[str, Any] = {"eps": plan.eps, "offset": plan.offset, "round": plan.round}
    for name, vector in (("weight", plan.weight), ("bias", plan.bias)):
        if vector is not None:
            given[name] = of_node[vector]
    shape = (int(value_of(x).shape[-1]),)
    alone, added = OPS[plan.op]
    value = value_of(x)
    if wanted(added.__name__, value) and is_sum(facts, x, part):
        both = facts.call(x, x, added, *x.args, shape, **given)
        pair = value_of(both)
        parts = [facts.call(both, x, operator.getitem, both, i) for i in (1, 0)] if pair else []
        results = {x: parts[0], part.result: parts[1]} if parts else {part.result: both}
        if facts.swap(results, [x, *part.nodes], [both]):
            return [added.__name__]
    if not wanted(alone.__name__, value):
        return []
    call = facts.call(part.result, part.result, alone, x, shape, **given)
    return [alone.__name__] if facts.swap({part.result: call}, part.nodes) else []


def is_sum(facts: Facts, node: fx.Node, part: Region) -> bool:
    """Whether a node is the sum of two tensors like it, in the modes of the norm."""
    if name_of(node) != "add" or not is_call(node):
        return False
    if len(node.args) != 2 or node.kwargs or facts.states[node] != facts.states[part.result]:
        return False
    value = value_of(node)
    if any(facts.is_changed(x) for x in (node, *node.all_input_nodes)):
        return False
    return all(tensor_of(x) is not None and is_like(value_of(x), value) for x in node.args)
