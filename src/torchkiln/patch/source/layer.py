"""Linear layers and the activations after them as one op, in the forward of a module."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from torchkiln.nn.plain import attribute, has_hooks
from torchkiln.ops.matmul import linear
from torchkiln.patch.compare import Comparison
from torchkiln.patch.formula.activation import OPS, Activation
from torchkiln.patch.formula.linear import WideLinear, is_called_as_usual, plain_parameters
from torchkiln.patch.plan import Match, plan_of
from torchkiln.patch.probe import numbers, relative_error
from torchkiln.patch.source.code import GUARDS, blocks
from torchkiln.patch.source.text import SCOPES
from torchkiln.patch.table import is_chosen

LINEAR_ACT = "_kiln_linear_act"
"""The helper in rewritten source: ``act(layer(x))``."""

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}
"""The modules of torch that compute one activation."""

SIZE = 64
"""Largest size of the layers that are compared."""


def name_of(module: nn.Module) -> str | None:
    """The name of the activation that a module of torch computes."""
    name = gelu_of(module) if type(module) is nn.GELU else ACTIVATIONS.get(type(module))
    return None if name is not None and "forward" in module.__dict__ else name


def gelu_of(module: nn.Module) -> str | None:
    """The name of the activation that torch's GELU, or a subclass, computes."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return names.get(module.approximate) if isinstance(module, nn.GELU) else None


def act_of(module: Any, x: Tensor) -> str | None:
    """The activation that a module, replaced or not, computes after a layer of ``x``."""
    plan = plan_of(module)
    if isinstance(plan, Activation):
        narrows = torch.is_autocast_enabled(x.device.type) and not plan.keeps_dtype
        return None if narrows or not plan.reads.hold(module) else plan.op
    return gelu_of(module) if plan is not None else name_of(module)


def act_to_be(module: nn.Module, match: Match | None) -> str | None:
    """The activation that a module will compute after its replacement by ``match``."""
    if match is not None and isinstance(match.plan, Activation):
        return match.plan.op
    return name_of(module)


def linear_act(*, layer: Any, x: Any, act: Any, owner: Any = None) -> Any:
    """``act(layer(x))``, computed by one op if it takes the call.

    With an owner, ``act`` is the name of the owner's activation, read after the call of the layer.
    """
    given = taken(layer, x)
    if given is not None and not has_hooks(layer):
        found: Any = read(owner, act)
        name: Any = act_of(found, x)
        is_slower = is_compiling() and not is_chosen("linear", x, len(given[0]), unmeasured=True)
        if name is not None and not has_hooks(found) and not is_slower:
            return linear(x, *given, act=name)
    y = layer(x)
    return read(owner, act)(y)


def read(owner: Any, value: Any) -> Any:
    """A submodule of the owner by its name; without an owner, the value."""
    if owner is None:
        return value
    for name in value.split("."):
        owner = attribute(owner, name)
    return owner


def parameters_of(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, if a layer computes the formula of ``torch.nn.Linear``, replaced or not."""
    is_torchs = type(layer) is nn.Linear and "forward" not in layer.__dict__
    if not is_torchs and not isinstance(plan_of(layer), WideLinear):
        return None
    return plain_parameters(layer)


def taken(layer: Any, x: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, if the op computes the same result as the layer."""
    given = parameters_of(layer)
    return given if given is not None and is_called_as_usual(*given, x) else None


def compared(layer: nn.Linear, act: Any, dtype: torch.dtype, device: torch.device) -> Comparison:
    """The errors of the old and the new forward, for a layer like this with random numbers."""
    columns, rows = min(layer.in_features, SIZE), min(layer.out_features, SIZE)
    x, weight = numbers(8, columns), numbers(rows, columns, seed=1) / columns**0.5
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    has_bias = any(name == "bias" for name, _ in layer.named_parameters())
    bias = numbers(rows, seed=2).to(device, dtype) if has_bias else None
    wide = None if bias is None else bias.double()
    with torch.no_grad():
        truth = OPS[act](F.linear(x.double(), weight.double(), wide))
        was, now = OPS[act](F.linear(x, weight, bias)), linear(x, weight, bias, act=act)
    errors = relative_error(was, truth), relative_error(now, truth)
    return Comparison(dtype, *errors, torch.equal(was, now))


def rewrite_layers(
    node: ast.FunctionDef, layers: Collection[str], acts: Collection[str]
) -> list[tuple[str, str]]:
    """Rewrite calls of layers before activations; returns the names of both."""
    found: list[tuple[str, str]] = []
    closed = captured(node)
    for block in blocks(node, but=GUARDS):
        for first, second in pairwise(block):
            found += rewrite_pair(first, second, layers, acts, closed)
    inline = Inline(layers, acts)
    inline.generic_visit(node)
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
    first: ast.stmt,
    second: ast.stmt,
    layers: Collection[str],
    acts: Collection[str],
    closed: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Rewrite ``x = self.layer(y)`` before ``x = self.act(x)`` or ``return self.act(x)``."""
    if not isinstance(first, ast.Assign) or len(first.targets) != 1:
        return
    target = first.targets[0]
    layer, value = call_of(first.value, layers), getattr(second, "value", None)
    act = call_of(value, acts)
    if layer is None or act is None or not isinstance(target, ast.Name) or target.id in closed:
        return
    is_same = isinstance(act[1], ast.Name) and act[1].id == target.id
    to = getattr(second, "targets", [])
    overwrites = len(to) == 1 and isinstance(to[0], ast.Name) and to[0].id == target.id
    if is_same and (overwrites or isinstance(second, ast.Return)):
        assert isinstance(first.value, ast.Call)
        call = helper_call(LINEAR_ACT, layer=first.value.func, x=layer[1], **named(act=act[0]))
        first.value = ast.fix_missing_locations(ast.copy_location(call, first))
        second.value = ast.copy_location(ast.Name(target.id, ast.Load()), second)  # type: ignore[attr-defined]
        yield layer[0], act[0]


def helper_call(helper: str, **arguments: ast.expr) -> ast.Call:
    """A call of a helper. Python evaluates its arguments in the order in which they are given."""
    keywords = [ast.keyword(name, value) for name, value in arguments.items()]
    return ast.Call(ast.Name(helper, ast.Load()), [], keywords)


def named(**names: str) -> dict[str, ast.expr]:
    """The arguments that make the helper read a submodule late, after its other calls."""
    (pair,) = names.items()
    return {"owner": ast.Name("self", ast.Load()), pair[0]: ast.Constant(pair[1])}


def captured(node: ast.FunctionDef) -> set[str]:
    """The variables that inner definitions use: these may read any intermediate value."""
    inner = [part for part in ast.walk(node) if isinstance(part, SCOPES) and part is not node]
    names = [part for scope in inner for part in ast.walk(scope) if isinstance(part, ast.Name)]
    return {name.id for name in names}


class OwnScope(ast.NodeTransformer):
    """A transformer that does not visit definitions inside of a function."""

    def visit(self, node: ast.AST) -> Any:
        """Visits a node that is no definition."""
        return node if isinstance(node, SCOPES) else super().visit(node)


class Inline(OwnScope, ast.NodeTransformer):
    """Rewrites ``self.act(self.layer(x))``."""

    def __init__(self, layers: Collection[str], acts: Collection[str]) -> None:
        self.layers, self.acts = layers, acts
        self.found: list[tuple[str, str]] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrites a call of an activation of a layer's result."""
        self.generic_visit(node)
        act = call_of(node, self.acts)
        layer = call_of(act[1], self.layers) if act else None
        if act is None or layer is None:
            return node
        assert isinstance(node.args[0], ast.Call)
        self.found.append((layer[0], act[0]))
        made = helper_call(LINEAR_ACT, act=node.func, layer=node.args[0].func, x=layer[1])
        return ast.fix_missing_locations(ast.copy_location(made, node))
