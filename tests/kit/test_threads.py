"""32 threads call every op, the jit and explain for a minute, in a Python without a GIL."""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln import jit
from torchkiln.testing import SPECS
from torchkiln.testing.contract.state import forward_and_backward, in_threads
from torchkiln.testing.contract.values import SMALL

pytestmark = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="this Python has a GIL: nox -s threads runs the test in one without",
)
CPU = torch.device("cpu")
THREADS = 32
SECONDS = 60.0
FORMULAS = 200
"""Number of formulas; the first thread that calls one creates its op."""

Call = Callable[[], tuple[Tensor, ...]]


def calls_of_ops() -> Iterator[tuple[Call, tuple[Tensor, ...]]]:
    """Calls of all ops with their gradients, and the results of one thread."""
    for spec in SPECS:
        for sample in spec.samples(CPU, torch.float32):
            if sample.numel <= SMALL and sample.seed is None:
                call = functools.partial(forward_and_backward, spec, sample)
                yield call, call()


def of_formula(number: int) -> tuple[Tensor, ...]:
    x = torch.linspace(-2, 2, 33, requires_grad=True)
    result = jit.elementwise(f"x * {number} + 0.25")(x)
    return result.detach(), *torch.autograd.grad(result.sum(), x)


def calls_of_formulas() -> Iterator[tuple[Call, tuple[Tensor, ...]]]:
    """Calls of formulas whose ops are created at the first call."""
    x = torch.linspace(-2, 2, 33)
    for number in range(FORMULAS):
        yield (
            functools.partial(of_formula, number),
            (x * number + 0.25, torch.full_like(x, number)),
        )


def calls_of_convolutions() -> Iterator[tuple[Call, tuple[Tensor, ...]]]:
    """One call creates a shared fold of parameters; the other drops it, as it needs gradients."""
    x, weight = torch.randn(2, 3, 8, 8), nn.Parameter(torch.randn(4, 3, 3, 3))
    norm = [torch.rand(4) + 0.5 for _ in range(4)]

    def call(recorded: bool) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(recorded):
            return (torchkiln.conv_bn_act(x, weight, None, *norm).detach(),)

    for recorded in (False, True):
        one = functools.partial(call, recorded)
        yield one, one()


def calls_of_explain() -> Iterator[tuple[Call, tuple[Tensor, ...]]]:
    """Calls of explain(), one at a time, while other threads launch kernels."""
    x, one_at_a_time = torch.randn(100), threading.Lock()

    def call() -> tuple[Tensor, ...]:
        with one_at_a_time:
            found = torchkiln.explain(torchkiln.silu, x)
        assert found.forward.route == ("torchkiln::silu",)
        return ()

    yield call, ()


def call_from_threads(seconds: float) -> list[int]:
    """Compares each result with that of one thread; returns the number of calls per thread."""
    pairs = [
        *calls_of_ops(),
        *calls_of_formulas(),
        *calls_of_convolutions(),
        *calls_of_explain(),
    ]
    counts = [0] * THREADS
    end = time.monotonic() + seconds

    def work(thread: int) -> None:
        drawn = random.Random(thread)
        while time.monotonic() < end:
            call, expected = drawn.choice(pairs)
            torch.testing.assert_close(call(), expected, rtol=0, atol=0, equal_nan=True)
            counts[thread] += 1

    in_threads(work, THREADS)
    return counts


def test_the_gil_stays_off() -> None:
    """Importing the extension does not enable the GIL, as an undeclared module would."""
    assert not sys._is_gil_enabled()  # type: ignore[attr-defined]


def test_threads_get_the_results_of_one() -> None:
    counts = call_from_threads(SECONDS)
    assert min(counts) > 0
    print(f"{sum(counts)} calls")
