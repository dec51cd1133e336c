"""Inductor's code for backward of ``cross_entropy``: overwrites logits that nothing reads again.

Forward saves the logits for backward. AOTAutograd lists the saved tensors that nothing outside of
both graphs can read: they are neither inputs nor results, nor views of these.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

LOWERINGS, CACHE = "torch._inductor.lowering", "torch._inductor.codecache"

KEYED: set[type] = set()
"""Classes of keys of Inductor's cache that contain the list."""


def key_by_donations(module: ModuleType) -> None:
    """Makes the list a part of the cache's keys, for graphs that call backward.

    Two functions can have equal graphs of backward and different lists, if only one of them returns
    the logits.
    """
    key: Any = getattr(module, "FxGraphHashDetails", None)
    if key is None:
        return
    usual = key.__init__

    @functools.wraps(usual)
    def init(self: Any, graph: Any, *args: Any, **options: Any) -> None:
        usual(self, graph, *args, **options)
        target = torch.ops.torchkiln._cross_entropy_backward.default
        if graph is not None and graph.graph.find_nodes(op="call_function", target=target):
            context = torch._guards.TracingContext.try_get()
            self.donated = getattr(context and context.fw_metadata, "bw_donated_idxs", None)

    key.__init__ = init
    KEYED.add(key)


def lower_backward(module: ModuleType) -> None:
    """Chooses between the two forms of backward when Inductor generates the code of a graph."""
    ops, kernel = torch.ops.torchkiln, module.fallback_handler
    target = ops._cross_entropy_backward.default
    new = kernel(target, add_to_fallback_set=False)
    over = kernel(ops._cross_entropy_backward_.default, add_to_fallback_set=False)

    def backward(grad: Any, logits: Any, *others: Any) -> Any:
        """The gradient of the logits."""
        graph, ir = module.V.graph, module.ir
        # In a CUDA graph, a backward that changes its inputs would need copies of them.
        is_plain = bool(KEYED) and not (graph.cpp_wrapper or module.config.triton.cudagraphs)
        if is_plain and is_last_read(graph, ir.DonatedBuffer):
            place = ir.ExternKernel.realize_input(logits)
            place = place if isinstance(place, ir.TensorBox) else ir.TensorBox(place)
            graph.mark_buffer_mutated(place.get_name())  # so earlier readers run before the call
            if not is_kept(graph, place.get_name(), ir.TensorBox):
                over(grad, place, *others)
                return place
        return new(grad, logits, *others)

    module.register_lowering(target, type_promotion_kind=None)(backward)


def is_last_read(graph: Any, donated: type) -> bool:
    """Whether the call that Inductor lowers is the last one to read its logits.

    The gradient must also have the strides of the logits.
    """
    if hasattr(graph, "parent"):  # a subgraph: inputs are numbered in the whole graph
        return False
    node = graph.current_node
    logits = node.args[1]
    of_logits = storages(logits)
    views = [other for other in node.graph.nodes if not of_logits.isdisjoint(storages(other))]
    users = [user for view in views for user in view.users]
    inputs = [view for view in views if view.op in ("placeholder", "get_attr")]
    is_last = all(user <= node for user in users)
    is_free = all(isinstance(graph.graph_inputs_original.get(x.target), donated) for x in inputs)
    is_one = sum(given in views for given in node.args) == 1
    return is_last and is_free and is_one and has_strides_of(node, logits)


def is_kept(graph: Any, name: str, box: Any) -> bool:
    """Whether a buffer has the result of an earlier node that a later node reads.

    Inductor makes no copy for some nodes that have memory of their own in the graph.
    """
    now = graph.current_node
    later = (
        value
        for node, value in graph.env.items()
        if isinstance(value, box) and any(user > now for user in node.users)
    )
    return any(value.maybe_get_name() == name for value in later)


def storages(node: Node) -> set[StorageWeakRef]:
    """The memory of the tensors that a node computes."""
    values = tree_leaves(node.meta.get("val"))
    dense = (x for x in values if isinstance(x, Tensor) and x.layout is torch.strided)
    return {StorageWeakRef(x.untyped_storage()) for x in dense}


def has_strides_of(one: Node, other: Node) -> bool:
    """Whether two nodes have the same strides, without a guard on a symbolic size."""
    # Imported here, because it imports sympy, which takes half a second.
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # noqa: PLC0415

    pairs = zip(one.meta["val"].stride(), other.meta["val"].stride(), strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)
