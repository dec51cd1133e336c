"""Functions of a Python module that compute log-probabilities, entropies or a loss of tokens."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from torchkiln.ops.cross_entropy import linear_cross_entropy, logprob
from torchkiln.patch.formula.recorder import OpNames
from torchkiln.patch.formula.watch import Watch, is_users
from torchkiln.patch.probe import numbers, usual_modes
from torchkiln.patch.report import Replacement
from torchkiln.patch.source.text import nested

CLASSES, FEATURES = 11, 7
IGNORED = -100
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((130,), (3, 5))
"""Rows of the compared calls: a function may treat more than 128 rows, or sequences, in parts."""
LARGEST = 8
"""The largest number in a function's code, apart from IGNORED. Compared sizes are on both sides of
each smaller number; a larger number may be a size or a class that no compared call has."""
SCALES = (1e-3, 4.0, 1e3)

MENTIONS = {"log_softmax", "logsumexp", "softmax", "cross_entropy"}
"""Only a function that calls one of these, itself or through others, is run for a comparison."""

OPS = frozenset(
    (
        *("_to_copy", "view", "_unsafe_view", "slice", "select", "split", "split_with_sizes"),
        *("unbind", "clone", "detach", "alias", "stack", "cat", "squeeze", "unsqueeze", "expand"),
        *("_log_softmax", "_softmax", "logsumexp", "gather", "exp", "log", "mul", "sum", "neg"),
        *("sub", "add", "add_", "div", "div_", "nll_loss_forward", "t", "transpose", "mm", "bmm"),
        *("addmm", "zeros", "empty", "new_zeros", "lift_fresh", "scalar_tensor", "ne", "eq"),
    )
)
"""The ops of such functions. A function that calls others, such as a clamp, is not replaced."""


@dataclass(frozen=True)
class Formula:
    """The formula of a function, and the op that replaces it."""

    now: str
    count: int
    """The number of tensor arguments."""
    ours: Callable[..., Tensor]
    dims: int
    """The number of dimensions that the first tensor has more than the target."""

    def fits(self, *tensors: Any) -> bool:
        """Whether the op takes these arguments; else the function itself runs."""
        for x in tensors:
            if not isinstance(x, Tensor) or type(x).__module__.startswith("torch.distributed"):
                return False
        first, *others = tensors
        plain = first.dtype in DTYPES and first.dim() in {len(s) + 1 for s in SHAPES}
        if self.count > 1:
            rows = others[-1]
            plain = plain and rows.dtype == torch.int64 and rows.shape == first.shape[:-1]
        if self.count > 2:
            plain = plain and others[0].dim() == 2 and others[0].dtype == first.dtype
        return plain and all(x.device == first.device for x in others)


def entropies(logits: Tensor) -> Tensor:
    """The entropy of each row."""
    rows = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return logprob(logits, rows, entropy=True)[1]


def loss_of(reduction: Any) -> Callable[..., Tensor]:
    """A function of hidden states, weight of the head and target, which returns the loss."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        options = {"reduction": reduction, "loss_dtype": dtype}
        return linear_cross_entropy(hidden, weight, target, **options)

    return loss


FORMULAS = (
    Formula("logprob(logits, target)", 2, logprob, 1),
    Formula("logprob(logits, entropy=True)", 1, entropies, 1),
    Formula("linear_cross_entropy(x, weight, target)", 3, loss_of("mean"), 1),
    Formula("linear_cross_entropy(x, weight, target, sum)", 3, loss_of("sum"), 1),
)


def draws(formula: Formula) -> Iterator[tuple[Tensor, ...]]:
    """Arguments for a comparison, in float64."""
    for shape, scale in itertools.product(SHAPES, SCALES):
        target = torch.arange(math.prod(shape)).reshape(shape) * 7 % CLASSES
        if formula.count < 3:
            yield (numbers(*shape, CLASSES) * scale, target)[: formula.count]
            continue
        target[..., 1] = IGNORED
        target.view(-1)[-3:-1] = IGNORED  # sequences with different numbers of tokens
        weight = numbers(CLASSES, FEATURES, seed=1) / FEATURES**0.5
        yield numbers(*shape, FEATURES) * scale, weight, target


def converted(given: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The arguments as leaves, with floating-point numbers in ``dtype``."""
    return [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in given]


class Calls(OpNames):
    """Collects names of ops; a comparison with a class other than IGNORED also gets the class."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an op and records its name."""
        name = func._schema.name.partition("::")[2]
        at = {"eq": 1, "ne": 1, "nll_loss_forward": 4}.get(name)
        if at is not None and not is_ignored(args[at]):
            self.names.add(f"{name} with {args[at]}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def is_ignored(value: Any) -> bool:
    """Whether a number or a tensor of one element is IGNORED."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.item() == IGNORED
    return bool(value == IGNORED)


class Helpers(Watch):
    """A watch that lets functions append to their own lists."""

    def event(self, frame: FrameType, event: str, arg: Any) -> None:
        """Refuses effects, except ``append`` and ``extend`` of lists that no global holds."""
        owner = getattr(arg, "__self__", None)
        is_own = isinstance(owner, list) and all(owner is not held for held, _ in self.containers)
        if event == "c_call" and is_own and arg.__name__ in {"append", "extend"}:
            return
        super().event(frame, event, arg)


def compared(
    function: Callable[..., Any], formula: Formula
) -> dict[torch.dtype, torch.dtype] | str:
    """The dtypes of results by those of arguments; the reason if a result is not the formula's."""
    results: dict[torch.dtype, torch.dtype] = {}
    for given, dtype in itertools.product(draws(formula), DTYPES):
        leaves = converted(given, dtype)
        found = run(function, leaves)
        if isinstance(found, str):
            return found
        is_same = results.setdefault(dtype, found.dtype) == found.dtype
        if not is_same or not agree(found, leaves, formula):
            return OTHER
    return results


OTHER = "another formula"


def run(function: Callable[..., Any], leaves: list[Tensor]) -> Tensor | str:
    """The result of a call, or the reason why it is not the result of a formula."""
    called = Calls()
    with Helpers() as watch, called:
        try:
            found = function(*leaves)
        except Exception:
            return watch.reason or OTHER
    if strange := called.names - OPS:
        return f"it calls {min(strange)}"
    is_result = isinstance(found, Tensor) and found.requires_grad
    return watch.reason or (found if is_result else OTHER)


def agree(found: Tensor, leaves: list[Tensor], formula: Formula) -> bool:
    """Whether a result and its gradients are those of the op in float64, up to their precision."""
    wide = converted([x.detach() for x in leaves], torch.float64)
    truth = formula.ours(*wide)
    if found.shape != truth.shape:
        return False
    inputs = [[x for x in each if x.requires_grad] for each in (leaves, wide)]
    eps = 4 * max(torch.finfo(t).eps for t in (found.dtype, leaves[0].dtype, torch.float32))
    size = max(1.0, float(wide[0].detach().abs().max()))
    ours = torch.autograd.grad(truth.sum(), inputs[1])
    theirs = torch.autograd.grad(found.sum(), inputs[0])
    pairs = [(found.detach(), truth.detach()), *zip(theirs, ours, strict=True)]
    # The bounds follow the dtype: they are loose in half precision, and float64 checks the formula.
    return all(
        torch.allclose(
            one.double(), other, rtol=eps, atol=8 * eps * size * max(1.0, float(other.abs().max()))
        )
        for one, other in pairs
    )


def replacement(
    original: FunctionType, formula: Formula, dtypes: dict[torch.dtype, torch.dtype]
) -> Callable[..., Any]:
    """A function that calls the op, or the original with arguments that were not compared."""
    names = tuple(inspect.signature(original).parameters)[: formula.count]
    ours, fits = formula.ours, formula.fits

    @functools.wraps(original)
    def function(*args: Any, **options: Any) -> Any:
        given = args
        if options and len(args) + len(options) == len(names):
            given = (*args, *(options[n] for n in names[len(args) :] if n in options))
        if (
            len(given) == len(names) == len(args) + len(options)
            and fits(*given)
            and not torch.is_autocast_enabled(given[0].device.type)
        ):
            return ours(*given).to(dtypes[given[0].dtype])
        return original(*args, **options)

    vars(function)["_kiln_original"] = original
    return function


def functions_of(function: FunctionType, depth: int = 3) -> Iterator[FunctionType]:
    """A function, and the functions of users among the globals that it names, ``depth`` deep."""
    yield function
    called = [function.__globals__.get(name) for name in names_of(function)] if depth else []
    for other in called:
        if isinstance(other, FunctionType) and is_users(other.__code__.co_filename):
            yield from functions_of(other, depth - 1)


def names_of(function: FunctionType) -> set[str]:
    """The globals and attributes that a function names."""
    return {name for code in nested(function.__code__) for name in code.co_names}


def file_of(value: type) -> str:
    """The file of a class's module; empty for built-in ones."""
    return getattr(sys.modules.get(value.__module__), "__file__", None) or ""


def depends(function: FunctionType) -> str:
    """The reason why other calls may differ, a number or name that is read; else empty."""
    for code in nested(function.__code__):
        for number in code.co_consts:
            if isinstance(number, int) and abs(number) > LARGEST and number != IGNORED:
                return f"it names {number}"
    for name in sorted(names_of(function)):
        value = function.__globals__.get(name)
        is_class = inspect.isclass(value) and is_users(file_of(value))
        if is_class or (isinstance(value, (int, float, Tensor)) and not is_ignored(value)):
            return f"it reads {name}, which may change"
    return "it reads variables of another function" if function.__closure__ else ""


def required(function: FunctionType) -> int | None:
    """The number of arguments without a default; None if one of them has to be named."""
    given = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in given):
        return None
    return len(given)


def found_function(function: FunctionType) -> tuple[str, Callable[..., Any]] | str | None:
    """Text and function of the replacement; the reason if there is none; None if not a formula."""
    if "_kiln_original" in vars(function):
        return "replaced before"
    count = required(function)
    formulas = [formula for formula in FORMULAS if formula.count == count]
    if not formulas or not is_users(function.__code__.co_filename):
        return None
    every = list(functions_of(function))
    if not any(MENTIONS & names_of(one) for one in every):
        return None
    reason = next(filter(None, map(depends, every)), "")
    if reason:
        return reason
    for formula in formulas:
        dtypes = compared(function, formula)
        if isinstance(dtypes, dict):
            return formula.now, replacement(function, formula, dtypes)
        reason = dtypes
    return reason


def replace_functions(
    scope: ModuleType, is_skipped: Callable[[str, Any], bool], *, dry_run: bool
) -> tuple[list[Replacement], list[Callable[[], None]]]:
    """Set functions of a module by name, also for its own calls; returns rows and undos."""
    rows: list[Replacement] = []
    undo: list[Callable[[], None]] = []
    for name, value in list(vars(scope).items()):
        if not isinstance(value, FunctionType) or is_skipped(name, value):
            continue
        with usual_modes():
            found = found_function(value)
        if found is None:
            continue
        row = Replacement(name, f"{value.__module__}.{value.__qualname__}", "loss")
        rows.append(row)
        if isinstance(found, str):
            row.reason = found
            continue
        row.now, row.outcome = found[0], "replaced"
        if not dry_run:
            setattr(scope, name, found[1])
            undo.append(functools.partial(restore, scope, name, found[1], value))
    return rows, undo


def restore(scope: ModuleType, name: str, made: Any, original: FunctionType) -> None:
    """Set a name to its original function again."""
    if vars(scope).get(name) is not made:
        raise RuntimeError(
            f"torchkiln.replace: undo: got another {scope.__name__}.{name}, expected the function "
            "that replace() has set; call undo() before the library that changed it"
        )
    setattr(scope, name, original)
