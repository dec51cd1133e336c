"""Linear layers and the activations behind them as one op, in the forward of a module."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.nn.plain import has_hooks
from torchkiln.ops.matmul import linear
from torchkiln.patch.compare import Comparison
from torchkiln.patch.formula.activation import OPS, Activation
from torchkiln.patch.formula.linear import WideLinear, has_plain_parameters
from torchkiln.patch.plan import Match, plan_of
from torchkiln.patch.probe import numbers, relative_error
from torchkiln.patch.source.code import blocks

LINEAR_ACT = "_kiln_linear_act"
"""The helper in rewritten source: ``act(layer(x))``."""

SIZE = 64
"""Largest size of the layers that are compared."""


def name_of(module: nn.Module) -> str | None:
    """The name of the activation that a module of torch computes."""
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    names: dict[type[nn.Module], str] = {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        nn.Sigmoid: "sigmoid",
        nn.Tanh: "tanh",
    }
    return names.get(type(module))


def act_of(module: Any) -> str | None:
    """The activation that a module computes, after its replacement."""
    plan = plan_of(module)
    if isinstance(plan, Activation):
        return plan.op
    if plan is not None and isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return name_of(module)


def act_to_be(module: nn.Module, match: Match | None) -> str | None:
    """The activation that a module will compute, given its match."""
    if match is not None and isinstance(match.plan, Activation):
        return match.plan.op
    return name_of(module)


def linear_act(layer: Any, act: Any, x: Any) -> Any:
    """``act(layer(x))``, by one op where it takes the call."""
    name = act_of(act)
    is_plain = is_plain_layer(layer) and not has_hooks(layer) and not has_hooks(act)
    if name is not None and is_plain and isinstance(x, Tensor):
        return linear(x, layer.weight, layer.bias, name)
    return act(layer(x))


def is_plain_layer(layer: Any) -> bool:
    """Whether a layer computes what torch's does."""
    is_torchs = type(layer) is nn.Linear and "forward" not in layer.__dict__
    return (is_torchs or isinstance(plan_of(layer), WideLinear)) and has_plain_parameters(layer)


def compared(layer: nn.Linear, act: str, dtype: torch.dtype, device: torch.device) -> Comparison:
    """The errors of both forwards, for a layer of the same kind with random numbers."""
    columns, rows = min(layer.in_features, SIZE), min(layer.out_features, SIZE)
    x, weight = numbers(8, columns), numbers(rows, columns, seed=1) / columns**0.5
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    has_bias = any(name == "bias" for name, _ in layer.named_parameters())
    bias = numbers(rows, seed=2).to(device, dtype) if has_bias else None
    wide = None if bias is None else bias.double()
    with torch.no_grad():
        truth = OPS[act](F.linear(x.double(), weight.double(), wide))
        was, now = OPS[act](F.linear(x, weight, bias)), linear(x, weight, bias, act)
    errors = relative_error(was, truth), relative_error(now, truth)
    return Comparison(dtype, *errors, torch.equal(was, now))


def rewrite_layers(
    node: ast.FunctionDef, layers: Collection[str], acts: Collection[str]
) -> list[tuple[str, str]]:
    """Rewrite calls of layers before activations; returns the names of both."""
    found: list[tuple[str, str]] = []
    for block in blocks(node):
        for first, second in pairwise(block):
            found += rewrite_pair(first, second, layers, acts)
    inline = Inline(layers, acts)
    inline.visit(node)
    return [*found, *inline.found]


def call_of(node: ast.AST | None, names: Collection[str]) -> tuple[str, ast.expr] | None:
    """The name and the argument of a call ``self.name(argument)`` of one of the modules."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    path = ast.unparse(node.func)
    is_own = path.startswith("self.") and path.removeprefix("self.") in names
    is_plain = is_own and not isinstance(node.args[0], ast.Starred)
    return (path.removeprefix("self."), node.args[0]) if is_plain else None


def rewrite_pair(
    first: ast.stmt, second: ast.stmt, layers: Collection[str], acts: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Rewrite ``x = self.layer(y)`` before ``x = self.act(x)`` or ``return self.act(x)``."""
    if not isinstance(first, ast.Assign) or len(first.targets) != 1:
        return
    target = first.targets[0]
    layer, value = call_of(first.value, layers), getattr(second, "value", None)
    act = call_of(value, acts)
    if layer is None or act is None or not isinstance(target, ast.Name):
        return
    is_same = isinstance(act[1], ast.Name) and act[1].id == target.id
    to = getattr(second, "targets", [])
    overwrites = len(to) == 1 and isinstance(to[0], ast.Name) and to[0].id == target.id
    if is_same and (overwrites or isinstance(second, ast.Return)):
        assert isinstance(first.value, ast.Call)
        assert isinstance(value, ast.Call)
        first.value = helper_call(first.value.func, value.func, layer[1])
        ast.fix_missing_locations(ast.copy_location(first.value, first))
        second.value = ast.copy_location(ast.Name(target.id, ast.Load()), second)  # type: ignore[attr-defined]
        yield layer[0], act[0]


def helper_call(layer: ast.expr, act: ast.expr, x: ast.expr) -> ast.Call:
    """``_kiln_linear_act(layer, act, x)``."""
    return ast.Call(ast.Name(LINEAR_ACT, ast.Load()), [layer, act, x], [])


class Inline(ast.NodeTransformer):
    """Rewrites ``self.act(self.layer(x))``."""

    def __init__(self, layers: Collection[str], acts: Collection[str]) -> None:
        self.layers, self.acts = layers, acts
        self.found: list[tuple[str, str]] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        act = call_of(node, self.acts)
        layer = call_of(act[1], self.layers) if act else None
        if act is None or layer is None:
            return node
        assert isinstance(node.args[0], ast.Call)
        self.found.append((layer[0], act[0]))
        made = helper_call(node.args[0].func, node.func, layer[1])
        return ast.fix_missing_locations(ast.copy_location(made, node))
