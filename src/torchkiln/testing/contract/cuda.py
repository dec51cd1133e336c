"""Streams, devices, graphs and memory of CUDA."""

from __future__ import annotations

import base64
import gc
import pickle
import subprocess
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchkiln.testing.check import UnavailableError, check
from torchkiln.testing.compare import (
    Grads,
    Where,
    gradients,
    outputs,
    require,
    require_gradients,
    require_values,
    vector_jacobian,
)
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.contract.values import available_memory
from torchkiln.testing.data import SENTINEL, scaled
from torchkiln.testing.memory import allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchkiln.testing.sample import Sample
    from torchkiln.testing.spec import OpSpec

DELAYS = (100_000_000, 400_000_000, 1_600_000_000)
"""Clock cycles that a stream sleeps: tens of milliseconds, much longer than a launch.

If the stream wakes before a call returns, the call waited, or the host was busy. The call is then
repeated with the next number."""


def sleeps(where: Where) -> Iterator[int]:
    """Cycles for which the current stream is to sleep before a call; fails if every call waited.

    The debug mode reports torch's waits only. If an event behind a call is already done when the
    call has returned, the call has waited.
    """
    done = torch.cuda.Event()
    for delay in DELAYS:
        yield delay
        done.record()
        if not done.query():
            return
    require(False, where, "the call waited for the stream")


def forward_and_backward(
    spec: OpSpec, sample: Sample, grads: Grads
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs of a call, and the gradients of its leaves."""
    results = outputs(sample.call(spec.op))
    inputs = [sample.args[i] for i in spec.wanted(sample)]
    return results, gradients(results, inputs, grads)


def each_of(grads: Grads, function: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """Apply a function to each gradient that is not None."""
    return [None if grad is None else function(grad) for grad in grads]


def copy_each(to: Grads, grads: Grads) -> None:
    """Copy gradients into the gradients ``to``."""
    for one, other in zip(to, grads, strict=True):
        if one is not None and other is not None:
            one.copy_(other)


@check(device="cuda", dtypes=(torch.float32, torch.bfloat16))
def side_stream(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Work goes to the current stream: it waits for data that the stream delivers late."""
    sample = spec.typical(device, dtype)
    grads = incoming(spec, sample.call(spec.op))
    late = sample
    for i in sample.positions:
        late = late.substitute(i, torch.zeros_like(sample.args[i]))
    late = spec.leaves(late)
    late_grads = each_of(grads, torch.zeros_like)
    where = Where(spec, "side_stream", sample)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # A first call before the delay allocates memory and loads kernels.
        results, found = forward_and_backward(spec, late, late_grads)
        for delay in sleeps(where):
            with torch.no_grad():
                for i in sample.positions:
                    late.args[i].zero_()
                copy_each(late_grads, each_of(grads, torch.zeros_like))
                torch.cuda._sleep(delay)
                for i in sample.positions:
                    late.args[i].copy_(sample.args[i])
                copy_each(late_grads, grads)
            results, found = forward_and_backward(spec, late, late_grads)
    torch.cuda.current_stream(device).wait_stream(stream)
    require_values(results, sample, where)
    require_gradients(found, sample, spec.wanted(sample), grads, where)


@check(device="cuda")
def other_current_device(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Tensors of a device that is not current give results there; the current device stays."""
    if torch.cuda.device_count() < 2:
        raise UnavailableError("needs two CUDA devices")
    here, other = torch.device("cuda", 0), torch.device("cuda", 1)
    for current, where_data_is in ((here, other), (other, here)):
        sample = spec.typical(where_data_is, dtype)
        where = Where(spec, "other_current_device", sample, f"on {where_data_is}")
        with torch.cuda.device(current):
            grads = incoming(spec, sample.call(spec.op))
            results, found = forward_and_backward(spec, spec.leaves(sample), grads)
            require(torch.cuda.current_device() == current.index, where, "the device changed")
        for output in results:
            require(output.device == where_data_is, where, f"the output is on {output.device}")
        require_values(results, sample, where)
        require_gradients(found, sample, spec.wanted(sample), grads, where)


@check(device="cuda", dtypes=(torch.float32, torch.bfloat16))
def graph_capture(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """A CUDA graph of forward and backward gives right results when replayed with new data."""
    sample = spec.typical(device, dtype)
    grads = incoming(spec, sample.call(spec.op))
    static = spec.leaves(sample.map(torch.clone))
    static_grads = each_of(grads, torch.clone)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        forward_and_backward(spec, static, static_grads)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, found = forward_and_backward(spec, static, static_grads)
    for factor in (1.0, -3.0, 0.5):
        fresh = sample.map(lambda t, f=factor: scaled(t, f))  # type: ignore[misc]
        with torch.no_grad():
            for i in fresh.positions:
                static.args[i].copy_(fresh.args[i])
            fresh_grads = each_of(grads, lambda t, f=factor: t * f)  # type: ignore[misc]
            copy_each(static_grads, fresh_grads)
        graph.replay()
        where = Where(spec, "graph_capture", fresh, f"data times {factor}")
        require_values(results, fresh, where)
        require_gradients(found, fresh, spec.wanted(fresh), fresh_grads, where)


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    """Make torch raise an error where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@check(device="cuda")
def no_synchronisation(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Neither forward nor backward makes the host wait."""
    for sample in spec.samples(device, dtype, requires_grad=True):
        if any(sample.args[i].device != device for i in sample.positions):
            continue
        if any(sample.kwargs.get(name) for name in spec.waits_for):
            continue
        grads = incoming(spec, sample.call(spec.op))
        forward_and_backward(spec, sample, grads)
        torch.cuda.synchronize(device)
        for delay in sleeps(Where(spec, "no_synchronisation", sample)):
            with synchronisation_forbidden():
                torch.cuda._sleep(delay)
                forward_and_backward(spec, sample, grads)


ALLOCATIONS = ("cudaMalloc", "cuMemAlloc", "cuMemCreate")
"""Beginnings of the names of calls that take memory from the device."""


def allocations_outside_torch(run: Callable[[], None], device: torch.device) -> list[str]:
    """Calls of this process that take device memory, except those of the caching allocator.

    The free memory of the device would change with other processes, too.
    """

    def of_torch() -> int:
        return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))

    before = of_torch()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        run()
        torch.cuda.synchronize(device)
    taken = [event.name for event in profile.events() if event.name.startswith(ALLOCATIONS)]
    return taken[of_torch() - before :]


@check(device="cuda")
def only_the_caching_allocator(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """After a warm-up no call takes memory from the device."""

    def all_samples() -> None:
        for sample in spec.samples(device, dtype, requires_grad=True):
            results = outputs(sample.call(spec.op))
            grads = incoming(spec, results)
            gradients(results, sample.take(spec.wanted(sample)), grads)

    for _ in range(2):
        all_samples()
    gc.collect()  # frees reference cycles of other tests
    allocated = allocated_bytes(device)
    taken = allocations_outside_torch(all_samples, device)
    kept = allocated_bytes(device) - allocated
    where = Where(spec, "only_the_caching_allocator", spec.typical(device, dtype))
    require(kept == 0, where, f"{kept} bytes stay allocated after the calls")
    words = "calls took device memory outside of torch's allocator, the first by"
    require(not taken, where, f"{len(taken)} {words} {taken[:1]}")


SEGMENT = 2 << 20
"""Bytes of a segment for small blocks in the caching allocator. A block has at most half of it."""
BLOCK = 512
"""Block sizes are multiples of this number of bytes."""


class Bytes:
    """Device memory at an address, as an argument for torch.as_tensor."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


def rest_of_block(tensor: Tensor) -> Tensor:
    """The bytes between the end of a tensor's storage and the end of its block."""
    storage = tensor.untyped_storage()
    rest = -storage.nbytes() % BLOCK
    return torch.as_tensor(Bytes(storage.data_ptr() + storage.nbytes(), rest), device=tensor.device)


@contextmanager
def freed_memory(device: torch.device) -> Iterator[list[tuple[int, int]]]:
    """Lists the address ranges that are freed inside of the ``with`` block."""
    ranges: list[tuple[int, int]] = []
    torch.cuda.memory._record_memory_history(context=None, clear_history=True)
    try:
        yield ranges
        for trace in torch.cuda.memory._snapshot(device)["device_traces"]:
            ranges += [
                (event["addr"], event["addr"] + event["size"])
                for event in trace
                if event["action"] == "free_completed"
            ]
    finally:
        torch.cuda.memory._record_memory_history(None)


@check(device="cuda", dtypes=(torch.float32, torch.bfloat16))
def around_the_outputs(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """No byte behind the end of an output is written: sentinels are there before the call."""
    seen = 0
    for sample in spec.samples(device, dtype):
        sizes = [output.untyped_storage().nbytes() for output in outputs(sample.call(spec.op))]
        if max(sizes) > SEGMENT // 8:
            continue
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            # Fills a segment with sentinels: two blocks, which become one free block.
            half = torch.full((SEGMENT // 2,), SENTINEL, dtype=torch.uint8, device=device)
            other = half.clone()
            begin, second = sorted((half.data_ptr(), other.data_ptr()))
            del half, other
            with freed_memory(device) as freed:
                found = list(outputs(sample.call(spec.op)))
        for i, output in enumerate(found):
            storage = output.untyped_storage()
            end = storage.data_ptr() + storage.nbytes()
            inside = begin <= storage.data_ptr() < begin + SEGMENT == second + SEGMENT // 2
            # An intermediate result may have overwritten the sentinels after this output.
            is_reused = any(first <= end < last for first, last in freed)
            if inside and storage.nbytes() % BLOCK and not is_reused:
                seen += 1
                where = Where(spec, "around_the_outputs", sample, f"output {i}")
                wrong = int((rest_of_block(output) != SENTINEL).sum())
                require(wrong == 0, where, f"{wrong} bytes behind the end were written to")
        found.clear()
        del output, storage, pool  # in this order: the pool must be freed after its memory
    if not seen:
        raise UnavailableError("the allocator puts no output where the sentinels still are")


@check(device="cuda", dtypes=(torch.bfloat16,), large=True, needs="large")
def gradients_of_more_than_2_to_the_31_elements(
    spec: OpSpec, device: torch.device, dtype: torch.dtype
) -> None:
    """Rows of the gradients on both sides of element 2**31 are right."""
    if available_memory(device) < 40 * 2**30:
        raise UnavailableError(f"needs 40 GiB of free memory on {device}")
    if spec.large is None:
        raise TypeError(f"{spec.name}: got a spec without a large sample")
    sample = spec.large(device)
    results = outputs(sample.call(spec.op))
    shape = results[0].shape
    half = torch.tensor(0.5, device=device, dtype=dtype)
    grads = [half.expand(result.shape) for result in results]
    del results
    where = Where(spec, "gradients_of_more_than_2_to_the_31_elements", sample)
    # A row of these gradients depends only on the same row of the output.
    whole = [i for i in spec.wanted(sample) if sample.args[i].shape[:1] == shape[:1]]
    found = vector_jacobian(spec.op, spec.leaves(sample), spec.wanted(sample), grads)
    middle = 2**31 // (shape.numel() // shape[0])
    for start in (0, middle - 2, shape[0] - 3):

        def rows(tensor: Tensor, start: int = start) -> Tensor:
            whole = tensor.dim() > 0 and tensor.shape[0] == shape[0]
            return tensor[start : start + 3] if whole else tensor

        part = sample.map(rows)
        few = [rows(found[spec.wanted(sample).index(i)]) for i in whole]
        few_grads = list(map(rows, grads))
        require_gradients(few, part, whole, few_grads, where.at(f"rows from {start}"))


CHILD = """
import base64, os, pickle, sys, torch
op, composite, inputs = pickle.loads(base64.b64decode(sys.argv[1]))
def result(device):
    sample = next(iter(inputs(torch.device(device), torch.float32)))
    torch.testing.assert_close(sample.call(op), sample.call(composite), rtol=1e-4, atol=1e-5)
    return True
if not result("cpu"):
    sys.exit(3)
child = os.fork()
if child == 0:
    os._exit(0 if result("cuda") else 4)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@check(device="cuda")
def fork_of_a_cpu_only_parent(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """A child can use CUDA when its parent used the CPU alone: importing touches no device."""
    try:
        message = base64.b64encode(pickle.dumps((spec.op, spec.composite, spec.inputs))).decode()
    except Exception as error:
        # Other processes cannot import ops made at run time, such as ops of torchkiln.jit.
        raise UnavailableError(f"the op cannot be pickled: {error}") from error
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, message],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    where = Where(spec, "fork_of_a_cpu_only_parent", spec.typical(device, dtype))
    require(done.returncode == 0, where, f"exit {done.returncode}: {done.stderr[-2000:]}")
