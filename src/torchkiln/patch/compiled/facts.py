"""Values, modes and changed memory of a graph that Dynamo recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchkiln.patch.formula.linear import DTYPES

VALUE = "example_value"
"""The key under which Dynamo stores the fake value of a node."""

RESULTS = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of results of calls that compute. A call without such a result may change a mode."""


def value_of(node: Any) -> Any:
    """The fake value of a node; other arguments are returned unchanged."""
    return node.meta.get(VALUE) if isinstance(node, fx.Node) else node


def tensor_of(node: Any) -> Tensor | None:
    """The fake value of a node, if it is a dense tensor of a dtype that the ops take."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_nested:
        return None
    return value if value.dtype in DTYPES else None


def is_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether sizes or strides are equal. Dynamo guards a comparison of symbols."""
    one, other = tuple(one), tuple(other)
    try:
        return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))
    except GuardOnDataDependentSymNode:
        return False


def is_like(one: Any, other: Any) -> bool:
    """Whether two tensors have one shape, dtype and device."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (
        one.dtype == other.dtype and one.device == other.device and is_same(one.shape, other.shape)
    )


def strides_of(x: Tensor) -> list[Any]:
    """The strides of dimensions with several elements."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def may_write(node: fx.Node) -> bool:
    """Whether a custom op, or an op with a graph as an argument, may change arguments in place.

    Changes by other calls show in the version counters of the fake values.
    """
    target = node.target
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    return isinstance(target, HigherOrderOperator)


class Facts:
    """A graph that can be edited, with the modes of its nodes and the memory that it changes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.given = [node for node in graph.nodes if node.op == "placeholder"]
        values = [x for node in graph.nodes for x in tree_leaves(value_of(node))]
        fakes = (x.fake_mode for x in values if isinstance(x, FakeTensor))
        self.mode = next(fakes, None)
        """The fake tensor mode of Dynamo; the tracing context has another one."""
        written = [x for node in graph.nodes if may_write(node) for x in node.all_input_nodes]
        of_written = [x for node in written for x in tree_leaves(value_of(node))]
        self.changed = {
            StorageWeakRef(x.untyped_storage())
            for x in [*(x for x in values if isinstance(x, Tensor) and x._version), *of_written]
            if isinstance(x, Tensor) and x.layout is torch.strided
        }
        """Memory that the graph changes in place."""
        self.states: dict[fx.Node, tuple[int, frozenset[str]]] = {}
        """The number of calls up to a node that compute nothing, and the types of devices for which
        autocast is on."""
        on = [(name, torch.is_autocast_enabled(name)) for name in ("cpu", "cuda")]
        entered: dict[Any, tuple[str, bool]] = {}
        count = 0
        for node in graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast":
                entered[node] = (str(node.args[0]), bool(node.args[2]))
            elif name == "_exit_autocast":
                entered.pop(node.args[0], None)
            is_call = node.op not in ("placeholder", "get_attr")
            count += is_call and not any(
                isinstance(x, RESULTS) for x in tree_leaves(value_of(node))
            )
            modes = dict([*on, *entered.values()])
            self.states[node] = count, frozenset(k for k, is_on in modes.items() if is_on)

    def is_narrowed(self, node: fx.Node) -> bool:
        """Whether autocast is on where a node runs."""
        return value_of(node).device.type in self.states[node][1]

    def is_changed(self, node: fx.Node) -> bool:
        """Whether the graph changes the memory of a node's value in place."""
        tensors = (x for x in tree_leaves(value_of(node)) if isinstance(x, Tensor))
        return any(StorageWeakRef(x.untyped_storage()) in self.changed for x in tensors)

    def call(
        self, after: fx.Node, like: fx.Node, function: Callable[..., Any], *args: Any, **given: Any
    ) -> fx.Node:
        """Insert a call after a node, with the modes of the node ``like``; no value if it fails."""
        with self.graph.inserting_after(after):
            node = self.graph.call_function(function, args, given)
        node.meta = {k: v for k, v in like.meta.items() if k != VALUE}
        self.states[node] = self.states[like]
        try:
            with self.mode or nullcontext(), torch.no_grad():
                node.meta[VALUE] = function(
                    *map(value_of, args), **{name: value_of(x) for name, x in given.items()}
                )
        except Exception:  # the op refuses these arguments
            node.meta[VALUE] = None
        return node

    def swap(
        self,
        results: Mapping[fx.Node, fx.Node],
        old: Iterable[fx.Node],
        new: Iterable[fx.Node] = (),
    ) -> bool:
        """Replace results by new nodes, and erase old nodes that nothing uses.

        If a result would have another layout or dtype, the new nodes are erased instead.
        """
        values = [(value_of(was), value_of(now)) for was, now in results.items()]
        is_right = all(is_like(*pair) and is_same(*map(strides_of, pair)) for pair in values)
        if is_right:
            for was, now in results.items():
                was.replace_all_uses_with(now)
        self.erase(old if is_right else {*new, *results.values()})
        return is_right

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Erase the nodes that nothing uses."""
        for node in sorted(nodes, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
