"""The contract of one op, from which checks, benchmarks and documents are generated.

A spec requires the function (``op``), its truth (``reference``, ``magnitude``) and its samples
(``inputs``). The following fields have defaults, which are derived from the schema of the op and
from the samples:

- ``name``: the name of the function. ``overload``: that of a ``torch.library.custom_op`` or of an
  op in ``torch.ops``; for a function ``torch.ops.<package>.<name>.default``, where <package> is
  the package of the function.
- ``composite``: the reference. ``differentiable``: all tensors that are positional arguments.
- **Refused calls**: values of other kinds for each argument, a sparse layout and another device for
  each tensor, and dtypes other than floating point for the first tensor. ``refusals`` states how
  arguments depend on each other, as in ``Refusals(like={"up": "gate"})``; wrong dtypes and shapes
  are derived from it. ``invalid`` adds calls that are specific to the op. ``invalid`` without
  ``refusals`` replaces the derived calls, for ops with other messages.
- ``traffic``: reads all tensors of the call, writes its outputs. ``backward_traffic``: reads all
  tensors and the incoming gradients, writes the gradients. Sizes of outputs come from a call on the
  meta device. ``operations`` is a number per element of the first output, or a function of the
  sample. An op that moves fewer bytes needs a function of the sample that returns :class:`Traffic`.
- ``bench``: the typical sample with the rows and columns to be timed. Its first tensor must be a
  matrix, and the sizes of the others must be its rows, its columns or 1. An op with integer
  tensors, sequences of sizes or other sizes needs a function.
- ``large``: the typical sample with more than 2**31 elements; ``large=None`` if no output of the op
  is as large as the first tensor.
- ``module_inputs``: the tensors of the typical sample, except those that are parameters of the
  module. :func:`torchkiln.testing.layer` makes ``module`` from a class.

``dataclasses.replace`` keeps the names, the overloads, ``composite`` and ``differentiable`` of a
spec, and derives the other fields again.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from torchkiln.testing import derive
from torchkiln.testing.refusals import Refusals
from torchkiln.testing.sample import FLOATING, Invalid, Sample, Traffic, doubled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from random import Random

    from torchkiln.testing.forms import Written

    Operations = tuple[int, int] | Callable[[Sample], tuple[int, int]]


CUSTOM_OP_EXCLUDED = dict.fromkeys(
    ("func_grad", "vmap_of_grad"), "torch.library.register_autograd has no torch.func"
) | dict.fromkeys(
    ("func_jvp", "forward_mode", "gradcheck"), "torch.library.register_autograd has no forward mode"
)
"""A value for ``excluded``: the checks that cannot hold for a ``torch.library.custom_op``."""

LEFT_OUT: Any = None
"""The default of a field that is filled in when the spec is made."""


class SpecError(ValueError):
    """Raised for specs that are incomplete or contradict themselves: one line per field."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"torchkiln.testing: {line}" for line in self.problems))


@dataclass(frozen=True)
class Derived:
    """A field that is computed from the other fields of its spec."""

    function: Callable[..., Any]
    spec: OpSpec | None = field(default=None, repr=False)

    def __call__(self, *args: Any) -> Any:
        """The value of the field for these arguments."""
        return self.function(self.spec, *args)


@dataclass(frozen=True, eq=False, kw_only=True)
class OpSpec:
    """The contract of one op.

    The first sample that ``inputs`` yields is the typical sample. Checks that need only one
    (export, vmap, CUDA graphs) use it, so it must have at least two rows and fit in a few
    kilobytes. The docstring of the module lists the fields with derived defaults.
    """

    op: Callable[..., Any]
    """The public Python function, a ``torch.library.custom_op``, or an op in ``torch.ops``. It
    returns a tensor or a tuple of tensors, and so do ``reference``, ``composite`` and
    ``magnitude``."""
    name: str = LEFT_OUT
    """The name in the op namespace and in messages."""
    overload: torch._ops.OpOverload[..., Any] = LEFT_OUT
    """The same op in ``torch.ops``."""
    reference: Callable[..., Any]
    """The formula in plain torch; with float64 tensors it is the truth."""
    composite: Callable[..., Any] = LEFT_OUT
    """The code that a user would write in eager torch, in the dtype of the call."""
    usual: Callable[..., Any] | None = None
    """The code that is timed as the op's peer, if ``composite`` emulates arithmetic that torch does
    not have; None to time ``composite``."""
    magnitude: Callable[..., Any]
    """The sum of the absolute values of the terms of each output element: rounding errors inside
    the op are proportional to this sum even where the terms cancel."""
    inputs: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    """Valid calls, with a shape for each code path."""
    differentiable: tuple[int, ...] = LEFT_OUT
    """Positions of the arguments that have gradients."""
    refusals: Refusals | None = None
    """Dependencies between arguments, from which refused calls are derived."""
    invalid: Callable[[torch.device], Iterable[Invalid]] | None = None
    """Refused calls that are specific to the op; without ``refusals``, all refused calls."""
    bench: Callable[[torch.device, torch.dtype, tuple[int, int]], Sample] = Derived(derive.bench)
    """A call with the given rows and columns, for timing."""
    large: Callable[[torch.device], Sample] | None = Derived(derive.large)
    """A call whose output has more than 2**31 elements and as many rows as its arguments; None for
    an op without such an output, which needs its own test of many elements."""
    operations: Operations = (1, 1)
    """Operations of forward and backward for each element of the first output, or a function that
    counts the operations of a call."""
    traffic: Callable[[Sample], Traffic] = Derived(derive.traffic)
    """Bytes and operations of the forward of a call."""
    backward_traffic: Callable[[Sample], Traffic] = Derived(derive.backward_traffic)
    """Bytes and operations of the backward of a call."""
    gradient_magnitude: Callable[..., Any] | None = None
    """A function whose gradients are, for each gradient, the sum of the absolute values of the
    terms. None if all terms of a gradient have the same sign: the reference's gradients are
    used."""
    output_sensitivity: Callable[..., Any] | None = None
    """A function whose gradients are the change of each gradient per relative error of the output,
    for an op whose backward reads the rounded output, as in torch."""
    intermediate_sensitivity: Callable[..., Any] | None = None
    """The change of each output per relative error of the intermediate results, for an op that
    rounds intermediate results to the dtype of the output."""
    indices: tuple[int, ...] = ()
    """Positions of integer arguments that are indices or masks, which no check converts."""
    grown: Callable[[Sample], Sample] = doubled
    """A call with larger sizes, which a graph with dynamic sizes must support."""
    bench_variants: (
        Callable[[torch.device, torch.dtype, tuple[int, int]], Iterable[tuple[str, Sample]]] | None
    ) = None
    """Labels and calls that are timed in addition to ``bench``."""
    drawn: Callable[[torch.device, torch.dtype, Random, int], Sample] | None = None
    """A random call whose largest tensor has at most the given number of elements, for timing; None
    if ``bench`` with random rows and columns covers the calls of users."""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    composed: bool = False
    """Whether the function calls several ops: ``overload`` is one of them, ``helpers`` lists all.
    ``torch.ops`` then has no op with the arguments of the function."""
    constant: tuple[int, ...] = ()
    """Positions of results that have no gradient, such as counts."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """The kinds of devices that the op has kernels for."""
    timed: tuple[int, ...] | None = None
    """Positions of the arguments whose gradients the benchmark computes; None for all that have
    gradients."""
    autocast: tuple[int, ...] = ()
    """Positions of arguments that autocast converts; empty if it converts none."""
    bench_shapes: tuple[tuple[int, int], ...] = ()
    """Rows and columns for timing on a GPU; empty for the default shapes of the benchmark."""
    small_shapes: tuple[tuple[int, int], ...] = ()
    """Rows and columns of calls that do not fill a GPU; empty for the default shapes."""
    opaque: bool | None = None
    """Whether a graph of torch.compile contains the op (True) or ATen ops that Inductor fuses
    (False); None if the spec promises neither."""
    helpers: tuple[str, ...] = ()
    """Helper ops in the same namespace, such as the backward, which have no spec."""
    gradient_in_forward: bool = False
    """Whether forward computes the gradients if autograd records it, and backward only scales them.
    The benchmark then times forward and backward as one step, for the op and its peers."""
    waits_for: tuple[str, ...] = ()
    """Arguments that make the host wait for the device if they are set."""
    written: Written | None = None
    """For a form: the function that writes its results into tensors of the caller. ``op`` then
    calls this function with copies and new tensors."""
    forms: tuple[OpSpec, ...] = ()
    """Contracts of variants of the op: in place, with ``out=``, into a cache, with more results, or
    for a part of the op. ``torchkiln.testing.forms`` makes them."""
    module: Callable[[torch.device, torch.dtype], nn.Module] | None = None
    """A module around the op, with parameters that are not all zero."""
    module_inputs: Callable[[torch.device, torch.dtype], tuple[Tensor, ...]] | None = Derived(
        derive.module_inputs
    )
    """Arguments of a call of the module."""
    threads_matter: bool = False
    """Whether a result may depend on the number of CPU threads, as in torch's matrix products.
    Results must be equal from run to run in any case."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Checks that cannot hold for this op, each with the reason. Cases of these checks are skipped
    with the reason."""

    def __new__(cls, **given: Any) -> Self:
        """Name the op in errors about missing fields. Copies call this without arguments."""
        required = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]
        missing = [name for name in required if name not in given]
        if given and missing:
            name = given.get("name") or getattr(given.get("op"), "__name__", "a spec")
            raise SpecError([f"{name}: {field}: missing" for field in missing])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Compute the missing fields, and bind derived functions to this spec."""
        for name, find in derive.VALUES.items():
            if getattr(self, name) is LEFT_OUT:
                object.__setattr__(self, name, find(self))
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Derived):
                object.__setattr__(self, name, replace(value, spec=self))

    @property
    def through_ops(self) -> Callable[..., Any] | None:
        """The op in ``torch.ops``, on copies if it writes; None for a composed function."""
        written = self.written
        if self.composed:
            return None
        return self.overload if written is None else written.on_copies(written.through_ops)

    def samples(
        self, device: torch.device, dtype: torch.dtype, requires_grad: bool = False
    ) -> Iterator[Sample]:
        """Valid calls; with ``requires_grad`` their differentiable arguments are leaves."""
        for sample in self.inputs(device, dtype):
            yield self.leaves(sample) if requires_grad else sample

    def typical(
        self, device: torch.device, dtype: torch.dtype, requires_grad: bool = False
    ) -> Sample:
        """The typical sample of the op, which is the first."""
        return next(self.samples(device, dtype, requires_grad))

    def leaves(self, sample: Sample, only: tuple[int, ...] | None = None) -> Sample:
        """The call on detached tensors of equal strides; gradients are required at ``only``."""
        wanted = self.wanted(sample) if only is None else only
        args = tuple(
            a.detach().requires_grad_(i in wanted) if isinstance(a, Tensor) else a
            for i, a in enumerate(sample.args)
        )
        return replace(sample, args=args)

    def wanted(self, sample: Sample) -> tuple[int, ...]:
        """Positions of the arguments of this call that can require a gradient."""
        return tuple(
            i
            for i in self.differentiable
            if i in sample.positions and sample.args[i].is_floating_point()
        )
