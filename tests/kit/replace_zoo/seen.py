"""Calls of a model, and everything that can be observed of a call."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

EVENTS: list[Any] = []
"""Effects outside of a module: hooks and forwards of the zoo append them here."""

HOOKS = tuple(vars(nn.Module()))
"""Attributes that every module has. All others are compared."""

Inputs = Sequence[tuple[Any, ...]]
Action = Callable[[Any], Any]


@dataclass(frozen=True)
class Mode:
    """The mode of a call: training or eval, and a context for gradients."""

    training: bool
    grad: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def __str__(self) -> str:
        return f"{'training' if self.training else 'eval'}, {type(self.grad).__name__}"


MODES: tuple[Callable[[], Mode], ...] = (
    lambda: Mode(True),
    lambda: Mode(False),
    lambda: Mode(True),
    lambda: Mode(False, torch.no_grad()),
    lambda: Mode(False, torch.inference_mode()),
)


class Precision(TorchDispatchMode):
    """Records the largest eps of the dtypes in which a model computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for x in tensors(result):
            self.eps = max(self.eps, torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0)
        return result


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in a nested result."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


@dataclass
class Seen:
    """Everything that can be observed of one call."""

    raised: str = ""
    form: Any = None
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    arguments: list[Tensor] = field(default_factory=list)
    attributes: Any = None
    events: list[Any] = field(default_factory=list)
    backward_events: Any = None
    state: Any = None
    eps: float = 0.0


class About(float):
    """A number that is equal to every number within 1 %."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, rel_tol=1e-2, abs_tol=1e-9)

    def __ne__(self, other: object) -> bool:
        return not self == other


def shown(value: Any, depth: int = 3) -> Any:
    """An attribute as a value that can be compared; of a tensor dtype, shape and norm."""
    if type(value) in (Tensor, nn.Parameter):
        size = About(value.detach().double().nan_to_num().norm())
        return ("tensor", value.dtype, tuple(value.shape), size, value.requires_grad)
    if isinstance(value, (list, tuple, set)) and depth:
        return [type(value).__name__, *(shown(x, depth - 1) for x in value)]
    if isinstance(value, dict) and depth:
        return {str(key): shown(x, depth - 1) for key, x in value.items()}
    if isinstance(value, (int, float, str, type(None))):
        return value
    inner = getattr(value, "__dict__", None)
    named = type(value).__name__
    return [named, shown(inner, depth - 1)] if inner and depth and not callable(value) else named


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """The attributes of all modules, without parameters, buffers, children and hooks."""
    return {
        f"{name}.{key}": shown(value)
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if key not in HOOKS and key != "forward"
    } | {f"{name}.training": m.training for name, m in model.named_modules()}


def seeded(seed: int) -> None:
    """Seed torch's CPU generator and Python's random."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


def own(x: Any, *, needs_grad: bool) -> Any:
    """A new leaf with the values and strides of an argument; a deep copy if it is no tensor."""
    if not isinstance(x, Tensor):
        return copy.deepcopy(x)
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    return new.requires_grad_(needs_grad and x.is_floating_point())


def outcome(
    model: nn.Module, given: Any, mode: Mode, seed: int, around: Action, *, wide: bool = False
) -> Seen:
    """Call a model, and run backward if results require it; with ``wide`` eps is recorded."""
    seen = Seen()
    model.train(mode.training)
    model.zero_grad()
    seeded(seed)
    EVENTS.clear()
    args, options = given
    leaves = [own(x, needs_grad=True) for x in args]
    precision = Precision()
    with warnings.catch_warnings(), precision if wide else nullcontext():
        warnings.simplefilter("ignore")
        try:
            with mode.grad, around(mode.training):
                passed = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                made = model(*passed, **options)
            seen.results, seen.form = tensors(made), forms(made, passed)
            seen.events = list(EVENTS)
            EVENTS.clear()
            backward(seen.results, seed)
        except Exception as error:  # a forward may raise any exception
            seen.raised = type(error).__name__
            seen.attributes = str(error)[:200]
            return seen
    seen.state = (torch.get_rng_state().sum().item(), hash(random.getstate()))
    seen.backward_events = Counter(map(str, EVENTS))
    wanted = [(f"argument {i}", x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    for name, x in [*wanted, *model.named_parameters()]:
        seen.gradients[name] = x.grad
    seen.buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
    seen.arguments = [x.detach() for x in passed if isinstance(x, Tensor)]
    seen.attributes, seen.eps = attributes_of(model), precision.eps
    return seen


def backward(results: Iterable[Tensor], seed: int) -> None:
    """Run backward from all results, with random gradients of them."""
    roots = [y for y in results if y.requires_grad and y.is_floating_point()]
    generator = torch.Generator().manual_seed(seed)
    if roots:
        draws = [torch.randn(y.shape, generator=generator, dtype=torch.double) for y in roots]
        torch.autograd.backward(roots, [d.to(y.dtype) for d, y in zip(draws, roots, strict=True)])


def forms(made: Any, passed: list[Any]) -> list[Any]:
    """Structure, dtypes, shapes, strides and aliases of the results."""
    flat, tree = tree_flatten(made)
    found: list[Any] = [str(tree)]
    for y in flat:
        if not isinstance(y, Tensor):
            found.append(shown(y))
            continue
        steps = [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1 and y.numel()]
        alias = [i for i, x in enumerate(passed) if isinstance(x, Tensor) and y is x]
        found.append((y.dtype, tuple(y.shape), steps, y.requires_grad, y.is_leaf, alias))
    return found
