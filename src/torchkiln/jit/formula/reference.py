"""A formula in plain torch functions: it runs on the CPU and gives higher derivatives."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.call.layout import broadcast
from torchkiln.jit.formula.expression import Node, compute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchkiln.jit.formula.arguments import Argument

GRAD = "grad"
"""The name of the incoming gradient in expressions."""


def compute_wide(node: Node, values: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The formula computed in float64 for a float64 result, else in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    moved = {k: v.to(wide) if isinstance(v, Tensor) else v for k, v in values.items()}
    device = next(v.device for v in values.values() if isinstance(v, Tensor))
    return compute(node, moved, wide, device)


def reference_of(node: Node, arguments: Sequence[Argument]) -> Callable[..., Tensor]:
    """The formula as a torch function: computed in float32 or float64, rounded once."""
    names = [argument.name for argument in arguments]

    def reference(*args: Any) -> Tensor:
        defaults = [argument.default for argument in arguments[len(args) :]]
        values = dict(zip(names, [*args, *defaults], strict=True))
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        result = compute_wide(node, values, dtype).expand(broadcast([t.shape for t in tensors]))
        return result.to(dtype, memory_format=torch.contiguous_format).contiguous()

    return reference


def with_gradients(
    reference: Callable[..., Tensor], names: Sequence[str], slopes: Mapping[str, Node]
) -> Callable[..., Tensor]:
    """``reference`` with given gradients, which torch can differentiate again.

    Args:
        reference: the function.
        names: its arguments.
        slopes: for each tensor argument the gradient, an expression that is linear in ``grad``.
    """

    def slope(name: str, grad: Tensor, values: Mapping[str, Any]) -> Tensor:
        return compute_wide(slopes[name], {**values, GRAD: grad}, grad.dtype).expand(grad.shape)

    def values_of(ctx: Any) -> dict[str, Any]:
        return dict(zip(slopes, ctx.saved_tensors, strict=True)) | ctx.numbers

    class Given(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Tensor:
            return reference(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            values = dict(zip(names, inputs, strict=True))
            tensors = [values.pop(name) for name in slopes]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.numbers, ctx.dtype = values, output.dtype

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            values = values_of(ctx)
            found = {
                name: slope(name, grads[0], values)
                .sum_to_size(values[name].shape)
                .to(values[name].dtype)
                for name in slopes
            }
            return tuple(map(found.get, names))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Tensor:
            values = values_of(ctx)
            shape = broadcast([t.shape for t in ctx.saved_tensors])
            parts = [
                slope(name, tangent.to(ctx.dtype).expand(shape), values)
                for name, tangent in zip(names, tangents, strict=True)
                if tangent is not None
            ]
            return torch.stack(parts).sum(0).to(ctx.dtype)

    apply: Callable[..., Tensor] = Given.apply
    return apply
