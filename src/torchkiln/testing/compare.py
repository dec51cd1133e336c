"""How results are compared, and what is said when they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.testing.spec import OpSpec, Sample


@dataclass(frozen=True)
class Where:
    """What was being checked; the head of every message."""

    spec: OpSpec
    check: str
    sample: Sample
    detail: str = ""

    def __str__(self) -> str:
        dtypes = ", ".join(str(self.sample.args[i].dtype) for i in self.sample.positions)
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.spec.name}: {self.check}: sample '{self.sample.name}' ({dtypes}){detail}"

    def at(self, detail: str) -> Where:
        """The same place, one step further in."""
        joined = f"{self.detail}, {detail}" if self.detail else detail
        return Where(self.spec, self.check, self.sample, joined)


def require(condition: bool, where: Where, message: str) -> None:
    """Raise AssertionError with the place and the message."""
    if not condition:
        raise AssertionError(f"{where}: {message}")


def compute_eps(dtype: torch.dtype) -> float:
    """The rounding step inside an op: half precision is computed in float32."""
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(inner).eps


def allowed_error(truth: Tensor, other: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Twice the error of torch's own composite, and one rounding of the result and of its terms."""
    info = torch.finfo(dtype)
    floor = info.eps * truth.abs() + 2 * compute_eps(dtype) * magnitude + info.smallest_normal
    return torch.nan_to_num(2 * (other.double() - truth).abs()) + floor


def element(tensor: Tensor, flat: int) -> list[int]:
    """The index of the element at ``flat`` in row-major order."""
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def require_close(
    found: Tensor, truth: Tensor, other: Tensor, magnitude: Tensor, where: Where
) -> None:
    """Judge ``found`` by the float64 ``truth`` and the error of torch's own result ``other``."""
    require_same_meta(found, other, where)
    if found.numel() == 0:
        return
    rounded = truth.to(found.dtype)
    finite = rounded.isfinite()
    error = (found.double() - truth).abs()
    allowed = allowed_error(truth, other, magnitude, found.dtype)
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
    """Shape, dtype and device."""
    for name in ("shape", "dtype", "device"):
        left, right = getattr(found, name), getattr(expected, name)
        require(left == right, where, f"{name}: found {left}, expected {right}")


def require_identical(found: Tensor, expected: Tensor, where: Where) -> None:
    """Bitwise equality, NaN payloads and signs of zero included."""
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


def bits(tensor: Tensor) -> Tensor:
    """The bytes of the elements in row-major order."""
    dense = tensor.detach().contiguous()  # a single element keeps its stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def exact(spec: OpSpec, sample: Sample) -> Sample:
    """The call in float64 on the device of its result; indices and masks stay what they are."""
    call = sample.map(lambda t: t.detach().double() if t.is_floating_point() else t.detach())
    for i in call.positions:
        if i not in spec.indices:
            call = call.substitute(i, call.args[i].double())
    return call


def require_values(found: Tensor, sample: Sample, where: Where) -> None:
    """Judge the output of one call."""
    with torch.no_grad():
        plain = sample.map(Tensor.detach)
        truth = exact(where.spec, sample)
        require_close(
            found.detach(),
            truth.call(where.spec.reference),
            plain.call(where.spec.composite),
            truth.call(where.spec.magnitude),
            where,
        )


def vector_jacobian(
    function: object, sample: Sample, positions: Sequence[int], grad: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of one call for the arguments at ``positions``."""
    if not callable(function):
        raise TypeError(f"vector_jacobian: function: got {function!r}, expected a callable")
    output = sample.call(function)
    inputs = [sample.args[i] for i in positions]
    return torch.autograd.grad(output, inputs, grad)


def require_gradients(
    found: Sequence[Tensor], sample: Sample, positions: Sequence[int], grad: Tensor, where: Where
) -> None:
    """Judge the gradients of one call for the incoming gradient ``grad``."""
    spec = where.spec
    plain = spec.leaves(sample, tuple(positions))
    truth = spec.leaves(exact(spec, sample), tuple(positions))
    wide = grad.double()
    expected = vector_jacobian(spec.reference, truth, positions, wide)
    terms = spec.gradient_magnitude or spec.reference
    magnitude = vector_jacobian(terms, truth, positions, wide.abs())
    other = vector_jacobian(spec.composite, plain, positions, grad)
    for i, position in enumerate(positions):
        place = where.at(f"gradient of argument {position}")
        terms_here = magnitude[i].abs()
        if spec.output_sensitivity is not None:
            # Half a rounding step of the saved output, in the units of the terms.
            dtype = found[i].dtype
            step = torch.finfo(dtype).eps / 2 / (2 * compute_eps(dtype))
            moved = vector_jacobian(spec.output_sensitivity, truth, positions, wide.abs())
            terms_here = terms_here + step * moved[i].abs()
        require_close(found[i], expected[i], other[i], terms_here, place)
