"""Cross-entropies, with the linear layer that makes the logits, in a graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from torchkiln.ops.cross_entropy import cross_entropy, linear_cross_entropy
from torchkiln.patch.compiled.facts import VALUE, Facts, tensor_of, value_of
from torchkiln.patch.compiled.norms import Wanted
from torchkiln.patch.source.loss_calls import fits

SIGNATURE = inspect.signature(F.cross_entropy)

VIEWS = ("view", "reshape", "contiguous")
"""Methods that keep the order of the rows of logits, if the last size is unchanged."""

CASTS = ("float", "to")


def rewrite(facts: Facts, wanted: Wanted) -> list[str]:
    """Replaces the losses; returns the names of the new ops."""
    nodes = [node for node in facts.graph.nodes if node.target is F.cross_entropy]
    return [name for node in nodes for name in loss_at(facts, node, wanted)]


def loss_at(facts: Facts, node: fx.Node, wanted: Wanted) -> list[str]:
    """Replaces a loss, if the op takes its arguments."""
    given = SIGNATURE.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    options: dict[str, Any] = dict(given.arguments)
    logits, target, weight = (options.pop(name) for name in ("input", "target", "weight"))
    is_new = (options.pop("size_average"), options.pop("reduce")) == (None, None)
    is_fixed = not any(isinstance(value, fx.Node) for value in options.values())
    x = tensor_of(logits)
    if not is_new or not is_fixed or not 0 <= options["label_smoothing"] <= 1 or x is None:
        return []
    if not fits(x, value_of(target), value_of(weight)) or facts.is_changed(logits):
        return []
    options["loss_dtype"] = value_of(node).dtype
    steps = steps_before(facts, logits, node)
    if weight is not None or value_of(target).is_floating_point() or facts.is_narrowed(node):
        steps = []
    elif found := with_head(facts, node, steps, (target, options), wanted):
        return found
    return alone(facts, node, steps, ((logits, target, weight), options), wanted)


def steps_before(facts: Facts, logits: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Views and casts to float32 before a loss, the last one first, if nothing else uses them."""
    steps: list[fx.Node] = []
    classes = value_of(logits).shape[-1]
    while logits.op == "call_method" and len(logits.users) == 1:
        source: Any = logits.args[0]
        was, now = tensor_of(source), value_of(logits)
        if was is None or was.device != now.device:
            break
        is_view = logits.target in VIEWS and now.dim() > 1 and now.dtype == was.dtype
        is_cast = logits.target in CASTS and now.dtype is torch.float32
        if not (is_view or is_cast):
            break
        if was.shape[-1] != classes or facts.states[logits] != facts.states[node]:
            break
        if facts.is_changed(source):
            break
        steps.append(logits)
        logits = source
    return steps


def alone(
    facts: Facts,
    node: fx.Node,
    steps: list[fx.Node],
    call: tuple[tuple[fx.Node, fx.Node, fx.Node | None], dict[str, Any]],
    wanted: Wanted,
) -> list[str]:
    """Replaces a loss, but not the layer that makes the logits, which the op reads uncast."""
    (logits, target, weight), options = call
    if not wanted("cross_entropy", value_of(logits)):
        return []
    x: Any = steps[-1].args[0] if steps else logits
    new: list[fx.Node] = []
    for step in (step for step in reversed(steps) if step.target in VIEWS):
        with facts.graph.inserting_before(node):
            made = facts.graph.call_method(str(step.target), (x, *step.args[1:]), step.kwargs)
        made.meta = dict(step.meta)
        made.meta[VALUE] = value_of(step).to(value_of(x).dtype)
        facts.states[made] = facts.states[node]
        new.append(made)
        x = made
    made = facts.call(node, node, cross_entropy, x, target, weight, **options)
    return ["cross_entropy"] if facts.swap({node: made}, [node, *steps], new) else []


def with_head(
    facts: Facts,
    node: fx.Node,
    steps: list[fx.Node],
    call: tuple[fx.Node, dict[str, Any]],
    wanted: Wanted,
) -> list[str]:
    """Replaces a loss and the layer that makes the logits, if nothing else uses the logits."""
    target, options = call
    layer: Any = steps[-1].args[0] if steps else node.args[0] if node.args else None
    if not isinstance(layer, fx.Node) or layer.target is not F.linear or len(layer.users) != 1:
        return []
    x, weight, bias = (*layer.args, None)[:3]
    given = [one for one in (x, weight, bias) if one is not None]
    dtypes = {getattr(tensor_of(one), "dtype", None) for one in given}
    if layer.kwargs or len(dtypes) > 1 or None in dtypes:
        return []
    if any(facts.is_changed(one) for one in layer.all_input_nodes):
        return []
    if facts.states[layer] != facts.states[node] or value_of(target).dim() != 1:
        return []
    if not wanted("linear_cross_entropy", value_of(layer)):
        return []
    new: list[fx.Node] = []
    if value_of(x).dim() != 2:
        new = [facts.call(node, node, torch.flatten, x, 0, -2)]
    made = facts.call(
        new[0] if new else node,
        node,
        linear_cross_entropy,
        new[0] if new else x,
        weight,
        target,
        linear_bias=bias,
        **options,
    )
    done = facts.swap({node: made}, [node, *steps, layer], new)
    return ["linear_cross_entropy"] if done else []
