"""Values of a traced forward that two branches read, such as the input of a residual block."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx, nn

from torchkiln.nn.convolution import CONVOLUTIONS
from torchkiln.nn.plain import has_hooks, is_torchs
from torchkiln.ops._two_uses import two_uses
from torchkiln.patch.graph.chain import Chain, called_module

READERS = (*CONVOLUTIONS, nn.AvgPool2d, nn.MaxPool2d)
"""Classes of modules that never change their input in place. Subclasses may change it."""


def separate(root: nn.Module, graph: fx.Graph, fused: Mapping[fx.Node, Chain]) -> None:
    """Give both readers of an input, or of the result of a chain with a residual, an alias each."""
    for node in list(graph.nodes):
        is_sum = node in fused and fused[node].residual is not None
        if node.op != "placeholder" and not is_sum:
            continue
        users = list(node.users)
        if len(users) != 2 or not all(u in fused or is_reader(root, u) for u in users):
            continue
        if any(user.args.count(node) > 1 for user in users):
            continue
        with graph.inserting_before(min(users)):
            both = graph.call_function(two_uses, (node,))
            for at, user in enumerate(users):
                user.replace_input_with(node, graph.call_function(operator.getitem, (both, at)))


def is_reader(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node calls a module that does not change its input."""
    module = called_module(root, node)
    while type(module) is nn.Sequential and len(module) > 0 and not has_hooks(module):
        module = module[0]
    return module is not None and is_torchs(module, READERS)
