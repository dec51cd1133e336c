"""The contracts of the losses that return the z-loss and the accuracy, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.refusals import Refusals
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.cross_entropy import linear, logits

Three = tuple[Tensor, Any, Any]
Function = Callable[..., Any]


NO_Z = "the z-loss of a row with an infinity is NaN, as its loss is"
WIDE_ACCURACY = "the accuracy has the dtype that the loss is computed in"


ROUNDINGS = 8
"""Rounding steps by which logits of equal classes may differ."""


def of_logits(*args: Any, accuracy: bool = False, **options: Any) -> Any:
    """cross_entropy that also returns the z-loss and, if requested, the accuracy."""
    options |= {"return_z_loss": True, "return_accuracy": accuracy}
    return torchkiln.cross_entropy(*args, **options)


def of_linear(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    /,
    *,
    linear_bias: Tensor | None = None,
    accuracy: bool = False,
    **options: Any,
) -> Any:
    """linear_cross_entropy that also returns the z-loss and, if requested, the accuracy."""
    options |= {"linear_bias": linear_bias, "return_z_loss": True, "return_accuracy": accuracy}
    return torchkiln.linear_cross_entropy(x, weight, target, **options)


def metrics(rows: Tensor, target: Tensor, *, z_loss: float = 0.0, **kwargs: Any) -> list[Tensor]:
    """The z-loss and the accuracy of rows of logits, in the dtype of the logits.

    Logits of equal rows of expanded arguments may differ by rounding, and count as equal here.
    """
    weights = logits.row_weights(rows, target, **kwargs)
    z = z_loss * logits.reduced(weights * logits.log_sum_exp(rows).square(), rows, target, **kwargs)
    counted = {name: kwargs[name] for name in ("ignore_index", "reduction") if name in kwargs}
    kept = logits.row_weights(rows, target, **counted)
    dim = 0 if rows.dim() == 1 else 1
    own = rows.gather(dim, target.where(kept != 0, 0).unsqueeze(dim)).squeeze(dim)
    rounding = ROUNDINGS * torch.finfo(rows.dtype).eps * rows.abs().amax(dim)
    hits = (own >= rows.amax(dim) - rounding) * kept
    return [z, logits.reduced(hits, rows, target, **counted)]


def counts_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an accuracy."""
    return torch.promote_types(dtype, torch.float32)


def options_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of a loss that its formula reads."""
    beside = ("accuracy", "loss_dtype", "check_target", "result")
    return {name: value for name, value in kwargs.items() if name not in beside}


def logits_reference(x: Tensor, target: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """The formula of the op in plain torch."""
    options = options_of(kwargs)
    loss = logits.reference(x, target, **options)
    z, accuracy = metrics(x.detach(), target, **options)
    result = kwargs.get("result") or x.dtype
    return loss.to(result), z.to(result), accuracy.to(counts_in(x.dtype))


def logits_composite(x: Tensor, target: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """The formula in the dtype of the result."""
    return logits_reference(x, target, **{**kwargs, "result": kwargs.get("loss_dtype")})


def with_terms(terms: Function, reference: Function, *args: Any, **kwargs: Any) -> Three:
    """The magnitudes of the loss and of the z-loss, and the accuracy itself."""
    kwargs = {name: value for name, value in kwargs.items() if name != "accuracy"}
    with torch.no_grad():
        _, z, accuracy = reference(*args, **kwargs)
    size = terms(*args, **kwargs)
    return size, size.detach() + z, accuracy


def linear_reference(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, /, **kwargs: Any
) -> tuple[Tensor, ...]:
    """The formula of the op in plain torch, in a wider dtype if the loss has one."""
    result = kwargs.get("result") or x.dtype
    whole = linear.product(x, weight, bias).to(torch.promote_types(x.dtype, result))
    kwargs = {k: v for k, v in kwargs.items() if k not in ("accuracy", "result")}
    rows, classes, options = linear.flat(whole, target, kwargs)
    loss = logits.reference(rows, classes, **options)
    found = (loss, *metrics(rows.detach(), classes, **options))
    dtypes = (result, result, counts_in(x.dtype))
    pairs = zip(found, dtypes, strict=True)
    return tuple(linear.shaped(y, target, kwargs).to(dtype) for y, dtype in pairs)


def linear_composite(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The formula in the dtype of the result."""
    return linear_reference(*args, **{**kwargs, "result": kwargs.get("loss_dtype")})


def inputs(parent: OpSpec, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls with class indices, which have an accuracy; every second call has a z-loss."""
    at = parent.indices[0]
    known = (call for call in parent.inputs(device, dtype) if call.name != "all ignored")
    calls = [call for call in known if not call.args[at].is_floating_point()]
    for turn, call in enumerate(calls):
        more = {"accuracy": True} | ({"z_loss": 0.02} if turn % 2 else {})
        yield replace(call, kwargs={**call.kwargs, **more})


def with_metrics(parent: OpSpec, op: Function, reference: Function, composite: Function) -> OpSpec:
    """The loss with metrics, which have no gradient."""
    name = f"{parent.name}_with_metrics"
    sensitivity, terms = parent.output_sensitivity, parent.gradient_magnitude
    return replace(
        parent,
        name=name,
        op=op,
        overload=getattr(torch.ops.torchkiln, f"_{name}").default,
        reference=reference,
        composite=composite,
        magnitude=partial(with_terms, parent.magnitude, reference),
        gradient_magnitude=terms and partial(with_terms, terms, reference),
        output_sensitivity=sensitivity and partial(with_terms, sensitivity, reference),
        inputs=partial(inputs, parent),
        differentiable=tuple(i for i in parent.differentiable if i not in parent.indices),
        constant=(1, 2),
        refusals=replace(parent.refusals or Refusals(), called=parent.name, kinds=False),
        module=None,
        module_inputs=None,
        forms=(),
        excluded={**parent.excluded, "mixed_dtypes": WIDE_ACCURACY, "not_finite": NO_Z},
    )


LOGITS = with_metrics(logits.CROSS_ENTROPY, of_logits, logits_reference, logits_composite)
LINEAR = with_metrics(linear.LINEAR_CROSS_ENTROPY, of_linear, linear_reference, linear_composite)
