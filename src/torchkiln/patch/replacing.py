"""``torchkiln.replace``: forwards of torchkiln for the modules of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, get_args

from torch import Tensor, nn

from torchkiln.patch import fp8
from torchkiln.patch.attention import routed
from torchkiln.patch.finding import (
    Skip,
    found_heads,
    free_modules,
    fused_parts,
    is_skipped,
    made,
    matched,
    rewritten,
    why_torchs_batch_norm,
    with_rows,
)
from torchkiln.patch.forms import tried
from torchkiln.patch.formula import loss_function
from torchkiln.patch.functions import replace_functions
from torchkiln.patch.graph import batch_norm
from torchkiln.patch.graph.unchanged import forget
from torchkiln.patch.plan import Plan, made_class
from torchkiln.patch.probe import usual_modes
from torchkiln.patch.registry import Registry
from torchkiln.patch.report import Replacement, Report
from torchkiln.patch.search import Search
from torchkiln.patch.source.rewritten import Rewrites
from torchkiln.patch.source.rotary import Rotary
from torchkiln.patch.source.rotary import find as find_rotary
from torchkiln.typing import Head, Kind, Precision

MAKER = "torchkiln.replace"

KINDS: tuple[Kind, ...] = get_args(Kind)


def require_model(model: object) -> None:
    """Raises a TypeError for anything but a module, such as its class."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{MAKER}: model: got {got}, expected a torch.nn.Module")


class Replace:
    """The type of ``torchkiln.replace``, which is called as a function."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.__name__ = self.__qualname__ = "replace"
        self.__doc__ = type(self).__call__.__doc__
        self.__module__ = "torchkiln"

    def __repr__(self) -> str:
        return "<function torchkiln.replace>"

    def register(
        self,
        cls: type[nn.Module],
        forward: Callable[..., Any],
        *,
        inputs: Callable[[Any], Tensor],
    ) -> None:
        """Replace the forward of another class, if the result is right.

        Args:
            cls: a class of modules; subclasses are not replaced.
            forward: a function of the module and the arguments of its forward, at the top level of
                a Python module, so that replaced modules can be pickled.
            inputs: returns the argument for a comparison, given a module: a float64 tensor.
        """
        self.registry.add(cls, forward, inputs)

    def unregister(self, cls: type[nn.Module]) -> None:
        """Take back :meth:`register` for a class; replaced models keep the forward.

        Args:
            cls: a registered class; KeyError for another one.
        """
        self.registry.remove(cls)

    def __call__(
        self,
        model: nn.Module | ModuleType,
        *,
        only: Iterable[Kind] | Kind | None = None,
        skip: Skip = (),
        exact: bool = False,
        head: Head = False,
        precision: Precision | None = None,
        recompute: bool = False,
        dry_run: bool = False,
        example: Any = None,
    ) -> Report:
        """Gives modules of ``model`` a forward of torchkiln, in place; returns the report.

        Modules are found by their formula: a copy with random parameters is run and compared with
        the ops in float64 and in the module's dtype. Names of classes are not used. A found module
        gets a subclass of its class, so parameters, names, hooks, ``state_dict`` and
        ``isinstance`` stay as they are. ``report.undo()`` restores all modules.

        These are replaced:

        - norms, together with a residual sum before them;
        - activations of several kernels, also after a linear layer, and softmax;
        - gated linear units between their projections;
        - wide linear layers that have a bias, sizes that are no multiples of 8, or the same input
          as other layers;
        - rotary position embeddings of queries and keys;
        - with ``head``, a linear layer that makes the logits of tokens, together with their loss;
        - losses, as modules and as calls in a forward;
        - batch norms with convolution, residual sum and activation, as by :func:`torchkiln.fuse`;
        - with ``example``, the strides of images in the convolutions of a model;
        - attention of transformers' models, so that causal calls stay causal when compiled;
        - classes given to ``replace.register``;
        - with ``precision="fp8"``, linear layers whose sizes are large.

        ``model`` may be a Python module, such as that of a trainer. Then functions are replaced
        under the names by which the module calls them, if their results and gradients are those of
        one of these formulas:

        - the log-probability of tokens, from logits and indices;
        - the entropy, from logits;
        - the mean or summed loss of tokens, from hidden states, the weight of the head and labels.

        A call with other arguments, and a call under autocast, runs the function itself.

        Args:
            model: any module; it may be on the meta device. Or a Python module, with ``only``,
                ``skip`` and ``dry_run``.
            only: kinds to replace, of ``norm``, ``residual``, ``activation``, ``glu``, ``linear``,
                ``mlp``, ``rope``, ``softmax``, ``loss``, ``batch_norm``, ``channels_last``,
                ``attention`` and ``registered``; all by default, but batch norms on a CPU. A
                residual sum is replaced if the norm after it is. ``channels_last`` has an effect
                with ``example`` only, and not with ``exact``.
            skip: patterns of names to leave alone, or a function of name and module, in this
                order.
            exact: whether to replace only forwards that are bitwise equal in the module's dtype.
            head: whether losses of tokens are computed without logits, from the inputs of the
                layer that would make them, as by :func:`torchkiln.linear_cross_entropy`. In calls
                with labels, True computes the logits of an output of transformers when they are
                read, and those in a tuple or dict at the end of the forward. ``"loss"`` returns
                None for logits in training mode; in evaluation it is like True. ``"fp8"`` includes
                heads in ``precision="fp8"``, and keeps their losses. Not with ``exact``.
            precision: ``"fp8"`` to multiply in float8_e4m3fn, as :class:`torchkiln.nn.LinearFP8`,
                in each :class:`torch.nn.Linear` that gains by its sizes, but not in heads; on a GPU
                of compute capability 9.0. The report has the reason for every other layer. Calls
                with few rows run in the dtype of the layer. Not with ``exact``.
            recompute: whether to save memory in training: a linear layer does not save the gated
                unit before it, and convolutions save as in :func:`torchkiln.fuse`. Backward
                computes the result again, with the same bits, by one more kernel.
            dry_run: whether to return the report without a change. Forwards of modules still run,
                up to their first side effect.
            example: a batch for the model: a tensor, a tuple of arguments, or a dict of keyword
                arguments. The report has errors on the inputs that the modules get, and the times
                of the old and the new forward of each module, with backward if the model is in
                training mode and gradients are on. Slower modules stay as they are, and so do all
                if the model is not faster. Buffers and random states are restored. A model with
                convolutions of images is also timed with its activations in ``channels_last``.
        """
        if isinstance(model, ModuleType):
            given = {
                "exact": exact,
                "head": head,
                "precision": precision,
                "recompute": recompute,
                "example": example is not None,
            }
            return self.of_functions(model, checked_kinds(only), skip, given, dry_run=dry_run)
        require_model(model)
        kinds = checked_kinds(only)
        check_precision(precision, kinds, head, exact=exact)
        if only is not None:
            check_only(kinds, exact=exact, has_example=example is not None)
        if exact and head:
            raise ValueError(
                f"{MAKER}: head: got {head!r} with exact=True, expected False: "
                "linear_cross_entropy adds in another order; leave exact out"
            )
        skipped = functools.partial(is_skipped, skip=skip)
        rows: list[Replacement] = []
        fused: list[tuple[nn.Module, batch_norm.FusedForward]] = []
        with usual_modes():
            if "batch_norm" in kinds and not exact:
                refusal = functools.partial(
                    why_torchs_batch_norm, skip, self.registry, asked=only is not None
                )
                rows, fused = batch_norm.find_all(model, refusal, recompute=recompute)
            search = Search(self.registry, exact=exact, light=recompute)
            matches = matched(model, search, rows, skip, kinds, fused_parts(fused))
            quantized: list[fp8.Found] = []
            if precision is not None:
                quantized = list(fp8.find(model, rows, skipped, head))
            in_fp8 = {module for _, module, _ in quantized}
            matches = [match for match in matches if match[1] not in in_fp8]
            plans = [*quantized, *((row, module, match.plan) for row, module, match in matches)]
            if head or {"residual", "linear", "mlp", "rope", "loss"} & set(kinds):
                free = free_modules(model, rows, skip, {module for module, _ in fused})
                rotary = find_rotary(model, free, exact=exact) if "rope" in kinds else Rotary()
                heads = found_heads(model, free, skip, rows, head) if head in {True, "loss"} else {}
                rewrites = Rewrites(matches, kinds, rotary, heads, in_fp8, exact=exact)
                plans += rewritten(free, rewrites, rows)
            candidates = [*made(plans), *with_rows(model, fused, rows)]
        seconds: list[float] = []
        if example is not None:
            candidates, seconds = tried(
                model,
                matches,
                candidates,
                example,
                rows,
                skip=skip,
                by_channels="channels_last" in kinds and not exact,
            )
            fp8.forget(in_fp8)
        undo: list[Callable[[], None]] = [functools.partial(fp8.forget, in_fp8)] if in_fp8 else []
        if "attention" in kinds:
            others = {module for _, module, _ in candidates}
            plans, restore = routed(model, rows, skipped, others, dry_run=dry_run)
            undo += restore
            candidates = [*candidates, *made(plans)]
        for of_module, module, plan in candidates:
            for row in of_module:
                row.outcome = "replaced"
            if not dry_run:
                undo.append(swap(MAKER, module, plan))
        if "loss" in kinds:
            with usual_modes():
                undo += replace_loss(model, rows, dry_run=dry_run)
        order = {name: index for index, (name, _) in enumerate(model.named_modules())}
        rows.sort(key=lambda row: order.get(row.name, len(order)))
        return Report(MAKER, model, rows, undo, dry_run=dry_run, seconds=seconds)

    def of_functions(
        self,
        scope: ModuleType,
        kinds: Sequence[Kind],
        skip: Skip,
        given: Mapping[str, Any],
        *,
        dry_run: bool,
    ) -> Report:
        """The report about a Python module; ``given``: options that only models have."""
        if refused := [name for name, value in given.items() if value]:
            raise ValueError(
                f"{MAKER}: {refused[0]}: got a value beside a Python module, expected none: "
                "its functions have no parameters and no inputs; leave it out"
            )
        rows: list[Replacement] = []
        undo: list[Callable[[], None]] = []
        if "loss" in kinds:
            skipped = functools.partial(is_skipped, skip=skip)
            rows, undo = replace_functions(scope, skipped, dry_run=dry_run)
        return Report(MAKER, scope, rows, undo, dry_run=dry_run)


def checked_kinds(only: Iterable[Kind] | Kind | None) -> tuple[Kind, ...]:
    """The kinds to replace, all by default; ValueError for unknown ones."""
    kinds = KINDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(
                f"torchkiln.replace: only: got {kind!r}, expected one of {', '.join(KINDS)}"
            )
    return kinds


def check_only(kinds: tuple[Kind, ...], *, exact: bool, has_example: bool) -> None:
    """Refuses kinds that other arguments exclude."""
    if exact and "batch_norm" in kinds:
        raise ValueError(
            f"{MAKER}: only: got 'batch_norm' with exact=True, expected other kinds: bn_act "
            "rounds once where torch rounds between the steps; leave exact out"
        )
    if kinds == ("channels_last",) and (exact or not has_example):
        got = "with exact=True" if exact else "without example"
        raise ValueError(
            f"{MAKER}: only: got 'channels_last' {got}, expected an example and no exact: a trial "
            "decides, and convolutions add in another order; call replace(model, example=batch)"
        )


def check_precision(
    precision: Precision | None, kinds: tuple[Kind, ...], head: Head, *, exact: bool
) -> None:
    """Refuses unknown values of ``head`` and ``precision``, and arguments that contradict them."""
    if head not in {False, True, "loss", "fp8"}:
        raise ValueError(f"{MAKER}: head: got {head!r}, expected False, True, 'loss' or 'fp8'")
    if precision not in {None, "fp8"}:
        raise ValueError(f"{MAKER}: precision: got {precision!r}, expected 'fp8' or None")
    if head == "fp8" and precision is None:
        raise ValueError(f"{MAKER}: head: got 'fp8', expected precision='fp8' beside it")
    if precision is None:
        return
    if exact:
        raise ValueError(
            f"{MAKER}: precision: got {precision!r} with exact=True, expected None: products in "
            "FP8 round their operands; leave exact out"
        )
    if "linear" not in kinds:
        raise ValueError(
            f"{MAKER}: only: got {', '.join(kinds)} with precision={precision!r}, expected "
            "'linear' among them"
        )


def swap(maker: str, module: nn.Module, plan: Plan) -> Callable[[], None]:
    """Give a module the new class; returns the undo, whose errors begin with ``maker``."""
    original = type(module)
    made = made_class(original, plan)

    def undo() -> None:
        if type(module) is not made:
            raise RuntimeError(
                f"{maker}: undo: got a module of {type(module).__name__}, expected "
                f"{made.__name__}; call undo() before the library that changed the class"
            )
        module.__class__ = original
        forget(module)

    module.__class__ = made
    return undo


def replace_loss(
    model: nn.Module, rows: list[Replacement], *, dry_run: bool
) -> list[Callable[[], None]]:
    """Set ``loss_function`` of a model, if it is a cross-entropy; returns functions that undo it.

    Adds the row.
    """
    found = loss_function.find(model)
    if found is None:
        return []
    row = Replacement("loss_function", getattr(model.loss_function, "__name__", "function"), "loss")
    rows.append(row)
    if isinstance(found, str):
        row.reason = found
        return []
    row.now, row.outcome = f"{found.__name__} in the dtype of the logits", "replaced"
    if dry_run:
        return []
    before = dict(vars(model))
    model.loss_function = found  # type: ignore[assignment]
    changed = [name for name, value in vars(model).items() if before.get(name) is not value]

    def undo() -> None:
        for name in changed:
            if name in before:
                vars(model)[name] = before[name]
            else:
                vars(model).pop(name, None)

    return [undo]


replace = Replace()


@contextmanager
def replaced(
    model: nn.Module | ModuleType,
    *,
    only: Iterable[Kind] | Kind | None = None,
    skip: Skip = (),
    exact: bool = False,
    head: Head = False,
    precision: Precision | None = None,
    recompute: bool = False,
    dry_run: bool = False,
    example: Any = None,
) -> Iterator[Report]:
    """``torchkiln.replace`` with the same arguments, undone at the end of the block."""
    report = replace(
        model,
        only=only,
        skip=skip,
        exact=exact,
        head=head,
        precision=precision,
        recompute=recompute,
        dry_run=dry_run,
        example=example,
    )
    try:
        yield report
    finally:
        report.undo()
