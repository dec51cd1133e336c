"""Ops that write their result into their first argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.testing.check import check
from torchkiln.testing.compare import (
    Where,
    bits,
    require,
    require_gradients,
    require_identical,
    vector_jacobian,
)
from torchkiln.testing.contract.gradients import incoming, small
from torchkiln.testing.contract.values import SMALL, TINY
from torchkiln.testing.data import layouts
from torchkiln.testing.sample import FLOATING, Sample
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchkiln.testing.data import Placed


def ways(spec: OpSpec) -> dict[str, Callable[..., Tensor]]:
    """The two entries: the function and the op in torch.ops."""
    if spec.inplace is None or spec.inplace_overload is None:
        raise TypeError(f"{spec.name}: in_place: got a spec without inplace and inplace_overload")
    return {"the function": spec.inplace, "torch.ops": spec.inplace_overload}


def require_written(
    function: Callable[..., Tensor], moved: Sample, placed: Placed, expected: Tensor, where: Where
) -> None:
    """Check that the call writes ``expected`` into its first argument alone, and returns it."""
    x = placed.tensor
    whole = placed.buffer.clone()
    whole.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(expected)
    version = x._version
    result = moved.call(function)
    require(result is x, where, "returned another tensor than its argument")
    require_identical(x, expected, where)
    require(torch.equal(placed.bits(), whole.view(torch.uint8)), where, "wrote around its argument")
    control = torch.zeros_like(x)
    before = control._version
    torch.relu_(control)
    raised, by_torch = x._version - version, control._version - before
    require(raised == by_torch, where, f"_version went up by {raised}, expected {by_torch}")


def on_clone(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Applies an in-place op to a copy of ``x``, since ``x`` may be a leaf; returns the copy."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = x.clone()
        function(y, *args, **kwargs)
        return y

    return call


def on_first_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Applies an in-place op to the first row of a copy of ``x``, and returns the copy."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = x.clone()
        function(y[0], *args, **kwargs)
        return y

    return call


def with_first_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``on_first_row`` for a function that returns its result instead of writing it into ``x``."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat([function(x[:1], *args, **kwargs), x[1:]])

    return call


def refusal(call: Callable[[], object]) -> str:
    """The kind and first line of the error of a call."""
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"no error, but {result!r}"


def require_refused_as_by_torch(
    function: Callable[..., Tensor], sample: Sample, where: Where
) -> None:
    """Check that tensors that must not be written to are refused in torch's words."""
    x = sample.args[0]
    leaf = x.clone().requires_grad_()
    overlapping = x[:1].clone().expand_as(x)
    for name, tensor in (
        ("a leaf", leaf),
        ("a view of a leaf", leaf[0]),
        ("an expanded tensor", overlapping),
    ):
        before = bits(tensor)

        def by_torch(tensor: Tensor = tensor) -> Tensor:
            return torch.relu_(tensor)

        found = refusal(lambda t=tensor: sample.substitute(0, t).call(function))  # type: ignore[misc]
        expected = refusal(by_torch)
        require(found == expected, where.at(name), f"{found!r}, expected {expected!r}")
        require(torch.equal(bits(tensor), before), where.at(name), "the refused call wrote")
    with torch.no_grad():
        sample.substitute(0, leaf).call(function)
    require(leaf.is_leaf and leaf.requires_grad, where, "a leaf under no_grad is one no more")
    require_identical(leaf, sample.call(where.spec.op), where.at("a leaf under no_grad"))


@check(dtypes=FLOATING, needs="inplace")
def in_place(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """In place the op writes its result and nothing else; gradients are as for torch's ops."""
    for name, function in ways(spec).items():
        for sample in spec.samples(device, dtype):
            for placed in layouts(sample.args[0]):
                if "expanded" in placed.name or (
                    sample.numel > SMALL and placed.name != "contiguous"
                ):
                    continue
                moved = sample.substitute(0, placed.tensor)
                where = Where(spec, "in_place", moved, f"{name}, {placed.name}")
                require_written(function, moved, placed, moved.call(spec.op), where)
            if sample.numel > TINY:
                continue
            wanted = spec.wanted(sample)
            grads = incoming(sample.call(spec.op))
            where = Where(spec, "in_place", sample, name)
            leaves = spec.leaves(sample)
            found = vector_jacobian(on_clone(function), leaves, wanted, grads)
            require_gradients(found, sample, wanted, grads, where)
        typical = spec.typical(device, dtype)
        where = Where(spec, "in_place", typical, name)
        require_first_row(spec, function, typical, where.at("a view"))
        require_refused_as_by_torch(function, typical, where)
    if dtype == torch.float64:
        require_second_gradients(spec, device)


def require_first_row(
    spec: OpSpec, function: Callable[..., Tensor], sample: Sample, where: Where
) -> None:
    """Check values and gradients where a part of a tensor is written to."""
    wanted = spec.wanted(sample)
    grads = incoming(sample.args[0])
    calls = [spec.leaves(sample) for _ in range(2)]
    functions = (on_first_row(function), with_first_row(spec.op))
    found, expected = (
        (call.call(f), *vector_jacobian(f, call, wanted, grads))
        for f, call in zip(functions, calls, strict=True)
    )
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        require_identical(one, other, where.at(f"gradient of {wanted[i - 1]}" if i else "values"))


def require_second_gradients(spec: OpSpec, device: torch.device) -> None:
    """Check gradients of both orders, and forward mode, against numerical differences."""
    for sample in small(spec, device):
        for name, function in ways(spec).items():
            for wrapped in (on_clone, on_first_row):
                if wrapped is on_first_row and sample.args[0].dim() == 0:
                    continue
                wanted = spec.wanted(sample)
                bound = sample.bind(wrapped(function), wanted)
                inputs = sample.take(wanted)
                try:
                    torch.autograd.gradcheck(bound, inputs, check_forward_ad=True)
                    torch.autograd.gradgradcheck(bound, inputs)
                except Exception as error:
                    where = Where(spec, "in_place", sample, f"{name}, {wrapped.__name__}")
                    raise AssertionError(f"{where}: {error}") from error
