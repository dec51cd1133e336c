"""Memory: elements that a call does not write, leaks, and data of concurrent calls."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.testing.check import UnavailableError, check
from torchkiln.testing.compare import Where, gradients, outputs, require, require_same
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.contract.values import SMALL
from torchkiln.testing.memory import allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchkiln.testing.sample import Sample
    from torchkiln.testing.spec import OpSpec

WARM_UP = 100
CALLS = 250
THREADS = 4
ROUNDS = 5
C_LIBRARY = "bytes of the C library"


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Make torch fill new memory with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switch.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        switch.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn)


def forward_and_backward(spec: OpSpec, sample: Sample) -> tuple[Tensor, ...]:
    """Outputs of a call, and the gradients of its leaves."""
    leaves = spec.leaves(sample)
    results = outputs(leaves.call(spec.op))
    inputs = leaves.take(spec.wanted(leaves))
    grads = gradients(results, inputs, incoming(spec, results))
    return (*(result.detach() for result in results), *grads)


@check(dtypes=(torch.float32, torch.bfloat16))
def every_element_is_written(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """No bit of outputs and gradients depends on the previous contents of new memory."""
    for sample in spec.samples(device, dtype):
        expected = forward_and_backward(spec, sample)
        with new_memory_is_nan():
            found = forward_and_backward(spec, sample)
        where = Where(spec, "every_element_is_written", sample, "new memory is NaN")
        require_same(found, expected, where)


class MallocInfo(ctypes.Structure):
    """The result of mallinfo2() of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use(device: torch.device) -> dict[str, int]:
    """Objects and bytes that are allocated now, by kind."""
    gc.collect()
    found = {"Python objects": sys.getallocatedblocks()}
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is not None:
        mallinfo.restype = MallocInfo
        info = mallinfo()
        found[C_LIBRARY] = info.uordblks + info.hblkhd
    if device.type == "cuda":
        found[f"bytes on {device}"] = allocated_bytes(device)
    return found


ALLOWED = {"Python objects": 0.5, C_LIBRARY: 16.0}
"""Growth per call that is no leak: half of an object, or of the smallest block of malloc()."""
TRIES = (1, 4, 12, 36)
"""Multiples of CALLS. A leak grows with the calls in all tries, a cache does not."""


def growth(work: Callable[[], object], calls: int, device: torch.device) -> dict[str, int]:
    """Objects and bytes that calls of a function leave allocated, by kind."""
    before = in_use(device)
    for _ in range(calls):
        work()
    return {kind: count - before[kind] for kind, count in in_use(device).items()}


def torch_keeps_bytes(device: torch.device) -> bool:
    """Whether each call of torch's own op leaves bytes of the C library allocated.

    After the capture of a CUDA graph each launch of a kernel does: 32 bytes on an H200 with CUDA
    13.0. The number of calls is that of the longest try, in which caches hardly count.
    """
    x, calls = torch.ones(1, device=device), CALLS * TRIES[-1]
    one_kernel = partial(torch.add, x, 1)
    growth(one_kernel, WARM_UP, device)
    return growth(one_kernel, calls, device)[C_LIBRARY] > calls * ALLOWED[C_LIBRARY]


@check()
def no_memory_growth(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Memory does not grow with the number of calls: up to four tries of 250 to 9,000 calls.

    Memory of the C library is left out in a process where torch's own ops keep some of it for each
    launch, as after the capture of a CUDA graph.
    """
    sample = spec.typical(device, dtype)
    work = partial(forward_and_backward, spec, sample)
    for _ in range(WARM_UP):
        work()
    leaking = {*in_use(device)}
    for calls in (CALLS * times for times in TRIES):
        grown = growth(work, calls, device)
        leaking = {kind for kind in leaking if grown[kind] > calls * ALLOWED.get(kind, 0)}
        if C_LIBRARY in leaking and torch_keeps_bytes(device):
            leaking.remove(C_LIBRARY)
        if not leaking:
            return
    kept = ", ".join(f"{grown[kind]} {kind}" for kind in sorted(leaking))
    where = Where(spec, "no_memory_growth", sample)
    require(False, where, f"{calls} calls kept {kept}")


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Call ``work`` with its number in each of several threads, which begin together."""
    errors: list[BaseException] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            together.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


@check()
def calls_from_several_threads(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Threads that call at the same time get the same bits as one thread alone."""
    small = [s for s in spec.samples(device, dtype) if s.numel <= SMALL]
    calls = [sample for sample in small if sample.seed is None][:THREADS]
    if not calls:
        raise UnavailableError("every sample draws from torch's generator, which threads share")
    expected = [forward_and_backward(spec, sample) for sample in calls]

    def work(first: int) -> None:
        for turn in range(ROUNDS * len(calls)):
            k = (first + turn) % len(calls)
            found = forward_and_backward(spec, calls[k])
            where = Where(spec, "calls_from_several_threads", calls[k], f"thread {first}")
            require_same(found, expected[k], where)

    in_threads(work, THREADS)
