"""Batch norms that call an activation in their own forward, such as ``BatchNormAct2d`` of timm.

Such a class is a subclass of torch's batch norm. Its forward is proven to make the calls of torch's
forward and then those of its submodules: identities and at most one activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchkiln.nn.convolution import NORM_OF
from torchkiln.patch.formula.activation import computed
from torchkiln.patch.formula.reads import Reader, Reads, reading
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import Watch
from torchkiln.patch.probe import shallow_copy, usual_modes

RANK_OF = {cls: rank for rank, cls in NORM_OF.items()}
PLAIN: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def plain_norm(norm: nn.Module) -> nn.Module:
    """A module of torch's batch norm that shares all attributes with ``norm``, so also its state.

    It is made once for each module, because a folded convolution belongs to this object.
    """
    known = PLAIN.get(norm)
    if known is None or vars(known) is not vars(norm):
        known = object.__new__(torchs_class(type(norm)))
        known.__dict__ = vars(norm)
        PLAIN[norm] = known
    return known


def torchs_class(cls: type) -> type[_BatchNorm]:
    """The batch norm of torch that a class is derived from; StopIteration if there is none."""
    return next(base for base in cls.__mro__ if base in RANK_OF)


def is_derived(module: nn.Module | None) -> bool:
    """Whether the class of a module is derived from a batch norm of torch, with its own forward."""
    cls: Any = type(module)
    base = next((one for one in cls.__mro__ if one in RANK_OF), None)
    return base is not None and cls is not base and cls.forward is not base.forward


Run = Callable[[Any, Tensor], Tensor]


@dataclass
class Calls(TorchDispatchMode):
    """Records the ops of a forward and the calls of its submodules; tensors are numbered."""

    numbers: dict[int, int] = field(default_factory=dict)
    """The number of each tensor, by its id."""
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors, so that their ids stay theirs."""
    entries: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The submodules, in the order of their calls."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def number(self, tensor: Tensor) -> str:
        """A text that stands for a tensor; both forwards see their tensors in the same order."""
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return f"%{self.numbers[id(tensor)]}"

    def add(self, *entry: Any) -> None:
        """Append an entry, with its tensors as numbers."""
        self.entries.append(tree_map_only(Tensor, self.number, entry))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the arguments have the names that torch gives them
        """Run an op and record it."""
        out = func(*args, **(kwargs or {}))
        self.add(func, args, kwargs or {}, out)
        return out


class Called(nn.Module):
    """Stands for a submodule: records the call."""

    def __init__(self, calls: Calls, name: str) -> None:
        super().__init__()
        self.calls, self.name = calls, name

    def forward(self, x: Tensor) -> Tensor:
        """Return another tensor of the same values."""
        self.calls.names.append(self.name)
        self.calls.add(self.name, x)
        return x.clone()


def calls_of(norm: Any, run: Run, *, training: bool, reader: Reader | None = None) -> Calls:
    """The calls of ``run(copy of norm, x)``; the reader gets the attributes that are read."""
    module, calls = shallow_copy(norm), Calls()
    module.__dict__["training"] = training
    for name in module._modules:
        module._modules[name] = Called(calls, name)
    own = [t for place in (module._parameters, module._buffers) for t in place.values()]
    tensors = [t for t in own if t is not None]
    like = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
    rank = RANK_OF[torchs_class(type(norm))]
    x = like.new_ones((2, int(norm.num_features), *(2,) * (rank - 2)))
    for tensor in (x, *tensors):
        calls.number(tensor)
    if reader is not None:
        object.__setattr__(module, "__class__", reading(type(norm), reader))
    with calls:
        calls.add("result", run(module, x))
    return calls


def torchs_forward(names: Sequence[str]) -> Run:
    """Torch's batch norm, and then the submodules of these names."""

    def run(module: Any, x: Tensor) -> Tensor:
        y: Tensor = torchs_class(type(module)).forward(module, x)
        for name in names:
            y = module.get_submodule(name)(y)
        return y

    return run


@dataclass(frozen=True)
class Inside:
    """The activation in the forward of a batch norm, and the conditions of the proof."""

    act: str
    reads: Reads


def inside(name: str, norm: nn.Module) -> Inside | str:
    """What a derived batch norm computes after torch's, or the reason why this is not known.

    ``name`` is the path of the batch norm in the module that calls it.
    """
    reader, watch = Reader(takes_tensors=True), Watch()
    names: list[str] = []

    def watched(module: Any, x: Tensor) -> Tensor:
        with watch:
            y: Tensor = type(norm).forward(module, x)
        return y

    try:
        with usual_modes():
            for training in (True, False):
                calls = calls_of(norm, watched, training=training, reader=reader)
                expected = calls_of(norm, torchs_forward(calls.names), training=training)
                if calls.entries != expected.entries or (not training and calls.names != names):
                    raise NoFormulaError("it is not torch's batch norm")
                names = calls.names
        watch.check()
        reader.note_globals(watch.globals)
        reads = Reads(parts=((name, type(norm)),)) + reader.reads().below(name)
    except Exception as error:  # forwards raise anything
        return f"its forward is not proven: {watch.reason or str(error).partition('. ')[0]}"
    act = "none"
    for part in names:
        module = norm.get_submodule(part)
        reads += Reads(parts=((f"{name}.{part}", type(module)),))
        if type(module) is nn.Identity:
            continue
        found = computed(module, overwrites=True)
        if act != "none" or isinstance(found, str):
            return f"it calls {part}, which is no activation"
        act = found.name
        reads += found.trace.reads.below(f"{name}.{part}")
    return Inside(act, reads)
