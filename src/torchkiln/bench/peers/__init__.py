"""Who else can do what an op does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config

from torchkiln.bench.bench_case import BACKWARD, BenchCase, Function
from torchkiln.bench.peers import liger, quack
from torchkiln.bench.peers.package import Refused, Table, function_of

__all__ = [
    "COMPILE",
    "EAGER",
    "LIGER",
    "MAKERS",
    "PEERS",
    "QUACK",
    "Refused",
    "backward_may_repeat",
    "knows",
    "makers",
    "own_tensors",
    "remark",
    "waits",
]

EAGER, COMPILE, LIGER, QUACK = "eager", "compile", "liger", "quack"
PEERS = (EAGER, COMPILE, LIGER, QUACK)


def eager(case: BenchCase) -> Function:
    """What a user would write."""
    return case.spec.composite


def compiled(case: BenchCase) -> Function:
    """The same under torch.compile, for the sizes at hand alone.

    Nothing that was compiled for another row is kept: it would count towards the limit of
    recompilations, after which torch falls back to eager.
    """
    torch.compiler.reset()
    composite = case.spec.composite

    def function(*args: object, **kwargs: object) -> Any:
        return composite(*args, **kwargs)

    found: Function = torch.compile(function, dynamic=False)
    return found


MAKERS: dict[str, Callable[[BenchCase], Function]] = {
    EAGER: eager,
    COMPILE: compiled,
    LIGER: partial(function_of, package=liger.PACKAGE, table=liger.FUNCTIONS),
    QUACK: partial(function_of, package=quack.PACKAGE, table=quack.FUNCTIONS),
}

TABLES: dict[str, Table] = {LIGER: liger.FUNCTIONS, QUACK: quack.FUNCTIONS}
"""Of those who do not know every op."""


def knows(name: str, op: str) -> bool:
    """Whether a peer has the op at all."""
    return name not in TABLES or op in TABLES[name]


def makers(
    case: BenchCase, names: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[BenchCase], Function]]]:
    """What makes the function of each peer among ``names`` that knows the op."""
    for name in names:
        if knows(name, case.spec.name):
            yield name, MAKERS[name]


def own_tensors(name: str, case: BenchCase) -> BenchCase:
    """A copy for a peer that overwrites the inputs, which everyone shares."""
    return replace(case, sample=case.sample.map(torch.clone)) if name == LIGER else case


def remark(name: str, case: BenchCase, direction: str) -> str | None:
    """Why a peer is timed over forward and backward in one call, if it is.

    That cannot be compared with the others, but leaving it out would hide it.
    """
    if name == LIGER and direction == BACKWARD and case.spec.name in liger.GRADIENT_IN_FORWARD:
        return "forward and backward in one call, because its forward makes the gradient"
    return None


def waits(name: str, case: BenchCase) -> bool:
    """Whether the call of a peer waits for the GPU, so that no graph can be made of it."""
    return name == LIGER and case.spec.name in liger.WAITING


@contextmanager
def backward_may_repeat() -> Iterator[None]:
    """Keep torch.compile from overwriting in backward what a second backward would need."""
    with functorch_config.patch(donated_buffer=False):
        yield
