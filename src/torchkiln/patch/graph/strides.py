"""Proofs that no call of a trace depends on the strides of its arguments.

A traced value is *free* if its strides may be others than in the original call: an argument in
``channels_last``, and what calls compute from it. Each call with a free value must be in a list of
calls whose values depend on shapes and elements only. A view of a value may be a copy if its
strides are others, so nothing may change such memory in place. The result of ``contiguous()`` has
its elements in order, so ``view`` takes it; but a dimension of size 1 may have any stride there,
and then the next call may choose ``channels_last``. So the result stays free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from torchkiln.patch.graph.chain import is_fact
from torchkiln.patch.graph.flat import class_of
from torchkiln.patch.graph.results import COPY, FACT, NEW, VIEW, Call, call_of, name_of


class Memory:
    """Sets of values that may share memory."""

    def __init__(self) -> None:
        self.parents: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """The value that stands for all values that may share memory with one."""
        while node in self.parents:
            node = self.parents[node]
        return node

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """Two values may share memory."""
        if self.of(one) is not self.of(other):
            self.parents[self.of(one)] = self.of(other)


def why_not_free(root: nn.Module, graph: fx.Graph, places: Collection[int]) -> str:
    """The reason why the strides of the arguments at ``places`` may matter; "" if they do not."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    free = {arguments[place] for place in places}
    ordered: set[fx.Node] = set()
    shared, same = Memory(), Memory()
    changed: dict[fx.Node, list[fx.Node]] = {}
    convolves = False
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        given = node.all_input_nodes
        call = call_of(root, node)
        is_free = any(x in free for x in given)
        if is_view_of(node, ordered):
            call = Call(VIEW, changes=False)
            ordered.add(node)
        if is_free and not call.result:
            return f"{name_of(root, node)} may depend on strides"
        if node.kwargs.get("out") is not None:
            return f"{name_of(root, node)} writes into an argument"
        if is_free and has_memory_format(node):
            return f"the memory_format of {name_of(root, node)} may depend on strides"
        if is_free and call.result != FACT:
            free.add(node)
        if node.op == "call_method" and node.target == "contiguous":
            ordered.add(node)
        if call.changes:
            changed[node] = given[:1] if call.result else given
        joined = changed.get(node, given if call.result not in (NEW, FACT) else [])
        for x in joined:
            shared.join(node, x)
            if call.result != COPY:
                same.join(node, x)
        convolves |= is_free and is_convolution(root, node)
    if not convolves:
        return "no convolution of its arguments"
    return why_not_changed(root, graph, changed, shared, same) or why_not_returned(graph, shared)


def why_not_changed(
    root: nn.Module,
    graph: fx.Graph,
    changed: Mapping[fx.Node, list[fx.Node]],
    shared: Memory,
    same: Memory,
) -> str:
    """The reason why a change in place may reach other memory, or none; else empty."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    readers = {
        node: [order[x] for x in node.users if x.op == "output" or call_of(root, x).result != FACT]
        for node in order
    }
    arguments = {shared.of(node) for node in graph.nodes if node.op == "placeholder"}
    for node, values in changed.items():
        for value in values:
            memory = shared.of(value)
            if memory in arguments:
                return "it changes an argument in place"
            for other, at in order.items():
                if at >= order[node] or shared.of(other) is not memory:
                    continue
                is_read = any(reader > order[node] for reader in readers[other])
                if is_read and same.of(other) is not same.of(value):
                    return "it changes a tensor in place that may be a view"
    return ""


def why_not_returned(graph: fx.Graph, shared: Memory) -> str:
    """The reason why results may share memory, also with an argument; else empty."""
    output = next(node for node in graph.nodes if node.op == "output")
    results = [shared.of(x) for x in leaves(output.args)]
    arguments = {shared.of(node) for node in graph.nodes if node.op == "placeholder"}
    is_shared = len(set(results)) < len(results) or not arguments.isdisjoint(results)
    return "it returns views of one tensor" if is_shared else ""


def leaves(value: Any) -> Iterator[fx.Node]:
    """The traced values in a nest of tuples, lists and dicts."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)


def is_view_of(node: fx.Node, ordered: Collection[fx.Node]) -> bool:
    """Whether a node is a view in another shape of a value whose elements are in order."""
    if node.op != "call_method" or node.target != "view" or node.args[0] not in ordered:
        return False
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    return not node.kwargs and all(map(is_size, sizes))


def is_size(value: Any) -> bool:
    """Whether an argument is a size, and no dtype."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int)
    return is_fact(value) and "dtype" not in value.args


def has_memory_format(node: fx.Node) -> bool:
    """Whether a call has a memory format: whether it copies then depends on strides."""
    given = (*node.args, *node.kwargs.values())
    return "memory_format" in node.kwargs or any(type(x) is torch.memory_format for x in given)


def is_convolution(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node is a convolution of images."""
    if node.op == "call_module":
        return class_of(root.get_submodule(str(node.target))) is nn.Conv2d
    return node.target is F.conv2d or node.target is torch.conv2d
