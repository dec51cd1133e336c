"""What one op promises, in a form that checks, benchmarks and documents are generated from."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Result = Tensor | tuple[Tensor, ...]
"""What an op returns."""

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class SpecError(ValueError):
    """Specs that are incomplete or contradict themselves: a line for each field."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"torchkiln.testing: {line}" for line in self.problems))


@dataclass(frozen=True)
class Sample:
    """One named call. What is a tensor in every call is a positional argument.

    Tensors among the keywords (masks, weights) go where the others go, but only the positional ones
    are laid out anew, differentiated and traced as inputs.

    An op that draws random numbers has a ``seed`` in its samples: every call of such a sample
    starts torch's generators from it, so that the op and its reference draw the same numbers.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the tensors stand among the positional arguments."""
        return tuple(i for i, value in enumerate(self.args) if isinstance(value, Tensor))

    @property
    def numel(self) -> int:
        """Elements of the largest tensor."""
        return max(int(self.args[i].numel()) for i in self.positions)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """The same call with ``function`` applied to every tensor."""
        args = tuple(function(a) if isinstance(a, Tensor) else a for a in self.args)
        kwargs = {k: function(a) if isinstance(a, Tensor) else a for k, a in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def substitute(self, position: int, value: Any, suffix: str = "") -> Sample:
        """The same call with the argument at ``position`` exchanged."""
        args = (*self.args[:position], value, *self.args[position + 1 :])
        return replace(self, name=self.name + suffix, args=args)

    def start_generators(self) -> None:
        """Put torch's generators where the call expects them."""
        if self.seed is not None:
            torch.manual_seed(self.seed)

    def call(self, function: Callable[..., Any]) -> Any:
        """Make the call."""
        self.start_generators()
        return function(*self.args, **self.kwargs)

    def bind(self, function: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
        """``function`` of the arguments at ``positions`` alone; all else is the sample's."""

        def bound(*values: Any) -> Any:
            call = self
            for position, value in zip(positions, values, strict=True):
                call = call.substitute(position, value)
            return call.call(function)

        return bound

    def take(self, positions: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments at ``positions``."""
        return tuple(self.args[i] for i in positions)


@dataclass(frozen=True)
class Invalid:
    """One call that must be refused, with the kind of error and a pattern of its message."""

    name: str
    args: tuple[Any, ...]
    error: type[Exception]
    message: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """The least an op has to move and compute; the denominator of every roofline figure."""

    bytes: int
    operations: int


def doubled(sample: Sample) -> Sample:
    """The call with every size other than 1 doubled, so that equal sizes stay equal."""
    return sample.map(lambda t: t.repeat([1 if n == 1 else 2 for n in t.shape]))


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The contract of one op.

    The first sample that ``inputs`` yields is the typical case: checks that need only one
    (export, vmap, CUDA graphs) take it, so it has at least two rows and fits in a few kilobytes.
    """

    name: str
    """The name in the op namespace and in messages."""
    op: Callable[..., Any]
    """The public Python function. It returns a tensor or a tuple of tensors; so do the functions
    below, which stand for it."""
    overload: torch._ops.OpOverload[..., Any]
    """The same op as torch.ops reaches it."""
    reference: Callable[..., Any]
    """Plain torch; it is the truth when it is given float64 tensors."""
    composite: Callable[..., Any]
    """What a user would write in eager torch, in the dtype at hand."""
    magnitude: Callable[..., Any]
    """The sum of the absolute values of the terms of each output element: rounding inside the op
    is proportional to it even where the terms cancel."""
    inputs: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    """Valid calls of every shape that takes a path of its own."""
    invalid: Callable[[torch.device], Iterable[Invalid]]
    """Calls that must be refused."""
    bench: Callable[[torch.device, torch.dtype, tuple[int, int]], Sample]
    """A call of the given rows and columns, for timing."""
    large: Callable[[torch.device], Sample] | None
    """A call whose output has more than 2**31 elements and as many rows as its arguments; None
    where an op has no such output, and a test of its own for many elements."""
    traffic: Callable[[Sample], Traffic]
    """Bytes and operations of the forward of a call."""
    backward_traffic: Callable[[Sample], Traffic]
    """Bytes and operations of the backward of a call."""
    differentiable: tuple[int, ...]
    """Positions of the arguments that have gradients."""
    gradient_magnitude: Callable[..., Any] | None = None
    """A function whose gradients are the sums of the absolute values of the terms of each gradient;
    none where the terms of one have one sign, and the gradients of the reference do."""
    output_sensitivity: Callable[..., Any] | None = None
    """For an op whose backward starts from its rounded output, as torch's does: a function whose
    gradients say how far each gradient moves with the relative error of that output."""
    indices: tuple[int, ...] = ()
    """Positions of arguments whose integers are no numbers: no check converts them."""
    grown: Callable[[Sample], Sample] = doubled
    """A call of larger sizes, all of which a graph with dynamic sizes has to serve."""
    bench_variants: (
        Callable[[torch.device, torch.dtype, tuple[int, int]], Iterable[tuple[str, Sample]]] | None
    ) = None
    """Labels and calls that are timed beside that of ``bench``."""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    autocast: tuple[int, ...] = ()
    """Positions that autocast converts; none means that the op follows its inputs."""
    bench_shapes: tuple[tuple[int, int], ...] = ()
    """Rows and columns that a GPU is timed with; none where the benchmark's own will do."""
    small_shapes: tuple[tuple[int, int], ...] = ()
    """The same for calls that do not fill a GPU."""
    opaque: bool | None = None
    """Whether a graph of torch.compile holds the op, or ATen's ops that Inductor fuses; None where
    the spec promises neither."""
    helpers: tuple[str, ...] = ()
    """Ops in the same namespace that exist for this one (its backward) and have no spec."""
    waits_for: tuple[str, ...] = ()
    """Arguments by which a caller asks for something that makes the host wait for the device."""
    inplace: Callable[..., Tensor] | None = None
    """The public Python function that writes its result into the first argument."""
    inplace_overload: torch._ops.OpOverload[..., Any] | None = None
    """The same op as torch.ops reaches it."""
    module: Callable[[torch.device, torch.dtype], nn.Module] | None = None
    """A module around the op, with parameters that are not all zero."""
    module_inputs: Callable[[torch.device, torch.dtype], tuple[Tensor, ...]] | None = None
    """What the module is called with."""
    threads_matter: bool = False
    """Whether the last bits of a result depend on the number of threads on the CPU, as those of
    torch's products do. From run to run they must not."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Checks that cannot hold for this op, and why. A case of one is made, and says it when run."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """An error that names the op where a field is missing; a copy is made of nothing."""
        required = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]
        missing = [name for name in required[len(args) :] if name not in given]
        if given and missing:
            name = given.get("name", "a spec without a name")
            raise SpecError([f"{name}: {field}: missing" for field in missing])
        return super().__new__(cls)

    def samples(
        self, device: torch.device, dtype: torch.dtype, requires_grad: bool = False
    ) -> Iterator[Sample]:
        """Valid calls; with ``requires_grad`` their differentiable arguments are leaves."""
        for sample in self.inputs(device, dtype):
            yield self.leaves(sample) if requires_grad else sample

    def typical(
        self, device: torch.device, dtype: torch.dtype, requires_grad: bool = False
    ) -> Sample:
        """The first sample."""
        return next(self.samples(device, dtype, requires_grad))

    def leaves(self, sample: Sample, only: tuple[int, ...] | None = None) -> Sample:
        """The call on detached tensors of the same strides, where ``only`` require gradients."""
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
