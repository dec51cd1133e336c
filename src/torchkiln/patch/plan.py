"""The parts of a replacement: a plan, a match, and the new class of a module."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import warnings
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln.patch.report import Replacement
from torchkiln.patch.source.code import with_class_wrapper

SAVED: dict[str, type[Plan]] = {}
"""The classes of plans by their names in pickles."""


class Plan(ABC):
    """Another forward for the modules of one formula; a frozen dataclass."""

    kind: ClassVar[str]
    takes_options: ClassVar[bool] = False
    """Whether the new forward takes keyword arguments."""
    rounds_alike: ClassVar[bool] = True
    """Whether the op rounds large tensors in the same way as the small ones of a comparison."""
    is_timed: ClassVar[bool] = True
    """Whether the time of the new forward shows if the module's call is repeated outside of the
    model."""
    saved_as: ClassVar[str]
    """The name of the class in pickles."""
    version: ClassVar[int] = 1
    """Version of the settings in pickles; increased when their meaning changes."""

    def __init_subclass__(cls) -> None:
        if "saved_as" in vars(cls):
            SAVED[cls.saved_as] = cls

    def settings(self) -> dict[str, Any]:
        """The fields, for pickles: without classes of torchkiln."""
        fields = [field for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields}

    @classmethod
    def loaded(cls, settings: dict[str, Any]) -> Plan:
        """The plan with these settings from a pickle."""
        return cls(**settings)

    @abstractmethod
    def __str__(self) -> str:
        """The call that the new forward makes, for the report."""

    @abstractmethod
    def forward(self, module: Any, *args: Any, **options: Any) -> Any:
        """Computes the new forward of a module."""

    def class_name(self, original: type[nn.Module]) -> str:
        """The name of the class with the new forward."""
        return f"Kiln{original.__name__}"

    def fits(self, _: Any, *__: Any) -> bool:
        """Whether the op takes this call; the original forward runs otherwise."""
        return True

    def takes_quantized(self, _: Any, __: Tensor, ___: int | str | None) -> bool:
        """Whether a call of the module takes the result of ``quantize(x)`` in place of ``x``.

        The last argument is the place of x: None if x is the only argument, a position, or a name.
        """
        return False

    def stays(self, *_: Any) -> bool:
        """Whether to use the op while ``torch.compile`` records a call.

        The original forward runs where Inductor's code of torch's ops was measured to be as fast.
        """
        return True

    def light(self) -> Plan:
        """A plan that saves fewer tensors, because backward computes them again; else this plan."""
        return self

    def entry(self) -> Callable[..., Any]:
        """The new forward as a function of the module and its arguments."""
        return self.forward

    def method(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the class, which calls the forward of the plan or of ``original``."""
        fits, run, takes_options = self.fits, self.entry(), self.takes_options
        stays, always = self.stays, type(self).stays is Plan.stays

        @functools.wraps(original.forward, updated=())
        def forward(module: nn.Module, /, *args: Any, **options: Any) -> Any:
            if not always and is_compiling() and not stays(*args):
                return original.forward(module, *args, **options)
            if not options:
                if len(args) == 1:  # most calls have one argument: avoids a tuple and a dict
                    (x,) = args
                    if fits(module, x):
                        return run(module, x)
                elif fits(module, *args):
                    return run(module, *args)
            elif takes_options and fits(module, *args):
                return run(module, *args, **options)
            return original.forward(module, *args, **options)

        return with_class_wrapper(original, forward)


@dataclass(frozen=True)
class Match:
    """A plan for a module, with inputs to compare the old and the new forward."""

    plan: Plan
    copy: nn.Module
    """The module with random parameters, in float64."""
    inputs: tuple[Tensor, ...]
    """First arguments for separate calls, in float64."""
    others: tuple[Tensor, ...] = ()
    """Further arguments of each call, in float64."""


class Candidate(NamedTuple):
    """A module that can get a plan, and its rows in the report."""

    rows: tuple[Replacement, ...]
    module: nn.Module
    plan: Plan


Found = Match | str | None
"""A match, or the reason to leave the module unchanged, or None for a module of another kind."""


def plan_of(module: Any) -> Plan | None:
    """The plan whose forward a module runs; None if another forward replaces it."""
    cls = type(module)
    is_made = getattr(cls, "_kiln_class", None) is cls and "forward" not in module.__dict__
    return cls._kiln_plan if is_made else None


MADE: dict[tuple[type[nn.Module], Plan], type[nn.Module]] = {}


def made_class(original: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """The subclass of ``original`` with the forward of ``plan``, made once."""
    key = (original, plan)
    if key not in MADE:
        MADE[key] = make_class(original, plan)
    return MADE[key]


def make_class(original: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """A new subclass of ``original`` with the forward of ``plan``.

    ``__init_subclass__`` and the metaclass do not run for it, because they may register classes.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        """Pickles and copies store the original class and the plan: the made class is in no module.

        Classes with their own way to make instances, and subclasses of the made class, keep that
        way.
        """
        parts = original.__reduce_ex__(self, protocol)
        assert isinstance(parts, tuple)  # a string would name a global
        if type(self) is not made or parts[0] not in NEW:
            return parts
        given = parts[1][1:] if parts[0] is NEW[0] else ()
        saved = (original, plan.saved_as, plan.version, plan.settings(), *given)
        return (_restore, saved, *parts[2:])

    scope = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "forward": plan.method(original),
        "__reduce_ex__": reduce,
        "_kiln_plan": plan,
    }
    made = unseen_subclass(original, plan.class_name(original), scope)
    type.__setattr__(made, "_kiln_class", made)
    return made


def unseen_subclass(original: type[nn.Module], name: str, scope: dict[str, Any]) -> type[nn.Module]:
    """A subclass that is made without a call of ``__init_subclass__`` or the metaclass."""
    metaclass: Any = type(original)
    maker: Any = ABCMeta if issubclass(metaclass, ABCMeta) else type
    made: Any = maker.__new__(metaclass, name, (Unseen,), scope)
    type.__setattr__(made, "__bases__", (original,))
    found: type[nn.Module] = made
    return found


class Unseen(nn.Module):
    """A temporary base of a new class, so that ``original.__init_subclass__`` does not run."""


NEW = (copyreg.__newobj__, copyreg._reconstructor)  # type: ignore[attr-defined]
"""Functions by which pickle makes instances of ordinary classes, in new and in old protocols."""


def _restore(
    original: type[nn.Module], name: str, version: int, settings: dict[str, Any], *given: Any
) -> nn.Module:
    """An empty module to unpickle into, of the made class; of ``original`` if the plan is unusable.

    ``given`` are the arguments of ``__new__``.
    """
    kind = SAVED.get(name)
    try:
        if kind is None or kind.version != version:
            found = "no such plan" if kind is None else f"version {kind.version}"
            raise ValueError(f"this torchkiln has {found}")
        cls = made_class(original, kind.loaded(settings))
    except Exception as error:  # other versions' settings may raise any error
        warnings.warn(
            f"torchkiln.replace: {original.__qualname__}: got a pickle with the replacement "
            f"{name!r} of version {version}, which cannot be restored ({error}), so the forward of "
            "the class runs; call torchkiln.replace again",
            stacklevel=2,
        )
        cls = original
    return cls.__new__(cls, *given)


_restore.__module__ = "torchkiln.patch"  # the path that pickles store
