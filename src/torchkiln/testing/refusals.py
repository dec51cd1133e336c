"""Calls that an op must refuse, derived from its schema and samples.

Every message reads ``<package>.<op>: <argument>: got ..., expected ...``. The texts are the same as
in ``torchkiln/torch/checks.h`` (dtypes, layouts, devices, shapes) and in torchkiln's Python
bindings (kinds of arguments).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.ops._traced import name_of
from torchkiln.testing.sample import FLOATING, Invalid, Sample

if TYPE_CHECKING:
    from torchkiln.testing.spec import OpSpec


KNOWN_DTYPES = "expected one of " + ", ".join(map(name_of, FLOATING))
NOT_FLOATING = (torch.int64, torch.bool, torch.complex64)
SPARSE = "got layout Sparse, expected Strided; call .to_dense() first"

A_TENSOR = torch.ones(())
KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "Tensor": ("a torch.Tensor", (None, 2.0, "x")),
    "Tensor?": ("a torch.Tensor", (2.0, "x")),
    "float": ("a number", (None, "1e-5", A_TENSOR)),
    "float?": ("a number", ("1e-5", A_TENSOR)),
    "int": ("an int", (None, 1.5, "1", True, A_TENSOR)),
    "bool": ("a bool", (None, 1, "yes", A_TENSOR)),
    "str": ("a str", (None, 1)),
    "ScalarType?": ("a torch.dtype or None", (1, "float32")),
    "int[]?": ("an int, a tuple of ints or None", ("0", (0.5,), [None], True)),
    "SymInt[]": ("an int or a sequence of ints", (None, "4", (4.0,), [None])),
    "SymInt[]?": ("an int or a sequence of ints", ("4", (4.0,), [None])),
}
"""The text of the error, and values of wrong types, by the schema type of the argument."""


@dataclass(frozen=True)
class Refusals:
    """The dependencies between the arguments of a call.

    Calls with one wrong argument are derived from these fields, the schema and the samples:

    - each argument: a value of another type (None, a number or a string for a tensor; a tensor for
      a number; a number for a flag; and so on);
    - each tensor: a sparse layout; a device other than that of the first tensor;
    - the first tensor: a dtype that is not floating point;
    - each tensor of ``like``, ``dtypes`` and ``parameters``: dtypes that are not allowed for the
      dtype of the other argument;
    - each tensor of ``like`` and ``shapes``: other sizes and ranks;
    - each argument of ``words`` and ``dims``, and each dtype: values out of range.
    """

    like: Mapping[str, str] = field(default_factory=dict)
    """Tensors with the dtype and shape of another argument: ``{"up": "gate"}``."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Tensors with the dtype of another argument."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Tensors with the dtype of another argument, or float32 if that has half precision."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Arguments of a fixed shape, with the words of the message: ``{"bias": "the size of x"}``."""
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The values that a string may have."""
    dims: Mapping[str, str] = field(default_factory=dict)
    """Arguments that name dimensions of a tensor."""
    mixes: tuple[str, ...] = ()
    """Tensors of ``like`` that may have another floating dtype: the wider dtype is used."""
    promotes: bool = False
    """Whether tensors of several dtypes are promoted to a common one."""
    numbers: tuple[str, ...] = ()
    """Tensor arguments that may be numbers."""
    integers: bool = False
    """Whether the first tensor and the result may have an integer dtype or bool."""
    first: str = ""
    """The tensor whose device the other tensors must have; empty for the first of the schema."""
    called: str = ""
    """The name of the op in messages, if it differs from the name in the schema."""
    kinds: bool = True
    """Whether values of another type raise torchkiln's errors. Bindings made with pybind11 raise
    pybind11's errors."""


def kinds_of(overload: Any) -> dict[str, str]:
    """The type of each argument as the schema writes it: ``Tensor?``, ``int[1]``."""
    arguments = str(overload._schema).partition("(")[2].partition(") -> ")[0]
    without_aliases = re.sub(r"\(\w+!?\)", "", arguments)
    return {name: kind for kind, name in re.findall(r"([\w\[\]?]+) (\w+)", without_aliases)}


@dataclass(frozen=True)
class GoodCall:
    """A valid call, from which refused calls are made by changing arguments."""

    overload: Any
    """The op in ``torch.ops``."""
    sample: Sample
    called: str = ""
    """The name of the op in messages, as in :class:`Refusals`."""

    def position(self, name: str) -> int | None:
        """The position of an argument; None if it is a keyword argument or missing."""
        at = list(kinds_of(self.overload)).index(name)
        return at if at < len(self.sample.args) else None

    def __getitem__(self, name: str) -> Any:
        """The value of an argument; None if the sample does not have it."""
        at = self.position(name)
        return self.sample.kwargs.get(name) if at is None else self.sample.args[at]

    def replaced(self, changes: Mapping[str, Any]) -> Sample:
        """The call with other arguments, each at its position or by keyword."""
        call = self.sample
        for name, value in changes.items():
            at = self.position(name)
            if at is None:
                call = replace(call, kwargs={**call.kwargs, name: value})
            else:
                call = call.substitute(at, value)
        return call

    def changed(
        self, message: str, error: type[Exception] = RuntimeError, /, **changes: Any
    ) -> Invalid:
        """The call with other arguments, which is refused with exactly this message."""
        namespace, _, op = self.overload._schema.name.partition("::")
        call = self.replaced(changes)
        words = re.escape(f"{namespace}.{self.called or op}: {message}").replace(r"\ ", " ")
        return Invalid(message, call.args, error, words, call.kwargs)

    def cast(self, dtype: torch.dtype) -> GoodCall:
        """The call with all floating point tensors in ``dtype``."""
        call = self.sample.map(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return replace(self, sample=call)


class Deriver:
    """Derives the refused calls of one spec."""

    def __init__(self, spec: OpSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.rules = spec.refusals or Refusals()
        self.kinds = kinds_of(spec.overload)
        self.samples: list[Sample] = []
        self.more = spec.samples(device, spec.dtypes[0])
        tensors = [name for name, kind in self.kinds.items() if kind.startswith("Tensor")]
        self.tensors = [name for name in tensors if "[" not in self.kinds[name]]
        self.first = self.rules.first or self.tensors[0]

    def good(self, name: str) -> GoodCall | None:
        """The first sample with a tensor for this argument; None if no sample has one."""
        known = 0
        while True:
            if known == len(self.samples):
                sample = next(self.more, None)
                if sample is None:
                    return None
                self.samples.append(sample)
            call = GoodCall(self.spec.overload, self.samples[known], self.rules.called)
            if isinstance(call[name], Tensor):
                return call
            known += 1

    def calls(self) -> Iterator[Invalid]:
        """All derived calls."""
        for name, kind in self.kinds.items():
            if self.rules.kinds:
                yield from self.wrong_kinds(name, kind)
            if kind == "ScalarType?":
                yield from self.wrong_dtype_arguments(name)
        for name in self.tensors:
            good = self.good(name)
            if good is not None:
                yield from self.wrong_places(name, good)
                yield from self.wrong_dtypes(name, good)
                yield from self.wrong_shapes(name, good)
        for name, known in self.rules.words.items():
            words = f"{name}: got 'unknown', expected one of {', '.join(known)}"
            yield self.typical().changed(words, ValueError, **{name: "unknown"})
        for name, of in self.rules.dims.items():
            yield from self.wrong_dims(name, of)

    def typical(self) -> GoodCall:
        """The first sample that has the op's first tensor argument."""
        good = self.good(self.tensors[0])
        if good is None:
            raise ValueError(f"{self.spec.name}: got no sample with {self.tensors[0]}")
        return good

    def wrong_kinds(self, name: str, kind: str) -> Iterator[Invalid]:
        """Calls with values of other Python types than the schema's."""
        expected, values = KINDS.get(kind.replace("[1]", "[]"), ("", ()))
        good = (self.good(name) if name in self.tensors else None) or self.typical()
        for value in values:
            item = value[0] if isinstance(value, (tuple, list)) else value
            words = f"{name}: got {type(item).__name__}, expected {expected}"
            if name not in self.rules.numbers:
                yield good.changed(words, TypeError, **{name: value})
            elif value is None:
                # torch.ops passes None on as an undefined tensor, but refuses numbers.
                call = good.changed(words, TypeError, **{name: value})
                yield replace(call, message=f"{call.message}( or a number)?")
            elif not isinstance(value, float):
                yield good.changed(f"{words} or a number", TypeError, **{name: value})

    def wrong_dtype_arguments(self, name: str) -> Iterator[Invalid]:
        """Calls with dtypes that a result cannot have."""
        for dtype in self.refused_dtypes():
            words = f"{name}: got {name_of(dtype)}, {self.known_dtypes()}"
            yield self.typical().changed(words, **{name: dtype})

    def refused_dtypes(self) -> Iterator[torch.dtype]:
        """Dtypes that the op does not accept."""
        for dtype in NOT_FLOATING:
            if dtype.is_complex or not self.rules.integers:
                yield dtype

    def known_dtypes(self) -> str:
        """The dtypes that the op accepts, as messages name them."""
        return f"{KNOWN_DTYPES}, an integer dtype or bool" if self.rules.integers else KNOWN_DTYPES

    def wrong_places(self, name: str, good: GoodCall) -> Iterator[Invalid]:
        """Calls with a tensor in a sparse layout, and with a tensor on another device."""
        tensor = good[name].detach()
        yield good.changed(f"{name}: {SPARSE}", **{name: tensor.to_sparse()})
        if name == self.first:
            return
        here = good[self.first].device
        for device in ("meta", *(["cpu"] if self.device.type != "cpu" else [])):
            words = f"{name}: got device {device}, expected {here}, the device of {self.first}"
            yield good.changed(words, **{name: tensor.to(device)})

    def wrong_dtypes(self, name: str, good: GoodCall) -> Iterator[Invalid]:
        """Calls with dtypes that have no kernels, or that another argument does not allow."""
        rules = self.rules
        same = {**rules.like, **rules.dtypes}
        if name == self.tensors[0] and not rules.promotes:
            together = [name, *(other for other, of in same.items() if of == name)]
            for dtype in self.refused_dtypes():
                words = f"{name}: got dtype {name_of(dtype)}, {self.known_dtypes()}"
                found = {n: good[n].detach().to(dtype) for n in together if good[n] is not None}
                yield replace(good.changed(words, **found), advises=True)
        of = same.get(name)
        for dtype, beside in PAIRS if of is not None else ():
            words = f"{name}: got dtype {name_of(dtype)}, expected {name_of(beside)}"
            changed = {name: good[name].detach().to(dtype)}
            if name in rules.mixes and dtype.is_floating_point:
                continue
            if beside in self.spec.dtypes:
                refused = good.cast(beside).changed(f"{words}, the dtype of {of}", **changed)
                yield replace(refused, advises=True)
        of = rules.parameters.get(name)
        for dtype, beside in PAIRS if of is not None else ():
            is_half = beside in (torch.float16, torch.bfloat16)
            if beside in self.spec.dtypes and not (is_half and dtype == torch.float32):
                words = f"{name}: got dtype {name_of(dtype)}, expected {name_of(beside)}"
                words = f"{words}, the dtype of {of}{', or float32' if is_half else ''}"
                changed = {name: good[name].detach().to(dtype)}
                yield good.cast(beside).changed(words, **changed)

    def wrong_shapes(self, name: str, good: GoodCall) -> Iterator[Invalid]:
        """Calls with shapes of other sizes, of sizes that would broadcast, and of other ranks."""
        of = self.rules.like.get(name)
        words = self.rules.shapes.get(name) or (f"the shape of {of}" if of else None)
        if words is None:
            return
        tensor = good[name].detach()
        right = list(tensor.shape)
        others = (
            tensor[:-1],
            tensor[:1],
            tensor[..., :1],
            tensor[0],
            tensor[None],
            tensor[..., None],
        )
        for shape, other in {tuple(other.shape): other for other in others}.items():
            said = f"{name}: got shape {list(shape)}, expected {right}, {words}"
            yield replace(good.changed(said, **{name: other}), advises=True)

    def wrong_dims(self, name: str, of: str) -> Iterator[Invalid]:
        """Calls with dimensions that the tensor does not have."""
        good = self.typical()
        tensor = good[of].detach()
        rank = tensor.dim()
        for value, x in ((rank, tensor), (-rank - 1, tensor), (1, tensor[(0,) * rank])):
            most = max(x.dim(), 1)
            words = f"expected a number from {-most} to {most - 1}: {of} has {x.dim()} dimensions"
            is_second = "[" in self.kinds[name] and value < 0
            given = {name: (0, value) if is_second else value, of: x}
            yield good.changed(f"{name}: got {value}, {words}", IndexError, **given)


PAIRS = (
    (torch.float64, torch.float32),
    (torch.float16, torch.float32),
    (torch.int64, torch.float32),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float64),
)
"""Pairs of dtypes of two arguments that must be refused."""


def refused_calls(spec: OpSpec, device: torch.device) -> Iterator[Invalid]:
    """All calls that an op must refuse: derived calls, then the calls of the spec."""
    if spec.refusals is not None or spec.invalid is None:
        yield from Deriver(spec, device).calls()
    if spec.invalid is not None:
        yield from spec.invalid(device)
