"""Measures the host time of handles and memory: from torch's pools, or created in each call.

Needs a GPU and torch with CUDA. Prints the table of docs/sdk.md; each figure is the median time of
a call, in microseconds, the call through ctypes or Python included.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

CUDA = (torch.version.cuda or "13").split(".")[0]
MIB = 1 << 20


def library(name: str) -> ctypes.CDLL:
    """A library that torch has loaded already."""
    return ctypes.CDLL(f"lib{name}.so.{'12' if name == 'cusparse' else CUDA}")


def microseconds(call: Callable[[], object], count: int) -> float:
    """The median time of ``count`` calls, after three warm-up calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def made_and_destroyed(name: str, create: str, destroy: str) -> Callable[[], None]:
    """A handle for one call."""
    functions = library(name)

    def call() -> None:
        handle = ctypes.c_void_p()
        if getattr(functions, create)(ctypes.byref(handle)) != 0:
            raise RuntimeError(f"host_costs: {create}: failed")
        getattr(functions, destroy)(handle)

    return call


def pooled(symbol: str) -> Callable[[], object]:
    """A handle of ATen's pool for the current device, thread and stream."""
    libtorch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    function = getattr(libtorch, symbol)
    function.restype = ctypes.c_void_p
    return function


def allocated(size: int) -> Callable[[], None]:
    """Memory of the device for one call."""
    runtime = library("cudart")

    def call() -> None:
        pointer = ctypes.c_void_p()
        if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            raise RuntimeError("host_costs: cudaMalloc: failed")
        runtime.cudaFree(pointer)

    return call


def cached(size: int) -> Callable[[], object]:
    """The same from torch's caching allocator, through Python."""
    return lambda: torch.empty(size, dtype=torch.uint8, device="cuda")


def main() -> None:
    """Measures all of them."""
    torch.cuda.init()
    torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")
    torch.cuda.synchronize()
    rows = [
        (
            "cuBLAS handle",
            made_and_destroyed("cublas", "cublasCreate_v2", "cublasDestroy_v2"),
            pooled("_ZN2at4cuda24getCurrentCUDABlasHandleEv"),
        ),
        (
            "cuBLASLt handle",
            made_and_destroyed("cublasLt", "cublasLtCreate", "cublasLtDestroy"),
            pooled("_ZN2at4cuda26getCurrentCUDABlasLtHandleEv"),
        ),
        (
            "cuSPARSE handle",
            made_and_destroyed("cusparse", "cusparseCreate", "cusparseDestroy"),
            pooled("_ZN2at4cuda26getCurrentCUDASparseHandleEv"),
        ),
        ("workspace of 4 MiB", allocated(4 * MIB), cached(4 * MIB)),
        ("workspace of 256 MiB", allocated(256 * MIB), cached(256 * MIB)),
    ]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("| what | created and destroyed | from torch's pool |")
    print("|---|---|---|")
    for name, own, pool in rows:
        print(f"| {name} | {microseconds(own, 20):.1f} us | {microseconds(pool, 200):.1f} us |")


if __name__ == "__main__":
    main()
