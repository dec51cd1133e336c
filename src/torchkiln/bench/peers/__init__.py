"""Other implementations of the ops: torch's, torch.compile, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config

from torchkiln.bench.case import BACKWARD, BenchCase, Function
from torchkiln.bench.peers import cudnn, formulas, liger, quack, torchao
from torchkiln.bench.peers.package import Refused, function_of

__all__ = [
    "COMPILE",
    "CUDNN",
    "EAGER",
    "LIGER",
    "MAKERS",
    "PEERS",
    "QUACK",
    "TORCH",
    "TORCHAO",
    "TRL",
    "Refused",
    "backward_may_repeat",
    "knows",
    "makers",
    "own_tensors",
    "remark",
    "waits",
]

EAGER, COMPILE, LIGER, QUACK, CUDNN = "eager", "compile", "liger", "quack", "cudnn"
TORCHAO, TRL, TORCH = "torchao", "trl", "torch"
PEERS = (EAGER, COMPILE, LIGER, QUACK, CUDNN, TORCHAO, TRL, TORCH)


def eager(case: BenchCase) -> Function:
    """The composite of torch's ops that a user would write."""
    return case.spec.usual or case.spec.composite


def compiled(case: BenchCase) -> Function:
    """The composite under torch.compile, for static sizes.

    Code that was compiled for other rows is dropped, because it counts towards the limit of
    recompilations, after which torch falls back to eager.
    """
    torch.compiler.reset()
    composite = eager(case)

    def function(*args: object, **kwargs: object) -> Any:
        return composite(*args, **kwargs)

    found: Function = torch.compile(function, dynamic=False)
    return found


MAKERS: dict[str, Callable[[BenchCase], Function]] = {
    EAGER: eager,
    COMPILE: compiled,
    LIGER: partial(function_of, package=liger.PACKAGE, table=liger.FUNCTIONS),
    QUACK: partial(function_of, package=quack.PACKAGE, table=quack.FUNCTIONS),
    CUDNN: cudnn.function_of,
    TORCHAO: torchao.function_of,
    TRL: formulas.trl,
    TORCH: formulas.torchs,
}

TABLES: dict[str, Collection[str]] = {
    LIGER: liger.FUNCTIONS,
    QUACK: quack.FUNCTIONS,
    CUDNN: cudnn.FUNCTIONS,
    TORCHAO: torchao.FUNCTIONS,
    TRL: formulas.TRL,
    TORCH: formulas.TORCHS,
}
"""Functions of the peers that implement only some ops."""


def knows(name: str, op: str) -> bool:
    """Whether a peer has the op."""
    return name not in TABLES or op in TABLES[name]


def makers(
    case: BenchCase, names: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[BenchCase], Function]]]:
    """Names and makers of the peers among ``names`` that have the op."""
    for name in names:
        if knows(name, case.spec.name):
            yield name, MAKERS[name]


def own_tensors(name: str, case: BenchCase) -> BenchCase:
    """The case, with copies of its tensors for a peer that overwrites its inputs."""
    return replace(case, sample=case.sample.map(torch.clone)) if name == LIGER else case


def remark(name: str, case: BenchCase, direction: str) -> str | None:
    """The reason if a peer is timed over forward and backward in one call, else None.

    Such a time is shown, but not compared.
    """
    if name == LIGER and direction == BACKWARD and case.spec.name in liger.GRADIENT_IN_FORWARD:
        return "forward and backward in one call, because its forward makes the gradient"
    return None


def waits(name: str, case: BenchCase) -> bool:
    """Whether the call of a peer waits for the GPU: a CUDA graph cannot capture such a call."""
    return name == LIGER and case.spec.name in liger.WAITING


@contextmanager
def backward_may_repeat() -> Iterator[None]:
    """Keep torch.compile from reusing saved tensors in backward, which is timed repeatedly."""
    with functorch_config.patch(donated_buffer=False):
        yield
