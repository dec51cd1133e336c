"""The forward of a model of images with its activations in ``channels_last``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only

from torchkiln.ops._folding import PLAIN, is_transformed
from torchkiln.patch.formula.reads import Reads
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.graph.definitions import Ran
from torchkiln.patch.graph.flat import flat_trace, is_leaf
from torchkiln.patch.graph.strides import why_not_free
from torchkiln.patch.graph.unchanged import Children, is_unchanged
from torchkiln.patch.plan import SAVED, Plan
from torchkiln.patch.probe import usual_modes


def strides_of(shape: Iterable[int]) -> tuple[int, ...]:
    """The strides of a new contiguous tensor, also in dimensions of size 1."""
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_in_order(x: Tensor) -> bool:
    """Whether a tensor has these strides; ``is_contiguous()`` ignores dimensions of size 1."""
    return x.is_contiguous() and x.stride() == strides_of(x.shape)


def in_order(x: Tensor) -> Tensor:
    """A tensor with these strides: a copy, if it has others."""
    return x if is_in_order(x) else x.clone(memory_format=torch.contiguous_format)


class Converted(torch.autograd.Function):
    """A tensor in ``channels_last``, whose gradient is contiguous, as without."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The copy."""
        return x.clone(memory_format=torch.channels_last)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        """The gradient of the tensor."""
        return in_order(grad)


def converted(x: Tensor) -> Tensor:
    """A contiguous tensor in ``channels_last``."""
    if x.requires_grad and torch.is_grad_enabled():
        y: Tensor = Converted.apply(x)  # type: ignore[no-untyped-call]
        return y
    return x.contiguous(memory_format=torch.channels_last)


def given_back(result: Any) -> Any:
    """A result as the original forward returns it."""
    if isinstance(result, Tensor):
        return in_order(result)
    return tree_map_only(Tensor, in_order, result)


def is_image(x: Any) -> bool:
    """Whether a value is a contiguous tensor of four dimensions."""
    return type(x) is Tensor and x.dim() == 4 and x.is_floating_point() and is_in_order(x)


@dataclass(frozen=True)
class ChannelsLast(Plan):
    """The forward of a module, or of another plan, with images in ``channels_last``."""

    kind: ClassVar[str] = "channels_last"
    saved_as: ClassVar[str] = "channels_last"

    places: tuple[int, ...]
    """The arguments that are images."""
    count: int
    """The number of arguments of the forward."""
    reads: Reads
    """The attributes that the model's forwards read, and the classes of its modules."""
    children: Children
    ran: Ran
    """The functions that the model's forwards run."""
    inner: Plan | None = None
    """The plan of the module."""

    def settings(self) -> dict[str, Any]:
        """The fields. Of the inner plan its name, version and settings are stored."""
        inner = self.inner
        saved = inner and (inner.saved_as, inner.version, inner.settings())
        return {**super().settings(), "reads": self.reads.settings(), "inner": saved}

    @classmethod
    def loaded(cls, settings: dict[str, Any]) -> Plan:
        """The plan with these settings from a pickle."""
        inner = None
        if settings["inner"] is not None:
            name, version, own = settings["inner"]
            if SAVED[name].version != version:
                raise ValueError(f"this torchkiln has version {SAVED[name].version} of {name!r}")
            inner = SAVED[name].loaded(own)
        reads = Reads.loaded(settings["reads"])
        return super().loaded({**settings, "reads": reads, "inner": inner})

    def __str__(self) -> str:
        return "activations in channels_last"

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the images are plain and contiguous, and the model is the one that was traced."""
        if len(args) != self.count or not all(is_image(args[place]) for place in self.places):
            return False
        return not is_transformed() and is_unchanged(module, self.reads, self.children, self.ran)

    def converted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with images in ``channels_last``."""
        return tuple(converted(x) if at in self.places else x for at, x in enumerate(args))

    def forward(self, module: Any, *args: Any, **options: Any) -> Any:
        """Not called, because :meth:`method` calls the inner forward itself."""
        raise NotImplementedError

    def method(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the class: converts arguments, calls the inner forward, converts back."""
        made = self.inner and self.inner.method(original)
        fits, convert = self.fits, self.converted

        @functools.wraps(original.forward, updated=())
        def forward(module: nn.Module, /, *args: Any, **options: Any) -> Any:
            inner = made or original.forward  # read in each call: it may be replaced
            if options or is_compiling() or not fits(module, *args):
                return inner(module, *args, **options)
            return given_back(inner(module, *convert(args)))

        return forward


def find(module: nn.Module, args: tuple[Any, ...]) -> ChannelsLast:
    """The plan of a module that is called with these arguments; raises NoFormulaError."""
    places = tuple(at for at, x in enumerate(args) if is_image(x))
    if not places:
        raise NoFormulaError("its arguments are no contiguous images")
    if any(type(x) not in PLAIN for x in (*module.parameters(), *module.buffers())):
        raise NoFormulaError("its parameters are tensors of another class")
    with usual_modes():
        trace = flat_trace(module, len(args))
    for graph in trace.graphs:
        if reason := why_not_free(trace.root, graph, places):
            raise NoFormulaError(reason)
    children = tuple(
        (path, tuple(part._modules)) for path, part in module.named_modules() if not is_leaf(part)
    )
    return ChannelsLast(places, len(args), trace.reads, children, trace.ran)
