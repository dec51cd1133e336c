"""Comparisons of results, and the messages about differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchkiln.testing.sample import Result, Sample
    from torchkiln.testing.spec import OpSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """The op, check and sample of a comparison; the head of every message."""

    spec: OpSpec
    check: str
    sample: Sample
    detail: str = ""

    def __str__(self) -> str:
        dtypes = ", ".join(str(self.sample.args[i].dtype) for i in self.sample.positions)
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.spec.name}: {self.check}: sample '{self.sample.name}' ({dtypes}){detail}"

    def at(self, detail: str) -> Where:
        """The same place with a further detail."""
        joined = f"{self.detail}, {detail}" if self.detail else detail
        return Where(self.spec, self.check, self.sample, joined)


@contextmanager
def noted(where: Where) -> Iterator[None]:
    """Add the op, check and sample to an error of another tool."""
    try:
        yield
    except Exception as error:
        error.add_note(str(where))
        raise


def outputs(result: Tensor | Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """All tensors of a result, without the outputs that are None in this call."""
    return (result,) if isinstance(result, Tensor) else tuple(y for y in result if y is not None)


def each(results: Sequence[Result], where: Where) -> list[tuple[tuple[Tensor, ...], Where]]:
    """The outputs of several calls, grouped by output number, each group with a ``Where``."""
    tensors = [outputs(result) for result in results]
    counts = [len(one) for one in tensors]
    require(len(set(counts)) == 1, where, f"got {counts[0]} outputs, expected {counts[-1]}")
    several = counts[0] > 1
    return [
        (group, where.at(f"output {i}") if several else where)
        for i, group in enumerate(zip(*tensors, strict=True))
    ]


def require(condition: bool, where: Where, message: str) -> None:
    """Raise AssertionError with the op, check, sample and message."""
    if not condition:
        raise AssertionError(f"{where}: {message}")


def inside(dtype: torch.dtype) -> torch.finfo:
    """``finfo`` of the dtype that an op computes in: float32 for half precision."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)


def compute_eps(dtype: torch.dtype) -> float:
    """The rounding step of the dtype that an op computes in."""
    return inside(dtype).eps


def allowed_error(
    truth: Tensor, other: Tensor, magnitude: Tensor, dtype: torch.dtype, lost: float = 0.0
) -> Tensor:
    """Twice the error of torch's composite, plus rounding steps of the result and of ``magnitude``.

    In float64 the truth itself has rounding errors. A result below the smallest normal number may
    be flushed to zero. An intermediate number may be flushed, too, which changes the result by at
    most ``lost`` times the smallest normal number.
    """
    info = torch.finfo(dtype)
    # An infinite magnitude, from terms that do not reach the result, bounds no rounding error.
    magnitude = torch.where(magnitude.isfinite(), magnitude, truth.abs())
    rounded = info.eps * truth.abs() + 2 * compute_eps(dtype) * magnitude
    tiny = info.smallest_normal + lost * inside(dtype).smallest_normal
    least = rounded * (2 if dtype == torch.float64 else 1) + tiny
    return torch.nan_to_num(2 * (other.double() - truth).abs()) + least


def element(tensor: Tensor, flat: int) -> list[int]:
    """The index of the element at ``flat`` in row-major order."""
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def require_close(
    found: Tensor,
    truth: Tensor,
    other: Tensor,
    magnitude: Tensor,
    where: Where,
    lost: float = 0.0,
) -> None:
    """Compare ``found`` with the float64 ``truth``, given torch's result ``other``."""
    require_same_meta(found, other, where)
    if found.numel() == 0:
        return
    rounded = truth.to(found.dtype)
    finite = rounded.isfinite()
    error = (found.double() - truth).abs()
    allowed = allowed_error(truth, other, magnitude, found.dtype, lost)
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    wrong = torch.where(finite, ~(error <= allowed), ~same)
    if not wrong.any():
        return
    excess = torch.where(wrong, torch.nan_to_num(error / allowed, nan=torch.inf), -1.0)
    worst = int(excess.argmax())
    index = tuple(element(found, worst))
    raise AssertionError(
        f"{where}: {int(wrong.sum())} of {found.numel()} elements are wrong; the worst is "
        f"{list(index)}: found {found[index].item()!r}, expected {truth[index].item()!r}, "
        f"error {error[index].item():.3g}, allowed {allowed[index].item():.3g} "
        f"(torch's own result {other[index].item()!r})"
    )


def require_same_meta(found: Tensor, expected: Tensor, where: Where) -> None:
    """Check that shape, dtype and device are equal."""
    for name in ("shape", "dtype", "device"):
        left, right = getattr(found, name), getattr(expected, name)
        require(left == right, where, f"{name}: found {left}, expected {right}")


def require_same(found: Result, expected: Result, where: Where) -> None:
    """Check bitwise equality of all outputs of two calls."""
    for (one, other), place in each((found, expected), where):
        require_identical(one, other, place)


def require_identical(found: Tensor, expected: Tensor, where: Where) -> None:
    """Check bitwise equality, including NaN payloads and signs of zero."""
    require_same_meta(found, expected, where)
    left, right = bits(found), bits(expected)
    if torch.equal(left, right):
        return
    worst = int((left != right).reshape(-1).to(torch.uint8).argmax()) // found.itemsize
    index = tuple(element(found, worst))
    raise AssertionError(
        f"{where}: not bitwise equal; the first difference is {list(index)}: "
        f"found {found[index].item()!r}, expected {expected[index].item()!r}"
    )


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Whether shape, dtype, device and all bits are equal."""
    alike = (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
    return alike and torch.equal(bits(left), bits(right))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of all elements in row-major order."""
    dense = tensor.detach().contiguous()  # contiguous() keeps the stride of a single element
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def exact(spec: OpSpec, sample: Sample) -> Sample:
    """The call in float64, on the device of its result; indices and masks keep their dtypes."""
    call = sample.map(lambda t: t.detach().double() if t.is_floating_point() else t.detach())
    for i in call.positions:
        if i not in spec.indices:
            call = call.substitute(i, call.args[i].double())
    return call


@dataclass
class Truth(Generic[T]):
    """The float64 results of calls with equal values, and the results that were found close."""

    values: list[Tensor]
    exact: T
    close: list[tuple[Tensor, ...]] = field(default_factory=list)

    def has(self, found: Sequence[Tensor]) -> bool:
        """Whether a call with these values had the same bits, and they were close."""
        return any(
            len(one) == len(found) and all(map(same_tensor, one, found)) for one in self.close
        )

    def add(self, found: Sequence[Tensor]) -> None:
        """Keep results that are close."""
        self.close.append(tuple(tensor.detach().clone() for tensor in found))


class Truths:
    """The float64 results of calls of one sample, which calls with equal values share.

    They are most of the work of a comparison, and do not depend on strides. A result with the bits
    of an earlier call is not compared again.
    """

    def __init__(self) -> None:
        self.known: list[Truth[Any]] = []

    def of(self, tensors: Sequence[Tensor | None], compute: Callable[[], T]) -> Truth[T]:
        """The results for tensors with these values; computes them for the first ones."""
        given = [bits(x) for x in tensors if x is not None]
        for truth in self.known:
            if all(map(torch.equal, truth.values, given)):
                return truth
        self.known.append(Truth([x.clone() for x in given], compute()))
        return self.known[-1]


def require_values(
    found: Result, sample: Sample, where: Where, truths: Truths | None = None
) -> None:
    """Check the outputs of one call. ``truths``: results of calls that differ only in tensors."""
    spec = where.spec

    def wide() -> tuple[Result, Result, tuple[Tensor, ...] | None]:
        truth = exact(spec, sample)
        sensitivity = spec.intermediate_sensitivity
        moved = outputs(truth.call(sensitivity)) if sensitivity else None
        return truth.call(spec.reference), truth.call(spec.magnitude), moved

    with torch.no_grad():
        plain = sample.map(Tensor.detach)
        truth = (truths or Truths()).of(sample.take(sample.positions), wide)
        if truth.has(outputs(found)):
            return
        expected, terms, moved = truth.exact
        beside = expected, plain.call(spec.composite), terms
        for i, ((one, expected, other, terms), place) in enumerate(each((found, *beside), where)):
            all_terms = terms + half_step(one.dtype) * moved[i] if moved else terms
            require_close(one.detach(), expected, other, all_terms, place)
        truth.add(outputs(found))


Grads = Sequence[Tensor | None]
"""A gradient for each output of a call; None for an output that is not used."""


def vector_jacobian(
    function: object, sample: Sample, positions: Sequence[int], grads: Grads
) -> tuple[Tensor, ...]:
    """Gradients of one call for the arguments at ``positions``."""
    if not callable(function):
        raise TypeError(f"vector_jacobian: function: got {function!r}, expected a callable")
    inputs = [sample.args[i] for i in positions]
    return gradients(outputs(sample.call(function)), inputs, grads)


def gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], grads: Grads, **options: bool
) -> tuple[Tensor, ...]:
    """Gradients of the inputs for the gradients of the results, like torch.autograd.grad.

    Results whose gradient is None are not used. Without inputs the result is empty.
    """
    used = [(y, grad) for y, grad in zip(results, grads, strict=True) if grad is not None]
    if not inputs:
        return ()
    # An argument that only unused outputs depend on has a gradient of zero.
    return torch.autograd.grad(
        [output for output, _ in used],
        inputs,
        [grad for _, grad in used],
        materialize_grads=len(used) < len(grads),
        **options,
    )


def widened(grads: Grads) -> list[Tensor | None]:
    """The gradients in float64."""
    return [None if grad is None else grad.double() for grad in grads]


def half_step(dtype: torch.dtype) -> float:
    """Half a rounding step of a saved output, in the unit of `allowed_error`."""
    return torch.finfo(dtype).eps / 2 / (2 * compute_eps(dtype))


def steps(terms: int) -> float:
    """Growth of the rounding errors of a sum that is rounded after each term.

    The unit is two rounding steps, as in `allowed_error`. Random errors grow with the square root
    of the number of terms; if all terms are equal, errors add up to half a step per term.
    """
    return max(1.0, min(terms / 4, 4 * terms**0.5))


def depth(terms: int) -> float:
    """Growth of the rounding errors of a pairwise sum of ``terms`` terms."""
    return max(1.0, math.log2(max(terms, 1)) / 2)


def name_of(spec: OpSpec, position: int) -> str:
    """The name of an argument in the schema, in brackets; empty without a schema."""
    schema = getattr(spec.overload, "_schema", None)
    if schema is None or spec.composed or position >= len(schema.arguments):
        return ""
    return f" ({schema.arguments[position].name})"


def require_gradients(
    found: Sequence[Tensor],
    sample: Sample,
    positions: Sequence[int],
    grads: Grads,
    where: Where,
    truths: Truths | None = None,
) -> None:
    """Check the gradients of one call for the incoming gradients ``grads``.

    ``truths``: results of calls that differ only in tensors.
    """
    spec = where.spec
    wide = widened(grads)
    size = [None if grad is None else grad.abs() for grad in wide]

    def exactly() -> tuple[tuple[Tensor, ...], ...]:
        truth = spec.leaves(exact(spec, sample), tuple(positions))
        functions = (spec.gradient_magnitude or spec.reference, spec.output_sensitivity)
        sizes = [vector_jacobian(f, truth, positions, size) for f in functions if f is not None]
        return vector_jacobian(spec.reference, truth, positions, wide), *sizes

    given = [*sample.take(sample.positions), *grads]
    truth = (truths or Truths()).of(given, exactly)
    if truth.has(found):
        return
    expected, magnitude, *moved = truth.exact
    plain = spec.leaves(sample, tuple(positions))
    other = vector_jacobian(spec.composite, plain, positions, grads)
    used = [grad for grad in size if grad is not None and grad.numel() > 0]
    count = max((grad.numel() for grad in used), default=0)
    # A derivative flushed to zero changes the gradient by the incoming gradient times the lost
    # value, and by the same amount again if the op subtracts a mean of this product.
    lost = 2 * max((float(grad.max()) for grad in used), default=0.0)
    for i, position in enumerate(positions):
        place = where.at(f"gradient of argument {position}{name_of(spec, position)}")
        # Torch's sums, which compute the float64 truth, may add their terms one by one.
        growth = steps if found[i].dtype == torch.float64 else depth
        terms_here = magnitude[i].abs() * growth(count // max(found[i].numel(), 1))
        for change in moved:
            rounded = {found[i].dtype, *(grad.dtype for grad in grads if grad is not None)}
            terms_here = terms_here + max(map(half_step, rounded)) * change[i].abs()
        require_close(found[i], expected[i], other[i], terms_here, place, lost)
    truth.add(found)
