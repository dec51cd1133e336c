"""Linear layers of one input, such as query, key and value, in the forward of a module.

Torch computes one gradient of the input per layer, and adds these in separate passes. Here each
product after the first adds its result to the sum. Layers in FP8 quantise the input once.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from torchkiln.nn.plain import has_hooks, is_torchs
from torchkiln.ops._folding import is_transformed
from torchkiln.ops.reduction import sum as sum_of
from torchkiln.patch.formula.linear import has_unaligned, is_wide, plain_parameters
from torchkiln.patch.fp8 import outputs_in_fp8
from torchkiln.patch.plan import plan_of
from torchkiln.patch.source.code import blocks
from torchkiln.patch.source.effects import groups
from torchkiln.patch.source.layer import OwnScope, parameters_of

SHARED = "_kiln_shared"
"""The helper in rewritten source: ``[layer(x) for layer in layers]``, or an empty list."""

LEAST_INPUT = 1 << 24
"""Elements of an input from which adding its gradients takes longer than the call of a function.

On a host with 2 cores, forward and backward of the function take 50 us more than those of three
layers. On an H200, a pass over two gradients of 24.6 million bfloat16 elements takes 34 us.
"""


class SharedInput(torch.autograd.Function):
    """The outputs of linear layers; ``parameters`` are the weights, then the biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs of the layers, as by :func:`torch.nn.functional.linear`."""
        count = len(parameters) // 2
        weights: Any = parameters[:count]
        # As in torch, the input is kept for weight gradients only; otherwise it may be changed.
        kept = x if any(ctx.needs_input_grad[1 : count + 1]) else None
        ctx.shape = x.shape
        ctx.save_for_backward(kept, *weights)
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
        return (None if total is None else total.view(ctx.shape), *found)


def as_matrix(t: Tensor) -> Tensor:
    """The tensor as a matrix ``[rows, columns]``."""
    return t.reshape(-1, t.shape[-1])


def plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``, in the memory of ``total`` unless the sum is differentiated."""
    return torch.addmm(total, a, b) if torch.is_grad_enabled() else total.addmm_(a, b)


def shared(x: Any, *layers: Any) -> list[Any]:
    """``[layer(x) for layer in layers]``."""
    return outputs(x, layers) or [layer(x) for layer in layers]


def outputs(x: Any, layers: tuple[Any, ...], between: tuple[Any, ...] = ()) -> list[Any]:
    """``[layer(x) for layer in layers]``, or an empty list if each must run at its own place.

    ``between`` are the norms that are called between the layers.
    """
    if not all(map(is_quiet, between)):
        return []
    if found := outputs_in_fp8(x, layers):
        return found
    if not gains(x, layers):
        return []
    weights = [layer.weight for layer in layers]
    made: Any = SharedInput.apply(x, *weights, *(layer.bias for layer in layers))  # type: ignore[no-untyped-call]
    return list(made)


def is_quiet(norm: Any) -> bool:
    """Whether a call of a norm has no side effect."""
    plan = plan_of(norm)
    is_ours = plan is not None and plan.kind == "norm"
    return (is_ours or is_torchs(norm, (nn.LayerNorm, nn.RMSNorm))) and not has_hooks(norm)


def gains(x: Any, layers: tuple[Any, ...]) -> bool:
    """Whether backward adds gradients of a large input, and all layers are torch's."""
    if type(x) is not Tensor or not x.requires_grad or not torch.is_grad_enabled():
        return False
    # Inductor, too, makes each product after the first add its result to the sum.
    if x.numel() < LEAST_INPUT or is_compiling() or is_transformed():
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if not all(map(takes_shared, layers)):
        return False
    # If only some weights are trained, torch keeps the input for those whose output is used, which
    # is unknown here.
    trained = {layer.weight.requires_grad for layer in layers}
    return len(trained) == 1 and all(is_alike(layer.weight, x) for layer in layers)


def takes_shared(layer: Any) -> bool:
    """Whether a layer is torch's, with a product that needs no padding."""
    is_plain_layer = parameters_of(layer) is not None
    return is_plain_layer and not has_hooks(layer) and not has_unaligned(layer.weight)


def is_sharable(layer: Any) -> bool:
    """Whether a layer is wide, and its product needs no padding."""
    parameters = plain_parameters(layer)
    return parameters is not None and is_wide(parameters[0]) and not has_unaligned(parameters[0])


def is_alike(weight: Tensor, x: Tensor) -> bool:
    """Whether a weight is a plain tensor with the dtype, device and columns of ``x``."""
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.shape[1] == x.shape[-1]
    return is_plain and weight.dtype == x.dtype and weight.device == x.device


def rewrite_shared(
    node: ast.FunctionDef,
    layers: Collection[str],
    norms: Collection[str] = (),
    properties: Collection[str] = (),
) -> list[str]:
    """Rewrite calls ``self.layer(x)`` with the same variable; returns the names of the layers.

    One call before the first layer computes all outputs, which replace the calls.
    """
    found: list[str] = []
    for block in blocks(node):
        made = list(groups(block, layers, norms, properties))
        for group in sorted(made, key=lambda group: -group.first):
            kept = f"{SHARED}_{len(found)}"
            makers = [call.func for call in group.calls]
            between = [ast.parse(f"self.{name}", mode="eval").body for name in group.between]
            x = ast.Name(group.variable, ast.Load())
            parts = [ast.Tuple(list(part), ast.Load()) for part in (makers, between)]
            value = ast.Call(ast.Name(SHARED, ast.Load()), [x, *parts], [])
            places = Places(group.calls, kept)
            for statement in block[group.first :]:
                places.visit(statement)
            first = block[group.first]
            statement = ast.copy_location(ast.Assign([ast.Name(kept, ast.Store())], value), first)
            block.insert(group.first, statement)
            found += group.names
            ast.fix_missing_locations(node)
    return found


class Places(OwnScope, ast.NodeTransformer):
    """Replaces the calls by their outputs."""

    def __init__(self, calls: list[ast.Call], kept: str) -> None:
        self.calls, self.kept = calls, kept

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Reads the kept output in place of a call of a layer."""
        if not any(node is call for call in self.calls):
            return self.generic_visit(node)
        # The output is taken out of the list, so that the forward keeps it no longer than before.
        taken = ast.parse(f"{self.kept}.pop(0) if {self.kept} else None", mode="eval").body
        assert isinstance(taken, ast.IfExp)
        taken.orelse = node
        return ast.copy_location(taken, node)
