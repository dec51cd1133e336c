"""Parts of a graph as modules, so that the search of ``replace`` finds their formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from torchkiln.patch.compiled.facts import Facts, is_same, tensor_of, value_of

MOST_NODES = 24
"""Largest number of calls in a region."""

STEPS = 10
"""Largest number of calls between a call and the input or the result of its region."""


@dataclass
class Region:
    """The calls that compute results from given tensors and from vectors."""

    sources: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    nodes: list[fx.Node]
    """All calls, the results included, in the order of the graph."""
    vectors: list[fx.Node]
    """Inputs of the graph with one dimension, apart from the sources."""

    @property
    def result(self) -> fx.Node:
        """The first result, mostly the only one."""
        return self.results[0]

    @property
    def inputs(self) -> dict[fx.Node, str]:
        """The names of sources and vectors in a module."""
        of_sources = {node: f"x{i}" for i, node in enumerate(self.sources)}
        return of_sources | {node: f"v{i}" for i, node in enumerate(self.vectors)}

    def extend(self, graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> Any:
        """Add the calls to a graph in which ``made`` has the sources; returns the results.

        The dtype of the sources is read from the first one, so that the calls can run in float64.
        """
        first = self.sources[0]
        own = graph.call_function(getattr, (made[first], "dtype"))
        dtype = value_of(first).dtype
        for node in self.vectors:
            made[node] = graph.create_node("get_attr", self.inputs[node])
        for node in self.nodes:
            args, kwargs = map_aggregate(
                (node.args, node.kwargs),
                lambda x: made[x] if isinstance(x, fx.Node) else own if x is dtype else x,
            )
            made[node] = graph.create_node(node.op, node.target, args, kwargs)
        results = tuple(made[node] for node in self.results)
        return results if len(results) > 1 else results[0]

    def module(self) -> nn.Module:
        """A leaf module that computes the result; its parameters have no memory."""
        graph = fx.Graph()
        made = {node: graph.placeholder(self.inputs[node]) for node in self.sources}
        graph.output(self.extend(graph, made))
        sizes = {self.inputs[node]: value_of(node).shape for node in self.vectors}
        return module_of(graph, {name: nn.Parameter(meta(*size)) for name, size in sizes.items()})


def meta(*shape: Any) -> Tensor:
    """A tensor without memory."""
    return torch.empty(*map(int, shape), device="meta")


def module_of(graph: fx.Graph, members: Mapping[str, nn.Parameter | nn.Module]) -> nn.Module:
    """A module with the calls of a graph as its forward."""
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<graph of Dynamo>", "exec"), scope)
    module: nn.Module = type("Region", (nn.Module,), {"forward": scope["forward"]})()
    for name, value in members.items():
        setattr(module, name, value)
    vars(module)["source"] = code.src
    return module


def region(
    facts: Facts, sources: Sequence[fx.Node], results: Sequence[fx.Node], vectors: Any = None
) -> Region | None:
    """The calls between sources and results, if nothing else uses them and no mode changes.

    ``vectors`` is the shape of further inputs; None if there may be none.
    """
    nodes: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in sources or node in nodes or node in leaves:
            continue
        if node.op in ("placeholder", "get_attr"):
            found = tensor_of(node)
            if vectors is None or found is None or not is_same(found.shape, vectors):
                return None
            leaves.add(node)
        elif node.op not in ("call_function", "call_method") or len(nodes) == MOST_NODES:
            return None
        else:
            nodes.add(node)
            pending += node.all_input_nodes
    inner = nodes.difference(results)
    if (
        len({facts.states[node] for node in nodes}) > 1
        or any(user not in nodes for node in inner for user in node.users)
        or any(nodes.isdisjoint(source.users) for source in sources)
        or any(map(facts.is_changed, {*nodes, *leaves, *sources}))
    ):
        return None
    return Region(tuple(sources), tuple(results), sorted(nodes), sorted(leaves))


def before(node: fx.Node) -> list[fx.Node]:
    """The possible inputs of a call, the farthest first: first arguments of first arguments."""
    found: list[fx.Node] = []
    while len(found) < STEPS and node.op in ("call_function", "call_method"):
        given = [x for x in node.all_input_nodes if tensor_of(x) is not None]
        if not given:
            break
        node = given[0]
        found.append(node)
    return found[::-1]


def behind(node: fx.Node) -> list[fx.Node]:
    """The possible results of a call, the farthest first."""
    found = [node]
    for _ in range(STEPS):
        users = [user for user in node.users if tensor_of(user) is not None]
        if not users:
            break
        node = max(users)
        found.append(node)
    return found[::-1]
