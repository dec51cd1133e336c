"""Wide linear layers in a graph, whose products the op pads, or whose bias gradients it sums."""

from __future__ import annotations

from torch import Tensor, fx
from torch.nn import functional as F

from torchkiln.ops.matmul import linear
from torchkiln.patch.compiled.choice import hint_of
from torchkiln.patch.compiled.facts import Facts, tensor_of, value_of
from torchkiln.patch.compiled.norms import Wanted
from torchkiln.patch.formula.linear import LEAST_INPUT, has_unaligned, is_wide


def rewrite(facts: Facts, wanted: Wanted) -> list[str]:
    """Replaces the layers for which the op takes less time; returns their names in a table."""
    nodes = [node for node in facts.graph.nodes if node.target is F.linear]
    return [name for node in nodes for name in layer_at(facts, node, wanted)]


def layer_at(facts: Facts, node: fx.Node, wanted: Wanted) -> list[str]:
    """Replaces a layer, if the op takes its arguments."""
    given = [x for x in node.args if x is not None]
    tensors = [x for x in map(tensor_of, given) if x is not None]
    is_alike = len({x.dtype for x in tensors}) == 1
    if node.kwargs or len(tensors) != len(given) or not is_alike or facts.is_narrowed(node):
        return []
    name = name_of(tensors)
    if not name or any(map(facts.is_changed, node.all_input_nodes)):
        return []
    if not wanted(name, value_of(node)):
        return []
    call = facts.call(node, node, linear, *node.args)
    return [name] if facts.swap({node: call}, [node]) else []


def name_of(tensors: list[Tensor]) -> str:
    """The name in a table of a layer with this input, weight and bias; empty for others."""
    x, weight, *bias = tensors
    if not is_wide(weight):
        return ""
    if has_unaligned(weight):
        return "padded_linear"
    is_summed = any(b.requires_grad for b in bias) and hint_of(x.numel()) >= LEAST_INPUT
    return "linear" if is_summed else ""
