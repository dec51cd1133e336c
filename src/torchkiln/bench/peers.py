"""Who else can do what an op does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch
import torch._functorch.config as functorch_config

from torchkiln.bench.cases import BenchCase, Function

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
PEERS = (EAGER, COMPILE, LIGER)


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

    def function(*args: object, **kwargs: object) -> torch.Tensor:
        return composite(*args, **kwargs)

    found: Function = torch.compile(function, dynamic=False)
    return found


LIGER_FUNCTIONS = {
    "swiglu": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction"),
    "geglu_tanh": ("liger_kernel.ops.geglu", "LigerGELUMulFunction"),
}


def liger(case: BenchCase) -> Function:
    """Liger-Kernel's Triton kernel."""
    module, name = LIGER_FUNCTIONS[case.spec.name]
    function: Function = getattr(import_module(module), name).apply
    return function


def liger_knows(case: BenchCase) -> bool:
    """It takes two whole tensors on a GPU."""
    tensors = [case.sample.args[i] for i in case.sample.positions]
    return (
        case.spec.name in LIGER_FUNCTIONS
        and len(tensors) == 2
        and all(tensor.is_cuda for tensor in tensors)
        and find_spec("liger_kernel") is not None
    )


MAKERS: dict[str, Callable[[BenchCase], Function]] = {
    EAGER: eager,
    COMPILE: compiled,
    LIGER: liger,
}


def makers(
    case: BenchCase, names: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[BenchCase], Function]]]:
    """What makes the function of each peer among ``names`` that knows the op."""
    for name in names:
        if name != LIGER or liger_knows(case):
            yield name, MAKERS[name]


def own_tensors(name: str, case: BenchCase) -> BenchCase:
    """A copy for a peer whose backward overwrites the inputs that everyone shares."""
    return replace(case, sample=case.sample.map(torch.clone)) if name == LIGER else case


@contextmanager
def backward_may_repeat() -> Iterator[None]:
    """Keep torch.compile from overwriting in backward what a second backward would need."""
    with functorch_config.patch(donated_buffer=False):
        yield
