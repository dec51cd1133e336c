"""Errors in a spec, found before any check runs."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import CustomOpDef

from torchkiln.testing import contract
from torchkiln.testing.refusals import refused_calls
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import Derived, OpSpec, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FUNCTIONS = (
    *("op", "reference", "composite", "magnitude", "inputs", "bench"),
    *("traffic", "backward_traffic", "grown"),
)
OPTIONAL = (
    *("invalid", "large", "gradient_magnitude", "output_sensitivity", "bench_variants"),
    *("module", "module_inputs"),
)
PAIRS = (("module", "module_inputs"),)
POSITIONS = ("differentiable", "indices", "autocast")
TYPICAL = 4096
"""Maximum number of elements of the typical sample."""

CPU = torch.device("cpu")


def with_forms(specs: Iterable[OpSpec]) -> tuple[OpSpec, ...]:
    """The specs, each followed by the specs of its forms."""
    return tuple(one for spec in specs for one in (spec, *spec.forms))


def validate(specs: Iterable[OpSpec]) -> None:
    """Raise SpecError with a line for each invalid field of a spec."""
    known = with_forms(specs)
    names = Counter(spec.name for spec in known)
    problems = [
        f"{name}: name: got {count} specs of this name, expected 1"
        for name, count in names.items()
        if count > 1
    ]
    for spec in known:
        problems += [f"{spec.name}: {problem}" for problem in problems_of(spec)]
    if problems:
        raise SpecError(problems)


@functools.lru_cache(maxsize=256)
def problems_of(spec: OpSpec) -> list[str]:
    """Errors of one spec, each with the name of the field."""
    # Each step uses only fields that the previous step has validated.
    if found := list(wrong_types(spec)):
        return found
    found = list(wrong_samples(spec))
    return [*contradictions(spec), *(found or wrong_refusals(spec))]


def wrong_types(spec: Any) -> Iterator[str]:
    """Errors about fields of a wrong type."""
    if not isinstance(spec.name, str) or not spec.name:
        yield f"name: got {spec.name!r}, expected the name of the op"
    for name in FUNCTIONS:
        if not callable(value := getattr(spec, name)):
            yield f"{name}: got {value!r}, expected a function"
    for name in OPTIONAL:
        if (value := getattr(spec, name)) is not None and not callable(value):
            yield f"{name}: got {value!r}, expected a function or None"
    if not isinstance(spec.overload, torch._ops.OpOverload):
        found = "missing" if spec.overload is None else f"got {spec.overload!r}"
        if isinstance(spec.op, torch._ops.OpOverloadPacket):
            known = ", ".join(f"{spec.op}.{name}" for name in spec.op.overloads())
            found += f", and {spec.op} has several: {known}"
        yield f"overload: {found}, expected one such as torch.ops.aten.add.Tensor"
    for name in POSITIONS:
        value = getattr(spec, name)
        if not isinstance(value, tuple) or not all(isinstance(i, int) and i >= 0 for i in value):
            yield f"{name}: got {value!r}, expected a tuple of positions"
        elif len(set(value)) < len(value):
            yield f"{name}: got {value!r}, expected each position once"
    if not spec.dtypes or not all(
        isinstance(t, torch.dtype) and t.is_floating_point for t in spec.dtypes
    ):
        yield f"dtypes: got {spec.dtypes!r}, expected at least one floating point dtype"


def contradictions(spec: OpSpec) -> Iterator[str]:
    """Fields that contradict each other or the op's schema."""
    schema = spec.overload._schema
    namespace = spec.overload.namespace
    for name in POSITIONS:
        beyond = [i for i in getattr(spec, name) if i >= len(schema.arguments)]
        if beyond:
            count = f"{schema.name} has {len(schema.arguments)} arguments"
            yield f"{name}: got position {beyond[0]}, but {count}"
    if both := sorted({*spec.indices} & {*spec.autocast}):
        yield f"autocast: got position {both[0]}, which indices calls one of integers"
    for first, second in PAIRS:
        one, other = getattr(spec, first), getattr(spec, second)
        if (one is None) != (other is None) and not isinstance(other, Derived):
            given, missing = (first, second) if other is None else (second, first)
            yield f"{missing}: missing, but {given} is given"
    for helper in spec.helpers:
        if not hasattr(getattr(torch.ops, namespace), helper):
            yield f"helpers: got {helper!r}, which is no op of {namespace}"
    names = {argument.name for argument in schema.arguments}
    if unknown := [name for name in spec.waits_for if name not in names]:
        yield f"waits_for: got {unknown[0]!r}, which is no argument of {schema}"
    for name, reason in spec.excluded.items():
        if name not in contract.CHECKS:
            known = ", ".join(contract.CHECKS)
            yield f"excluded: got {name!r}, expected the name of a check: {known}"
        elif not reason.strip():
            yield f"excluded: {name}: got {reason!r}, expected the reason"
        elif (needs := contract.CHECKS[name].needs) and getattr(spec, needs) in (None, ()):
            yield f"excluded: got {name!r}, but without {needs} there is no such check"


def wrong_samples(spec: OpSpec) -> Iterator[str]:
    """Errors in the samples of a spec."""
    try:
        samples: list[Any] = list(spec.inputs(CPU, spec.dtypes[0]))
    except Exception as error:
        yield f"inputs: raised {type(error).__name__}: {error}"
        return
    if not samples:
        yield "inputs: got no sample, expected at least a typical one"
        return
    if strange := [type(sample).__name__ for sample in samples if not isinstance(sample, Sample)]:
        yield f"inputs: got a {strange[0]}, expected a Sample"
        return
    names = Counter(sample.name for sample in samples)
    for name, count in names.items():
        if count > 1:
            yield f"inputs: got {count} samples named {name!r}, expected each name once"
    for sample in samples:
        if not sample.positions:
            yield f"inputs: sample {sample.name!r}: got no tensor among the positional arguments"
            return
    if not spec.composed:
        yield from wrong_arguments(spec, samples)
    first = samples[0]
    where = f"inputs: the typical sample {first.name!r}"
    rows = [first.args[i].shape[0] for i in first.positions if first.args[i].dim() > 0]
    if not rows or max(rows) < 2 or first.numel > TYPICAL:
        yield f"{where}: expected at least two rows and at most {TYPICAL} elements"
    used = {i for sample in samples for i in spec.wanted(sample)}
    for i in spec.differentiable:
        if i not in used and i < len(spec.overload._schema.arguments):
            yield f"differentiable: got position {i}, where no sample has a floating point tensor"


def wrong_arguments(spec: OpSpec, samples: Sequence[Sample]) -> Iterator[str]:
    """Arguments of samples that neither the schema nor the function takes."""
    known = [argument.name for argument in spec.overload._schema.arguments]
    if spec.op is not spec.overload and not isinstance(spec.op, CustomOpDef):
        try:
            parameters = inspect.signature(spec.op).parameters
        except ValueError:  # a builtin function
            parameters = MappingProxyType({})
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return
        known += [name for name in parameters if name not in known]
    for sample in samples:
        if unknown := [name for name in sample.kwargs if name not in known]:
            got = f"{unknown[0]}={sample.kwargs[unknown[0]]!r}"
            yield (
                f"inputs: sample {sample.name!r}: got {got}, expected arguments among "
                + ", ".join(known)
            )
            return


def wrong_refusals(spec: OpSpec) -> Iterator[str]:
    """Errors in the list of invalid calls."""
    try:
        refusals: list[Any] = list(refused_calls(spec, CPU))
    except Exception as error:
        yield f"invalid: raised {type(error).__name__}: {error}"
        return
    if not refusals and "bad_input" not in spec.excluded:
        yield "invalid: got no call, expected one for each refusal, or bad_input in excluded"
    for case in refusals:
        if not isinstance(case, Invalid):
            yield f"invalid: got a {type(case).__name__}, expected an Invalid"
            continue
        try:
            re.compile(case.message)
        except re.error as error:
            yield f"invalid: {case.name}: message: {case.message!r} is no pattern: {error}"
        if not case.message:
            yield f"invalid: {case.name}: message: got none, expected a pattern"
