"""Linear layers of one input, such as query, key and value, in the forward of a module.

Torch makes a gradient for the input in each layer, and adds them in passes of their own. Here each
product but the first adds its result to the sum.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from torchkiln.nn.plain import has_hooks
from torchkiln.ops._folding import is_transformed
from torchkiln.ops.reduction import sum as sum_of
from torchkiln.patch.formula.linear import has_plain_parameters, has_unaligned_sizes, is_wide
from torchkiln.patch.source.code import blocks
from torchkiln.patch.source.layer import call_of, is_plain_layer

SHARED = "_kiln_shared"
"""The helper in rewritten source: ``[layer(x) for layer in layers]``."""

LEAST_INPUT = 1 << 20
"""Least number of elements of an input whose gradients take longer to add than a call takes."""

FACTS = ("shape", "dtype", "device", "size", "dim", "ndim")
"""Attributes of an input whose use cannot change it."""


class SharedInput(torch.autograd.Function):
    """The outputs of layers; the parameters are the weights, then the biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Those of :func:`torch.nn.functional.linear`."""
        count = len(parameters) // 2
        weights: Any = parameters[:count]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        pairs = zip(weights, parameters[count:], strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, which can be differentiated."""
        x, *weights = ctx.saved_tensors
        of_x, *wanted = ctx.needs_input_grad
        total: Tensor | None = None
        found: list[Tensor | None] = [None] * len(wanted)
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            rows = as_matrix(grad)
            if of_x:
                total = rows @ weight if total is None else plus_product(total, rows, weight)
            if wanted[i]:
                found[i] = rows.mT @ as_matrix(x)
            if wanted[len(weights) + i]:
                found[len(weights) + i] = sum_of(rows, 0)
        return (None if total is None else total.view(x.shape), *found)


def as_matrix(t: Tensor) -> Tensor:
    """The rows of all dimensions."""
    return t.reshape(-1, t.shape[-1])


def plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``, in the memory of total unless that is differentiated."""
    return torch.addmm(total, a, b) if torch.is_grad_enabled() else total.addmm_(a, b)


def shared(x: Any, *layers: Any) -> list[Any]:
    """``[layer(x) for layer in layers]``."""
    if not gains(x, layers):
        return [layer(x) for layer in layers]
    weights = [layer.weight for layer in layers]
    found: Any = SharedInput.apply(x, *weights, *(layer.bias for layer in layers))  # type: ignore[no-untyped-call]
    return list(found)


def gains(x: Any, layers: tuple[Any, ...]) -> bool:
    """Whether backward adds gradients for a large input, in layers that are torch's."""
    if type(x) is not Tensor or not x.requires_grad or not torch.is_grad_enabled():
        return False
    if x.numel() < LEAST_INPUT or is_compiling() or is_transformed():
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    return all(
        is_plain_layer(layer)
        and not has_hooks(layer)
        and is_alike(layer.weight, x)
        and not has_unaligned_sizes(layer)
        for layer in layers
    )


def is_sharable(layer: Any) -> bool:
    """Whether a layer is wide, and its product needs no padding."""
    return is_wide(layer) and has_plain_parameters(layer) and not has_unaligned_sizes(layer)


def is_alike(weight: Tensor, x: Tensor) -> bool:
    """Whether a weight is a plain parameter of the dtype and device of ``x``."""
    is_plain = type(weight) in (Tensor, nn.Parameter)
    return is_plain and weight.dtype == x.dtype and weight.device == x.device


@dataclass
class Group:
    """Calls of layers with one variable, in the order in which they run."""

    variable: str
    first: int
    """The index of the statement with the first call."""
    names: list[str] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)


def rewrite_shared(node: ast.FunctionDef, layers: Collection[str]) -> list[str]:
    """Rewrite calls ``self.layer(x)`` with one variable; returns the names of the layers.

    A call before the first of them makes the outputs of all, which take the places of the calls.
    """
    found: list[str] = []
    for block in blocks(node):
        made = [group for group in groups(block, layers) if len(group.calls) > 1]
        for group in sorted(made, key=lambda group: -group.first):
            kept = f"{SHARED}_{len(found)}"
            makers = [call.func for call in group.calls]
            x = ast.Name(group.variable, ast.Load())
            value = ast.Call(ast.Name(SHARED, ast.Load()), [x, *makers], [])
            for call in group.calls:
                # Taken out of the list, so that the forward keeps no output longer than before.
                call.func = ast.Attribute(ast.Name(kept, ast.Load()), "pop", ast.Load())
                call.args = [ast.Constant(0)]
            first = block[group.first]
            statement = ast.copy_location(ast.Assign([ast.Name(kept, ast.Store())], value), first)
            block.insert(group.first, statement)
            found += group.names
            ast.fix_missing_locations(node)
    return found


def groups(block: list[ast.stmt], layers: Collection[str]) -> Iterator[Group]:
    """The calls with one variable that nothing else uses or sets in between."""
    open_groups: dict[str, Group] = {}
    for index, statement in enumerate(block):
        is_plain = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return))
        if not is_plain or any(isinstance(part, ast.NamedExpr) for part in ast.walk(statement)):
            yield from open_groups.values()
            open_groups.clear()
            continue
        calls = list(certain_calls(statement, layers))
        theirs = {id(call.args[0]) for _, _, call in calls}
        parts = list(ast.walk(statement))
        theirs |= {id(p.value) for p in parts if isinstance(p, ast.Attribute) and p.attr in FACTS}
        others = [p for p in parts if isinstance(p, ast.Name) and id(p) not in theirs]
        reads = {name.id for name in others if isinstance(name.ctx, ast.Load)}
        for name in reads & open_groups.keys():
            yield open_groups.pop(name)
        for name, variable, call in calls:
            if variable not in reads:
                group = open_groups.setdefault(variable, Group(variable, index))
                group.names.append(name)
                group.calls.append(call)
        for name in {name.id for name in others} & open_groups.keys():
            yield open_groups.pop(name)
    yield from open_groups.values()


UNCERTAIN = (
    ast.IfExp,
    ast.BoolOp,
    ast.Compare,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
"""Expressions that may run a part of them never, or several times."""


def certain_calls(node: ast.AST, layers: Collection[str]) -> Iterator[tuple[str, str, ast.Call]]:
    """Layer, variable and call of each ``self.layer(variable)`` that runs once, in their order."""
    if isinstance(node, UNCERTAIN):
        return
    for child in ast.iter_child_nodes(node):
        yield from certain_calls(child, layers)
    own = call_of(node, layers)
    if own is not None and isinstance(own[1], ast.Name):
        assert isinstance(node, ast.Call)
        yield own[0], own[1].id, node
