"""A problem: the reference that a candidate is compared with, and the calls that are compared."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchkiln.judge.blocks import flat
from torchkiln.testing.compare import (
    compute_eps,
    exact,
    outputs,
    vector_jacobian,
)
from torchkiln.testing.registry import find, specs_of
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs import SPECS

SHIFT = 1e-7
"""Relative change of all inputs that measures how sensitive a result is to rounding."""
SHIFTS = 3
SMALL = 33
"""The size to which slow problems are cropped for most checks."""


class ProblemError(ValueError):
    """The problem cannot be judged."""


@dataclass
class Problem:
    """A reference in float64, and calls of it.

    The positional arguments of a sample are the inputs and then the weights of the reference, which
    a candidate gets by name.
    """

    name: str
    device: torch.device
    spec: OpSpec
    given: Callable[[int, int], Sample]
    """The usual call: inputs of one seed, weights of another."""
    entry: str
    """The class or function of a candidate."""
    init: list[Any] | None = None
    make: Callable[[int], nn.Module] | None = None
    weights: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    file: Path | None = None
    terms: int = 1
    """Terms of the longest sum in the reference."""
    specs: str | None = None
    """The module with the spec of an op of another package."""
    others: tuple[Sample, ...] = ()
    """Further calls, for an op with a spec."""

    def inputs(self, sample: Sample) -> Sample:
        """The call without the weights."""
        count = len(sample.args) - len(self.weights)
        return replace(sample, args=sample.args[:count])

    def state(self, sample: Sample) -> dict[str, Tensor]:
        """The weights of the call by name."""
        if not self.weights:
            return {}
        return dict(zip(self.weights, sample.args[-len(self.weights) :], strict=True))

    def truth(self, sample: Sample) -> tuple[Tensor, ...]:
        """The outputs in float64."""
        with torch.no_grad():
            return outputs(exact(self.spec, sample).call(self.spec.reference))

    def expected(self, sample: Sample) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the outputs."""
        with torch.no_grad():
            found = outputs(sample.call(self.spec.composite))
        return [(tuple(y.shape), y.dtype) for y in found]

    def magnitude(self, dtype: torch.dtype, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The size of the terms behind each output, found by moving the inputs a little.

        A sum is as sensitive as its terms are large, also where they cancel. The size is multiplied
        by the root of the number of terms, for sums in one accumulator. Torch's own worst error in
        a row of the output is added, since its rounding errors are as random as the candidate's.
        Elements far below the usual size of the output may have an absolute error: another formula
        may find them as a difference.
        """
        reference = self.spec.reference
        truth = outputs(reference(*args, **kwargs))
        generator = torch.Generator(device=self.device).manual_seed(0)

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            signs = torch.randint(0, 2, value.shape, generator=generator, device=value.device)
            return value * (1 + SHIFT * (2 * signs - 1))

        terms = [torch.maximum(y.abs(), size_of(y)) for y in truth]
        for _ in range(SHIFTS):
            found = outputs(reference(*map(moved, args), **kwargs))
            for i, y in enumerate(found):
                change = torch.nan_to_num((y - truth[i]).abs() / SHIFT, nan=0.0, posinf=0.0)
                terms[i] = torch.maximum(terms[i], truth[i].abs() + row_rms(change))
        rounded = [a.to(dtype) if _is_real(a) else a for a in args]
        own = outputs(self.spec.composite(*rounded, **kwargs))
        # `allowed_error` allows two rounding steps of float32 at the magnitude. In half precision a
        # chain of torch's ops rounds each intermediate result to the dtype. This factor makes the
        # two steps steps of the dtype, enough for four roundings of half a step each.
        chain = torch.finfo(dtype).eps / compute_eps(dtype)
        growth = max(self.terms**0.5, chain)
        return tuple(
            growth * terms[i] + row_most(own[i].double() - y) / compute_eps(dtype)
            for i, y in enumerate(truth)
        )

    def for_dtype(self, dtype: torch.dtype) -> OpSpec:
        """The spec whose magnitudes hold for calls in a dtype."""
        if self.make is None:
            return self.spec
        return replace(self.spec, magnitude=partial(self.magnitude, dtype))

    def gradient(self, sample: Sample, wanted: tuple[int, ...]) -> Problem:
        """The problem whose outputs are the gradients of this one at ``wanted``.

        The positional arguments are those of the sample, then the incoming gradients.
        """
        count = len(sample.args)
        base = self.spec

        def gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = replace(sample, args=args[:count], kwargs=kwargs)
            with torch.enable_grad():
                return vector_jacobian(function, base.leaves(call, wanted), wanted, args[count:])

        spec = replace(
            base,
            reference=partial(gradients, base.reference),
            composite=partial(gradients, base.composite),
        )
        return replace(self, spec=spec, make=self.make or nn.Identity)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def size_of(y: Tensor) -> Tensor:
    """The root mean square of the finite elements."""
    finite = y[y.isfinite()]
    return finite.square().mean().sqrt() if finite.numel() else y.new_zeros(())


def row_rms(values: Tensor) -> Tensor:
    """Each value, or the root mean square of its row if that is larger."""
    if values.dim() == 0 or values.numel() == 0:
        return values
    return torch.maximum(values, values.square().mean(-1, keepdim=True).sqrt())


def row_most(error: Tensor) -> Tensor:
    """The largest finite error of each row."""
    size = torch.nan_to_num(error.abs(), nan=0.0, posinf=0.0)
    if size.dim() == 0 or size.numel() == 0:
        return size
    return size.amax(-1, keepdim=True).expand_as(size)


def kernel_problem(file: Path, device: torch.device) -> Problem:
    """A problem in the format of KernelBench: ``Model``, ``get_inputs``, ``get_init_inputs``."""
    where = f"torchkiln.judge: {file}"
    try:
        found = runpy.run_path(str(file))
    except Exception as error:
        raise ProblemError(f"{where}: raised {type(error).__name__}: {error}") from error
    missing = [n for n in ("Model", "get_inputs") if not callable(found.get(n))]
    if missing:
        raise ProblemError(f"{where}: got no {missing[0]}, expected a file as of KernelBench")
    init = list(found.get("get_init_inputs", list)())

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = found["Model"](*init)
        return model.to(device)

    model = make(0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = tuple(n for n, t in tensors.items() if t.is_floating_point())

    def forward(*args: Any) -> Any:
        inputs = args[: len(args) - len(names)]
        own = dict(zip(names, args[len(inputs) :], strict=True))
        result = functional_call(model, own, inputs)
        return result if isinstance(result, Tensor) else tuple(flat(result))

    def given(seed: int, weights_seed: int) -> Sample:
        torch.manual_seed(seed)
        inputs = [t.to(device) if isinstance(t, Tensor) else t for t in found["get_inputs"]()]
        own = model if not names else make(weights_seed)
        weights = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        return Sample("given", (*inputs, *(weights[n].detach() for n in names)))

    sample = given(0, 0)
    spec = OpSpec(
        op=forward,
        name=file.stem,
        overload=cast(Any, None),
        reference=forward,
        magnitude=forward,
        inputs=lambda *_: [sample],
        differentiable=tuple(i for i in sample.positions if sample.args[i].is_floating_point()),
        indices=tuple(i for i in sample.positions if not sample.args[i].is_floating_point()),
    )
    problem = Problem(file.stem, device, spec, given, "ModelNew", init, make, names, file=file)
    problem.parameters = tuple(n for n, _ in model.named_parameters() if n in names)
    problem.spec = problem.for_dtype(torch.float32)
    return problem


def spec_of(name: str, specs: str | None) -> OpSpec:
    """The spec of an op of this package, or of another one with ``specs``."""
    known = specs_of("torchkiln.judge", "--specs", specs) if specs else SPECS
    return find("torchkiln.judge", "--op", name, known)


def op_problem(name: str, specs: str | None, device: torch.device, dtype: torch.dtype) -> Problem:
    """The problem of an op with a spec; the candidate is a function of the op's name."""
    spec = spec_of(name, specs)
    known = list(spec.samples(device, dtype))

    def given(seed: int, _: int) -> Sample:
        generator = torch.Generator(device=device).manual_seed(seed)

        def fresh(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor
            order = torch.randperm(tensor.numel(), generator=generator, device=device)
            return tensor.flatten()[order].reshape(tensor.shape)

        return replace(known[0].map(fresh), name="given")

    return Problem(name, device, spec, given, name, specs=specs, others=tuple(known[1:]))


def cropped(problem: Problem, sample: Sample, size: int, smaller: int) -> Sample | None:
    """The call with one size of the inputs made smaller; None if the reference refuses it."""
    inputs = problem.inputs(sample)

    def crop(tensor: Tensor) -> Tensor:
        for d, n in enumerate(tensor.shape[: None if free_sizes(inputs) else 1]):
            if n == size:
                tensor = tensor.narrow(d, 0, smaller)
        return tensor.contiguous()

    args = inputs.map(crop).args + sample.args[len(inputs.args) :]
    found = replace(sample, name=f"{size} -> {smaller}", args=args)
    try:
        problem.truth(found)
    except Exception:  # the size belongs to the weights, which are not cropped
        return None
    return found


def free_sizes(inputs: Sample) -> bool:
    """Whether other dimensions than the first may change: indices could be out of range."""
    return all(inputs.args[i].is_floating_point() for i in inputs.positions)


def sizes_of(inputs: Sample) -> list[int]:
    """The sizes above 1 that may change, in ascending order."""
    last = None if free_sizes(inputs) else 1
    return sorted({n for i in inputs.positions for n in inputs.args[i].shape[:last] if n > 1})


def crops(problem: Problem, sample: Sample) -> Iterator[Sample]:
    """The call with smaller sizes that the reference accepts, one size at a time."""
    for size in sizes_of(problem.inputs(sample))[:4]:
        for smaller in sorted({size - 1, max(1, size // 2 - 1) | 1, 1} - {size}, reverse=True):
            if (found := cropped(problem, sample, size, smaller)) is not None:
                yield found


def compact(problem: Problem, sample: Sample) -> Sample:
    """The call with all sizes made small that the reference accepts, for slow problems."""
    for size in reversed(sizes_of(problem.inputs(sample))):
        if size > SMALL:
            sample = cropped(problem, sample, size, SMALL) or sample
    return replace(sample, name="compact")


def families(problem: Problem, sample: Sample, seed: int) -> Iterator[tuple[str, Sample]]:
    """The call with other values: signed, large, small, constant rows, zeros, NaN."""
    generator = torch.Generator(device=problem.device).manual_seed(seed)

    def signed(x: Tensor) -> Tensor:
        flip = torch.randint(0, 2, x.shape, generator=generator, device=x.device) * 2 - 1
        if x.dim() == 2 and x.shape[0] == x.shape[1] and torch.equal(x, x.T):
            flip = flip.triu() + flip.triu(1).T
        return x * flip

    def one_nan(x: Tensor) -> Tensor:
        found = x.clone()
        if found.numel():
            at = int(torch.randint(0, x.numel(), (), generator=generator, device=x.device))
            found.view(-1)[at] = torch.nan
        return found

    first = True

    def nan_once(x: Tensor) -> Tensor:
        nonlocal first
        here, first = first, False
        return one_nan(x) if here else x

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "signed": signed,
        "large": lambda x: x * 1000,
        "small": lambda x: x / 1000,
        "constant rows": lambda x: x if has_zeros(x) else x[..., :1].expand_as(x).contiguous(),
        "zeros": torch.zeros_like,
        "NaN": nan_once,
    }
    inputs = problem.inputs(sample)
    weights = sample.args[len(inputs.args) :]
    usual = finite_share(problem.truth(sample))
    for name, change in kinds.items():

        def changed(x: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            return change(x.contiguous()) if x.is_floating_point() and not is_choice(x) else x

        found = replace(inputs.map(changed), name=f"{name} values")
        found = replace(found, args=found.args + weights)
        try:
            share = finite_share(problem.truth(found))
        except Exception:
            continue
        if name == "NaN" or share >= usual:
            yield name, found


def has_zeros(x: Tensor) -> bool:
    """Whether zeros are part of the structure, as in a triangular matrix."""
    return x.numel() > 0 and float((x == 0).float().mean()) > 0.1


def is_choice(x: Tensor) -> bool:
    """Whether a tensor has few values, such as labels 0 and 1."""
    return x.numel() >= 64 and x.flatten()[:4096].unique().numel() <= 8


def finite_share(results: Sequence[Tensor]) -> float:
    """The share of finite elements."""
    total = sum(y.numel() for y in results)
    return sum(int(y.isfinite().sum()) for y in results) / max(total, 1)
