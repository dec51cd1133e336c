"""Forms of an op: functions that write its results into tensors of the caller.

A spec lists its forms in ``forms``. The contract of a form consists of the checks of the op that
apply to the form, and of the check ``written``::

    RELU = with_forms(RELU, in_place(torchkiln.relu_))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.testing.compare import outputs
from torchkiln.testing.derive import overload_of
from torchkiln.testing.refusals import Refusals

if TYPE_CHECKING:
    from torchkiln.testing.data import Placed
    from torchkiln.testing.sample import Invalid, Result, Sample
    from torchkiln.testing.spec import OpSpec

    Make = Callable[["OpSpec"], "OpSpec"]

Given = Mapping[str, Any]
"""The arguments of a call by name."""
Target = Callable[[Given], Tensor]

NO_BATCHES = "torch has no batching rule for ops that write into their arguments"
COLLECTIVES = "every process runs each collective once: reverse mode and first derivatives"
COMPUTED_SIZES = "torch.compile fails for two calls of an autograd.Function with computed sizes"
TRANSFORMS = ("vmap", "func_grad", "vmap_of_grad", "func_jvp", "forward_mode")
"""The checks of torch.func and of forward mode."""
NOT_SHARDED = "the check compares the shards of results that a call returns"
DENSE = ("contiguous", "offset by one element")


@dataclass(frozen=True)
class OnCopies:
    """Wraps a function that writes into tensors: returns results and changes no argument."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    targets: Mapping[str, Target | None]
    copied: torch.memory_format

    def __call__(self, /, *args: Any, **kwargs: Any) -> Result:
        """Call the function with copies of arguments and with new tensors."""
        given = self.with_targets({**dict(zip(self.names, args, strict=False)), **kwargs})
        return self.results(self.function(**given), given)

    def with_targets(self, given: Given) -> dict[str, Any]:
        """The arguments, with tensors into which the call may write."""
        made = dict(given)
        for name, make in self.targets.items():
            value = given.get(name)
            if make is not None:
                made[name] = make(given)
            # the op raises an error for other values
            elif isinstance(value, Tensor) and value.layout == torch.strided:
                made[name] = value.clone(memory_format=self.copied)
        return made

    def results(self, found: Any, given: Given) -> Result:
        """Returned tensors that are no targets, then the targets."""
        targets = [given[name] for name in self.targets]
        returned = () if found is None else outputs(found)
        new = [y for y in returned if not any(y is target for target in targets)]
        every = (*new, *targets)
        return every[0] if len(every) == 1 else every


@dataclass(frozen=True)
class Written:
    """A function that writes its results into tensors of the caller."""

    function: Callable[..., Any]
    """The public function. It takes the arguments of its schema by keyword."""
    overload: torch._ops.OpOverload[..., Any]
    """The same op in ``torch.ops``."""
    targets: Mapping[str, Target | None]
    """The arguments that are written. The value is None for an argument of the op, else a function
    that makes the tensor from the other arguments."""
    plain: Callable[..., Any] | None = None
    """The op that returns the same bits; None if there is none."""
    layouts: tuple[str, ...] = DENSE
    """Names of the layouts that a target may have; empty for all layouts without shared memory."""
    statistics: bool = False
    """Whether the targets are running statistics. As in torch's batch norm, autograd does not count
    their writes, and tensors whose elements share memory are not refused."""
    names: tuple[str, ...] = ()
    """The names of all arguments, which :func:`form_of` takes from the schema."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of arguments that are optional in the function but not in ``torch.ops``, besides those
    that are optional in the op."""

    def on_copies(self, function: Callable[..., Any] | None = None) -> OnCopies:
        """The function, or another with the same arguments, as :class:`OnCopies`."""
        form = torch.contiguous_format if self.layouts else torch.preserve_format
        return OnCopies(function or self.function, self.names, self.targets, form)

    def ways(self) -> dict[str, Callable[..., Any]]:
        """Both entry points, which take arguments by keyword."""
        return {"the function": self.function, "torch.ops": self.through_ops}

    def through_ops(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op in ``torch.ops``."""
        given = dict(zip(self.names, args, strict=False))
        return self.overload(**{**self.defaults, **given, **kwargs})

    def given(self, sample: Sample) -> dict[str, Any]:
        """The arguments of a call by name, with copies and new tensors for the targets."""
        named = {**dict(zip(self.names, sample.args, strict=False)), **sample.kwargs}
        return self.on_copies().with_targets(named)

    def takes(self, placed: Placed) -> bool:
        """Whether a target may have these strides."""
        return placed.name in self.layouts if self.layouts else "expanded" not in placed.name


def form_of(
    parent: OpSpec,
    written: Written,
    *,
    called: str = "",
    kinds: bool = True,
    words: Mapping[str, Sequence[str]] | None = None,
    **changes: Any,
) -> OpSpec:
    """The contract of a form: the spec of the op with another function and without a module.

    Args:
        parent: the spec of the op.
        written: the function of the form.
        called: the name in messages, if it differs from the name in ``torch.ops``.
        kinds: whether the function itself refuses values of other kinds, and not ``torch.ops``.
        words: replaces the ``words`` of the refusals.
        changes: other fields of the spec.
    """
    name = written.overload._schema.name.partition("::")[2]
    known = {a.name: a for a in parent.overload._schema.arguments}
    names = tuple(argument.name for argument in written.overload._schema.arguments)
    optional = [known[name] for name in names if name in known]
    defaults = {a.name: a.default_value for a in optional if a.has_default_value()}
    written = replace(written, names=names, defaults={**defaults, **written.defaults})
    rules = replace(parent.refusals or Refusals(), called=called or name, kinds=kinds)
    rules = rules if words is None else replace(rules, words=words)
    excluded = {"sharding": NOT_SHARDED}
    if not changes.get("differentiable"):
        excluded["vmap"] = NO_BATCHES
    fields: dict[str, Any] = {
        "name": name,
        "op": written.on_copies(),
        "overload": written.overload,
        "written": written,
        "refusals": rules,
        "invalid": parent.invalid and Renamed(parent, called or name),
        "differentiable": (),
        "helpers": (),
        "module": None,
        "bench_variants": None,
        "large": None,
        "forms": (),
        "excluded": {**excluded, **parent.excluded},
    }
    return replace(parent, **{**fields, **changes})


@dataclass(frozen=True)
class Renamed:
    """The invalid calls of an op, with another name in the messages."""

    parent: OpSpec
    called: str

    def __call__(self, device: torch.device) -> Iterator[Invalid]:
        """The invalid calls, whose messages have the other name."""
        assert self.parent.invalid is not None
        for case in self.parent.invalid(device):
            words = case.message.replace(f".{self.parent.name}: ", f".{self.called}: ")
            yield replace(case, message=words)


def in_place(function: Callable[..., Tensor]) -> Make:
    """The form of an op with gradients that writes its result into its first argument."""

    def make(parent: OpSpec) -> OpSpec:
        written = Written(
            function,
            overload_of(function, function.__name__),
            {parent.overload._schema.arguments[0].name: None},
            plain=parent.op,
            layouts=(),
        )
        return form_of(parent, written, differentiable=parent.differentiable)

    return make


def with_forms(parent: OpSpec, *forms: Make | OpSpec) -> OpSpec:
    """The spec of an op with the specs of its forms."""
    made = (form(parent) if callable(form) else form for form in forms)
    return replace(parent, forms=tuple(made))
