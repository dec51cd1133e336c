"""Norms over the last dimension, found by their formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln.nn.plain import attribute
from torchkiln.ops._folding import is_transformed
from torchkiln.ops.norm import layer_norm, rms_norm
from torchkiln.patch.formula.layout import Value
from torchkiln.patch.formula.proven import ProvenPlan, is_ordered, memory_order
from torchkiln.patch.formula.reads import LARGEST
from torchkiln.patch.formula.trace import WIDTHS, Situation, Trace, Tracer, recorded
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import cast, numbers, random_copy, run
from torchkiln.patch.table import stays

CHANGED_EPS = (LARGEST, 1e-12)
"""Values for an attribute that may be eps: with each of them the formula must have this eps."""

P = TypeVar("P", bound=Any)
"""A plan with a field eps."""


@dataclass(frozen=True)
class Norm(ProvenPlan):
    """``rms_norm`` or ``layer_norm`` with the parameters and the eps of the module."""

    kind = "norm"
    saved_as = "norm"
    op: str
    weight: str | None
    bias: str | None
    eps: str | float
    """The name of the attribute with eps, or eps itself."""
    offset: float = 0.0
    round: str = "once"
    permuted: bool = False
    """Whether the module's result has the order of memory of ``x``, as after a transpose."""

    def __str__(self) -> str:
        said = [f"offset={self.offset:g}"] if self.offset else []
        said += [f"round={self.round}"] if self.round != "once" else []
        return f"{self.op}({', '.join(said)})" if said else self.op

    def fits(self, module: nn.Module, *args: Any) -> bool:
        """Whether x and the parameters have one dtype and width, in a proven call."""
        if len(args) != 1 or not self.takes(module, *args):
            return False
        for name in (self.weight, self.bias):
            if name is not None and not is_vector_of(attribute(module, name), args[0]):
                return False
        return True

    def is_laid_out(self, x: Tensor) -> bool:
        """Whether the strides descend; outside of ``torch.compile`` also in other orders."""
        if is_ordered(x):
            return True
        return self.permuted and not is_compiling() and memory_order(x) is not None

    def stays(self, *args: Any) -> bool:
        """Whether ``torch.compile`` uses the op: yes, unless it was measured to be slower."""
        return stays(self.op, *args)

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """The op with the parameters of the module, in the order of memory of ``x``."""
        op = rms_norm if self.op == "rms_norm" else layer_norm
        order = None if is_ordered(x) else memory_order(x)
        if order is None:
            return op(x, x.shape[-1:], **self.options(module))
        y = op(x.permute(order), x.shape[-1:], **self.options(module))
        y = y.permute(sorted(range(x.dim()), key=order.__getitem__))
        # A view that is made without gradients cannot be changed in place with them.
        return y if y.requires_grad or is_transformed() else y.data

    def options(self, module: nn.Module) -> dict[str, Any]:
        """The arguments of the op after ``normalized_shape``."""
        options: dict[str, Any] = {"offset": self.offset, "round": self.round}
        options["eps"] = attribute(module, self.eps) if isinstance(self.eps, str) else self.eps
        options["weight"] = None if self.weight is None else attribute(module, self.weight)
        if self.bias is not None:
            options["bias"] = attribute(module, self.bias)
        return options


def is_vector_of(parameter: Any, x: Tensor) -> bool:
    """Whether a parameter has one number per column of ``x``, in the dtype of ``x``."""
    return (
        isinstance(parameter, Tensor)
        and parameter.dtype is x.dtype
        and parameter.dim() == 1
        and parameter.size(0) == x.size(-1)
    )


def inputs(columns: int) -> Tensor:
    """Rows of usual size, rows with a large mean, and rows so small that eps matters."""
    scale = torch.tensor([1.0, 1.0, 30.0, 1e-2, 1e-3, 1e-4, 1e-6], dtype=torch.float64)
    mean = torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    return numbers(2, len(scale), columns) * scale[:, None] + mean[:, None]


def eps_of(trace: Trace) -> Iterator[tuple[str | float, float]]:
    """Candidates for eps: first the floats that were read, then the constants that were added."""
    for path, value in trace.reads.values:
        if type(value) is float:
            yield (path[0] if len(path) == 1 else value), value
    for value in trace.numbers:
        yield value, value


def vectors_of(module: nn.Module) -> list[str] | None:
    """The parameters of a leaf that has up to two vectors of one size, and no buffer."""
    parameters = dict(module.named_parameters(recurse=False))
    vectors = [name for name, value in parameters.items() if value.dim() == 1]
    if next(module.children(), None) is not None or len(vectors) != len(parameters):
        return None
    if next(module.buffers(recurse=False), None) is not None or len(vectors) > 2:
        return None
    return vectors if len({parameters[name].shape[0] for name in vectors}) <= 1 else None


def widths_of(module: nn.Module, vectors: list[str]) -> tuple[int, ...]:
    """The width of the parameters; several widths if the module has no parameter."""
    return (getattr(module, vectors[0]).shape[0],) if vectors else WIDTHS


@lru_cache(maxsize=512)
def formula(
    op: str, situation: Situation, names: tuple[str, ...], eps: float, offset: float
) -> Value:
    """The formula of the norm, from the spec of the op."""
    from torchkiln.testing.specs.norm import Kind, reference  # noqa: PLC0415

    kind = Kind(op, centered=op == "layer_norm", residual=False)

    def norm(x: Tensor, *parameters: Tensor) -> Any:
        return reference(kind, x, x.shape[-1:], *parameters, eps=eps, offset=offset)

    return recorded(norm, situation, ["x"], names)


def find(module: nn.Module, dtype: torch.dtype) -> Match | str | None:
    """The norm that a leaf with at most a weight and a bias computes."""
    vectors = vectors_of(module)
    if vectors is None:
        return None
    tracer = Tracer(module, widths_of(module, vectors), ["x"])
    trace = tracer.trace()
    orders = {tuple(vectors), tuple(vectors[::-1])}
    for (eps, value), op, offset, names in product(
        list(eps_of(trace)), ("rms_norm", "layer_norm"), (0.0, 1.0), orders
    ):
        weight, bias = (*names, None, None)[:2]
        if (op == "rms_norm") == (bias is not None) or (offset and weight is None):
            continue

        def of(eps: float, op: str = op, names: Any = names, offset: float = offset) -> Any:
            return lambda situation: formula(op, situation, names, eps, offset)

        proof = trace.proof(of(value), dtype)
        if proof is not None:
            plan = Norm(op, weight, bias, value, offset, proof=proof, reads=trace.reads)
            plan = with_eps(plan, tracer, eps, of)
            copy = random_copy(module)
            x = inputs(tracer.widths[0])
            plan = with_permuted(with_rounding(plan, copy, x), copy, x)
            return Match(plan, copy, (x,))
    return trace.reason or None


def with_eps(
    plan: P, tracer: Tracer, eps: str | float, of: Callable[[float], Callable[[Situation], Value]]
) -> P:
    """The plan, which reads eps from the module's attribute if the formula's eps follows it."""
    if not isinstance(eps, str) or plan.proof is None:
        return plan
    module = tracer.module
    before = module.__dict__.get(eps)
    if before is None:
        return plan
    try:
        rank, dtype = plan.proof.ranks[-1], plan.proof.dtypes[0]
        follows = True
        for changed in CHANGED_EPS:
            module.__dict__[eps] = changed
            call = tracer.call(Situation(rank, tracer.widths[0], dtype, training=False))
            formula = of(changed)(call.situation._replace(dtype=torch.float64))
            follows = follows and call.result == formula
    except Exception:  # a forward may raise any error
        follows = False
    finally:
        module.__dict__[eps] = before
    return replace(plan, eps=eps, reads=plan.reads.with_any(eps)) if follows else plan


def with_rounding(plan: Norm, copy: nn.Module, x: Tensor) -> Norm:
    """The plan with the rounding that agrees with the module in the most elements in bfloat16."""
    module, x = cast(copy, torch.bfloat16, x.device), x.bfloat16()
    result = run(module, x)
    if not isinstance(result, Tensor) or result.dtype != x.dtype:
        return plan

    def others(plan: Norm) -> int:
        return int((plan.forward(module, x) != result).sum())

    return min(plan, replace(plan, round="input"), key=others)


def with_permuted(plan: Norm, copy: nn.Module, x: Tensor) -> Norm:
    """The plan for permuted dimensions, too, if the strides of the module's results follow them.

    They must in each proven rank and dtype, in training and in evaluation: a module may call
    ``contiguous()`` in some of them, which the formula does not show.
    """
    ranks, dtypes = (plan.proof.ranks, plan.proof.dtypes) if plan.proof else ((), ())
    ranks = tuple(rank for rank in ranks if rank > 2)

    def follows(module: nn.Module, view: Tensor) -> bool:
        y = run(module, view)
        return isinstance(y, Tensor) and y.stride() == torch.empty_like(view).stride()

    for dtype, is_training in product(dtypes, (True, False)):
        module = cast(copy, dtype, x.device).train(is_training)
        for rank in ranks:
            rows = numbers(*(2, 3, 4)[: rank - 1], 2 * x.shape[-1]).to(dtype)
            if not all(follows(module, view) for view in permuted(rows)):
                return plan
    return replace(plan, permuted=bool(ranks))


def permuted(rows: Tensor) -> Iterator[Tensor]:
    """The first half of the rows, with all orders of the other dimensions: views, and copies."""
    last = rows.dim() - 1
    for order in permutations(range(last)):
        view = rows.permute(*order, last)[..., : rows.shape[-1] // 2]
        yield view
        yield view.clone()
