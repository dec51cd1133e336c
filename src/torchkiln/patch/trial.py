"""Times old and new forwards of modules and the model on a real batch; keeps the faster ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchkiln.bench.clock import Call, Times, in_turns, synchronize
from torchkiln.patch.calls import Given, preserved
from torchkiln.patch.graph.unchanged import forget
from torchkiln.patch.plan import Candidate, Plan, made_class

BUDGET = 0.1
"""Seconds of measurement per module; modules with equal calls share one."""
MODEL_BUDGET = 1.0
"""Seconds of measurement of each form of the model."""
SHORTEST = 2e-3
"""Least seconds of a measurement: shorter calls are repeated."""
MOST_CALLS = 100
SLOWER, MODEL_SLOWER = "slower on the example", "the model is slower on the example"
"""The reasons of modules that keep their forward."""


@dataclass
class Step:
    """One forward of a module, and its backward if gradients are on."""

    module: nn.Module
    given: Given

    def __post_init__(self) -> None:
        values = self.given.values(self.module)
        self.wanted = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
        self.grads: list[Tensor] = []

    def __call__(self, forward: Callable[..., Any]) -> None:
        """Run the forward, and its backward if gradients are on."""
        out = forward(*self.given.args, **self.given.options)
        if not torch.is_grad_enabled() or not self.wanted:
            return
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        if [x.shape for x in results] != [x.shape for x in self.grads]:
            self.grads = [torch.ones_like(x) for x in results]
        if results:
            torch.autograd.grad(results, self.wanted, self.grads, allow_unused=True)


def seconds(device: torch.device, run: Call, count: int = 1) -> float:
    """Seconds per call of ``count`` calls in a row, until host and device have finished."""
    synchronize(device)
    start = time.perf_counter()
    for _ in repeat(None, count):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / count


def compared(device: torch.device, run: Call, forms: Sequence[Call], budget: float) -> list[float]:
    """Median seconds of ``run`` with each form of the model; ``forms[i]()`` sets form i.

    An untimed call follows each change of the form: the first call of a module with another class
    renews what the module remembers between calls.
    """
    forms[0]()
    run()
    count = max(1, min(MOST_CALLS, int(SHORTEST / seconds(device, run))))

    def clock(form: Call) -> float:
        form()
        run()
        return seconds(device, run, count)

    names = {str(index): form for index, form in enumerate(forms)}
    return [Times.of(values).seconds for values in in_turns(clock, names, budget).values()]


class Trial:
    """Gives modules their new forward one after the other, children first, if it is faster.

    With ``around``, the plan of this candidate is around the forward of its module throughout.
    """

    def __init__(
        self, model: nn.Module, candidates: Sequence[Candidate], around: Candidate | None = None
    ) -> None:
        self.model = model
        order = {module: index for index, module in enumerate(model.modules())}
        self.around = around
        self.candidates = sorted(candidates, key=lambda one: -order[one.module])
        self.classes = {
            one.module: (self.class_around(one, None), self.class_around(one, one.plan))
            for one in candidates
        }
        self.known: dict[Any, list[float]] = {}

    def class_around(self, one: Candidate, plan: Plan | None) -> type[nn.Module]:
        """The class of a module with a plan, or with none."""
        made = self.plan_around(one, plan)
        return type(one.module) if made is None else made_class(type(one.module), made)

    def plan_around(self, one: Candidate, plan: Plan | None) -> Plan | None:
        """A plan of a module, inside of the plan that is around this module."""
        if self.around is None or one.module is not self.around.module:
            return plan
        return replace(self.around.plan, inner=plan)  # type: ignore[type-var]

    def run(self, calls: Mapping[nn.Module, Given]) -> list[Candidate]:
        """The modules to change. The rows of other modules get the reason."""
        kept: list[Candidate] = []
        own = {one.module: type(one.module) for one in self.candidates}
        try:
            with preserved(self.model):
                for one in self.candidates:
                    one.module.__class__ = self.classes[one.module][0]
                for one in self.candidates:
                    if self.is_faster(one, calls.get(one.module)):
                        kept.append(one)
                        one.module.__class__ = self.classes[one.module][1]
        finally:
            put_back(own)
        if self.around is None:
            return kept
        outer = next((one for one in kept if one.module is self.around.module), None)
        if outer is None:
            return [*kept, self.around]
        rows, plan = (*outer.rows, *self.around.rows), self.plan_around(outer, outer.plan)
        assert plan is not None
        return [*(one for one in kept if one is not outer), Candidate(rows, outer.module, plan)]

    def is_faster(self, one: Candidate, given: Given | None) -> bool:
        """Whether to keep the new forward: it is faster, or its call cannot be repeated."""
        if given is None or not one.plan.is_timed:
            return True
        key = (*self.classes[one.module], shapes(one.module, given))
        if key not in self.known:
            try:
                self.known[key] = self.times(one.module, given)
            except Exception:  # for example, if a forward changes its arguments
                self.known[key] = []
        if not self.known[key]:
            return True
        was, now = self.known[key]
        for row in one.rows:
            row.seconds_was, row.seconds_now = was, now
        if now >= was:
            refuse([one], SLOWER)
        return now < was

    def times(self, module: nn.Module, given: Given) -> list[float]:
        """Seconds of the old and of the new forward of a module."""
        step = Step(module, given)

        def put(cls: type[nn.Module]) -> None:
            module.__class__ = cls

        was, made = self.classes[module]
        try:
            return compared(
                device_of(given, module),
                lambda: step(partial(type(module).forward, module)),
                (partial(put, was), partial(put, made)),
                BUDGET,
            )
        finally:
            put(was)


def put_back(classes: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Give modules their classes, without what the tried classes stored in them."""
    for module, cls in classes.items():
        module.__class__ = cls
        forget(module)


def seconds_of_model(
    model: nn.Module, example: Any, forms: Sequence[Sequence[Candidate]]
) -> list[float]:
    """Seconds of the model with the original forwards, and with the plans of each form."""
    given = Given.of(example).leaves()
    step = Step(model, given)
    own = {one.module: type(one.module) for form in forms for one in form}
    made = [
        {**own, **{one.module: made_class(own[one.module], one.plan) for one in form}}
        for form in ((), *forms)
    ]

    def put(classes: Mapping[nn.Module, type[nn.Module]]) -> None:
        for module, cls in classes.items():
            module.__class__ = cls

    try:
        with preserved(model):
            return compared(
                device_of(given, model),
                lambda: step(model),
                [partial(put, classes) for classes in made],
                MODEL_BUDGET * len(made),
            )
    finally:
        put_back(own)


def refuse(candidates: Sequence[Candidate], reason: str) -> None:
    """Mark the rows of modules that keep their forward."""
    for row in (row for rows, _, _ in candidates for row in rows):
        row.outcome, row.reason = "kept", reason


def device_of(given: Given, module: nn.Module) -> torch.device:
    """The device of the tensors of a call."""
    values = given.values(module)
    return next((x.device for x in values if isinstance(x, Tensor)), torch.device("cpu"))


def shapes(module: nn.Module, given: Given) -> tuple[Any, ...]:
    """A key for calls that take equal time: layouts of tensors and classes of submodules."""
    layouts = (
        (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)
        if isinstance(x, Tensor)
        else str(x)
        for x in given.values(module)
    )
    return (*layouts, *map(type, module.modules()))
