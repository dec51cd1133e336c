"""The proof that a function computes a rotary position embedding.

Recorded ops must be layout, casts, negations, sums and products of the arguments. So each element
of a result is a polynomial with whole coefficients, and two polynomials that are close at random
numbers are equal.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from torchkiln.patch.compare import Comparison
from torchkiln.patch.formula.reads import Reader
from torchkiln.patch.formula.recorder import DispatchMode, outputs
from torchkiln.patch.formula.rotation import (
    DTYPES,
    FORMS,
    ORDERS,
    PARTIAL,
    RANKS,
    WHOLE,
    Dtypes,
    Form,
    Ranks,
    Rotation,
    Sample,
    Sizes,
    sample,
)
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import Watch
from torchkiln.patch.probe import is_close, numbers, relative_error

LAYOUT = frozenset(
    (
        *("unsqueeze", "select", "slice", "split", "split_with_sizes", "unbind", "cat", "stack"),
        *("view", "_unsafe_view", "expand", "permute", "transpose", "clone", "alias", "neg"),
    )
)
"""Ops that move elements, or change their sign."""

PRODUCTS = ("add", "sub", "mul")


class Bilinear(DispatchMode):
    """Refuses ops that no rotation needs, and tensors that are neither arguments nor results."""

    def __init__(self, given: Sample) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {id(x): x for x in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if not torch.is_grad_enabled():
            raise NoFormulaError("it computes without gradients")
        given = [x for value in args for x in (value if isinstance(value, list) else [value])]
        tensors = [x for x in given if isinstance(x, Tensor)]
        if any(isinstance(x, Tensor) for x in options.values()):
            raise NoFormulaError("it writes to a tensor")
        if any(id(x) not in self.known for x in tensors):
            raise NoFormulaError("it uses a tensor that is no argument")
        if name != "_to_copy" and any(isinstance(x, torch.dtype) for x in args):
            raise NoFormulaError("it reads bits in another dtype")
        if name in PRODUCTS:
            if len(tensors) != 2 or len(args) != 2 or options:
                raise NoFormulaError("it computes with a number")
        elif name == "_to_copy":
            dtypes = {torch.float32, torch.float64, *(x.dtype for x in self.known.values())}
            if options.keys() - {"dtype"} or options.get("dtype") not in dtypes:
                raise NoFormulaError("it makes a copy in another dtype")
        elif name not in LAYOUT:
            raise NoFormulaError(f"it calls {name}")
        result = func(*args, **options)
        self.known |= {id(x): x for x in outputs(result)}
        return result


Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""A function of queries, keys, cos and sin."""


class Prover:
    """Runs a function and watches its effects. ``rotate`` passes constants to ``function``."""

    def __init__(self, rotate: Rotate, function: FunctionType) -> None:
        self.rotate, self.function = rotate, function
        self.watch = Watch()
        self.reason = ""
        """The reason why a call has no formula."""

    def run(self, given: Sample) -> tuple[Tensor, ...] | None:
        """Two results, or None if the function refuses the arguments; raises for effects."""
        try:
            with torch.enable_grad(), Bilinear(given), self.watch:
                found = self.rotate(*given)
        except NoFormulaError as error:
            if self.watch.reason:
                raise
            self.reason = self.reason or str(error)
            return None
        except Exception:  # for example, if shapes do not fit
            return None
        is_pair = type(found) is tuple and len(found) == 2
        return found if is_pair and all(type(x) is Tensor for x in found) else None

    def rotations(self) -> dict[Ranks, Rotation]:
        """The rotations that the function computes; raises :class:`NoFormulaError` without one."""
        if self.function.__closure__:
            raise NoFormulaError("it uses variables of an enclosing function")
        forms = {ranks: form for ranks in RANKS if (form := self.form(ranks))}
        self.watch.check(variables=False)
        if not forms and self.reason:
            raise NoFormulaError(self.reason)
        if any(map(depends_on_sizes, self.watch.codes)):
            raise NoFormulaError("it has a branch, or a constant that may be a size")
        if not forms:
            raise NoFormulaError("it computes another formula")
        reader = Reader()
        reader.note_globals(self.watch.globals)
        found: dict[Ranks, Rotation] = {}
        for ranks, form in forms.items():
            is_partial = self.is_rotation(form, ranks, PARTIAL)
            is_dense = self.is_dense(form, ranks, (*WHOLE, *PARTIAL * is_partial))
            dtypes = frozenset(d for d in DTYPES if self.takes(form, ranks, d))
            if is_dense is not None and dtypes:
                found[ranks] = Rotation(form, is_partial, is_dense, dtypes, reader.reads())
        if not found:
            raise NoFormulaError("its results have other strides or dtypes than those of the op")
        return found

    def form(self, ranks: Ranks) -> Form | None:
        """The first form that fits: a function of form ``first`` also passes as ``halves``."""
        return next((form for form in FORMS if self.is_rotation(form, ranks, WHOLE)), None)

    def is_rotation(self, form: Form, ranks: Ranks, sizes: tuple[Sizes, ...]) -> bool:
        """Whether results and gradients are those of the op."""
        for size, alone in itertools.product(sizes, (False, True)):
            given = sample(form, ranks, size, alone=alone)
            leaves = given.q.requires_grad_(), given.k.requires_grad_()
            found = self.run(given)
            if found is None:
                return False
            expected = form.rotated(*given)
            if not all(map(is_close, found, expected)):
                return False
            weights = [numbers(*x.shape, seed=9) for x in expected]
            of_both = [torch.autograd.grad(both, leaves, weights) for both in (found, expected)]
            if not all(map(is_close, *of_both)):
                return False
        return True

    def is_dense(self, form: Form, ranks: Ranks, sizes: tuple[Sizes, ...]) -> bool | None:
        """True if results are always contiguous, False if in the op's layout; None for others."""
        follows = dense = True
        for size, order in itertools.product(sizes, ORDERS):
            given = sample(form, ranks, size, order=order)
            pairs = zip(self.rotate(*given), form.rotated(*given), strict=True)
            for one, other in pairs:
                follows &= one.stride() == other.stride()
                dense &= one.is_contiguous()
        return False if follows else True if dense else None

    def takes(self, form: Form, ranks: Ranks, dtypes: Dtypes) -> bool:
        """Whether the op is as close to float64 as the function, with results of the same dtype."""
        found = compared(self.rotate, form, ranks, dtypes)
        return isinstance(found, Comparison) and not found.refusal(exact=False)


USUAL = Sizes(2, 4, 2, 16, 64, 64)


def compared(
    rotate: Rotate,
    form: Form,
    ranks: Ranks,
    dtypes: Dtypes,
    device: torch.device | None = None,
    *,
    size: Sizes = USUAL,
) -> Comparison | None:
    """The errors of function and op in these dtypes; None if their result dtypes differ."""
    given = sample(form, ranks, size).cast(dtypes, device)
    with torch.no_grad():
        now = form.rotated(*given)
        truth = form.rotated(*given.cast((torch.float64, torch.float64), device))
        try:
            was = rotate(*given)
        except Exception:  # the function does not take these dtypes
            return None
    if any(x.dtype != dtypes[0] for x in was):
        return None
    errors = [
        max(relative_error(x, true) for x, true in zip(both, truth, strict=True))
        for both in (was, now)
    ]
    return Comparison(dtypes[0], errors[0], errors[1], all(map(torch.equal, was, now)))


LARGEST = 4
"""The largest number in a function: dimensions, and 2 for halves. The tried sizes are larger."""


def depends_on_sizes(code: CodeType) -> bool:
    """Whether a function could compute another formula for sizes or devices that were not tried."""
    if any(type(x) in (int, float) and abs(x) > LARGEST for x in code.co_consts):
        return True
    if any(name.startswith("is_") for name in code.co_names):
        return True
    steps = [step.opname for step in dis.get_instructions(code)]
    return any("JUMP" in name or name in ("COMPARE_OP", "CONTAINS_OP") for name in steps)
