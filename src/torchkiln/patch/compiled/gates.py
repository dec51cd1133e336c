"""Gated units, and activations after linear layers, in a graph."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from torchkiln.ops.matmul import linear
from torchkiln.patch.compiled.facts import Facts, is_like, tensor_of, value_of
from torchkiln.patch.compiled.norms import Wanted, is_call, name_of
from torchkiln.patch.compiled.region import Region, before, behind, module_of, region
from torchkiln.patch.compiled.search import once, plan_of
from torchkiln.patch.formula import activation, gated, gated_plan
from torchkiln.patch.formula.activation import EQUAL, Activation
from torchkiln.patch.formula.gated_plan import Gated
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import shallow_copy
from torchkiln.patch.source.layer import compared

FUNCTIONS = ("silu", "gelu", "sigmoid", "tanh", "erf", "exp", "relu", "square", "pow")
"""Functions and methods that an activation calls."""


def rewrite(facts: Facts, wanted: Wanted) -> list[str]:
    """Replaces gated units and activations; returns the names of the new ops."""
    made: list[str] = []
    for node in list(facts.graph.nodes):
        if is_call(node) and node.users and name_of(node) in FUNCTIONS:
            made += gate_at(facts, node, wanted) or activation_at(facts, node, wanted)
    return made


def gate_at(facts: Facts, node: fx.Node, wanted: Wanted) -> list[str]:
    """Replaces the product of an activation and another tensor."""
    for x in before(node):
        given = tensor_of(x)
        if given is None:
            continue
        for result in behind(node):
            if name_of(result) != "mul" or not is_like(tensor_of(result), given):
                continue
            others = [y for y in result.all_input_nodes if is_like(tensor_of(y), given)]
            for up in (y for y in others if y is not x):
                part = region(facts, [x, up], [result])
                if part is None or len(others) != 2:
                    continue
                plan = plan_of(facts, part, gated_module(part), gated.find)
                if not isinstance(plan, Gated):
                    continue
                if not wanted(plan.op, given):
                    return []
                pair = (x, up) if plan.gate == "gate" else (up, x)
                call = facts.call(result, result, gated_plan.OPS[plan.op], *pair)
                return [plan.op] if facts.swap({result: call}, part.nodes) else []
    return []


def gated_module(part: Region) -> nn.Module:
    """A gated unit whose product is the region."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = {
        node: graph.call_module(name, (x,))
        for node, name in zip(part.sources, ("gate", "up"), strict=True)
    }
    graph.output(graph.call_module("down", (part.extend(graph, made),)))
    names = ("gate", "up", "down")
    return module_of(graph, {name: nn.Linear(1, 1, device="meta") for name in names})


def found_activation(module: nn.Module, _: torch.dtype) -> Match | None:
    """The activation that a region computes, also if torch has a kernel of the same speed."""
    found = activation.computed(module)
    if isinstance(found, str):
        return None
    plan = Activation(found.name, proof=found.proof, reads=found.trace.reads)
    return Match(plan, shallow_copy(module), (activation.grid(),))


def activation_at(facts: Facts, node: fx.Node, wanted: Wanted) -> list[str]:
    """Replaces an activation, with the linear layer before it if there is one."""
    for x in before(node):
        given = tensor_of(x)
        if given is None:
            continue
        for result in behind(node):
            if not is_like(tensor_of(result), given):
                continue
            part = region(facts, [x], [result])
            plan = plan_of(facts, part, part.module(), found_activation) if part else None
            if part is None or not isinstance(plan, Activation):
                continue
            name = plan.op
            if done := layer_before(facts, part, name, wanted):
                return done
            is_one = len(part.nodes) == 1 and name in EQUAL
            if is_one or not wanted(name, given):
                return []
            call = facts.call(result, result, activation.OPS[name], x)
            return [name] if facts.swap({result: call}, part.nodes) else []
    return []


def layer_before(facts: Facts, part: Region, name: str, wanted: Wanted) -> list[str]:
    """Replaces a linear layer and the activation after it."""
    (layer,) = part.sources
    given = list(layer.args)
    if layer.target is not nn.functional.linear or layer.kwargs or not 2 <= len(given) <= 3:
        return []
    value = value_of(layer)
    found = [tensor_of(x) for x in given if x is not None]
    tensors = [x for x in found if x is not None and x.dtype == value.dtype]
    is_own = all(user in part.nodes for user in layer.users)
    is_one_dtype = len(tensors) == len(found)
    if not is_own or not is_one_dtype or facts.states[layer] != facts.states[part.result]:
        return []
    if facts.is_narrowed(layer) or any(facts.is_changed(x) for x in layer.all_input_nodes):
        return []
    if not wanted("linear", value) or not is_close_layer(tensors, name, value):
        return []
    call = facts.call(part.result, part.result, linear, *given, act=name)
    return ["linear"] if facts.swap({part.result: call}, [layer, *part.nodes]) else []


def is_close_layer(tensors: list[Tensor], name: str, value: Tensor) -> bool:
    """Whether the op is as close to float64 as torch, for a layer of this kind."""
    rows, columns = map(int, tensors[1].shape)
    key = ("linear", name, len(tensors), rows, columns, value.dtype, value.device)

    def refusal() -> str:
        with torch.device("meta"):
            layer = nn.Linear(columns, rows, bias=len(tensors) == 3)
        return compared(layer, name, value.dtype, value.device).refusal(exact=False)

    return bool(once(key, refusal) == "")
