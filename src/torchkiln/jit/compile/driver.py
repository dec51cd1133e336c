"""CUDA's driver through ctypes: loads machine code and launches its kernels.

torch's dependency cuda-bindings wraps the driver, too. Its import takes 30 ms, ten times as long as
a start from the cache, and saves 1 us per launch.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, c_char_p, c_void_p
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute
DEFAULT_SHARED_BYTES = 48 * 1024
"""Shared memory that every kernel may use without asking the driver."""


@functools.cache
def library() -> Any:
    """The driver, which is installed with the GPU."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            "torchkiln.jit: launch: got no libcuda.so.1, expected the driver of an NVIDIA GPU;"
            " kernels are compiled here, but cannot run"
        ) from error


def require(status: int, call: str) -> None:
    """Raises the driver's error for a status other than success."""
    if status == 0:
        return
    driver = library()
    name, words = c_char_p(), c_char_p()
    driver.cuGetErrorName(status, byref(name))
    driver.cuGetErrorString(status, byref(words))
    found = f"{(name.value or b'').decode() or status} ({(words.value or b'unknown').decode()})"
    raise RuntimeError(f"torchkiln.jit: {call}: got {found}, expected success")


def require_gpu(kernel: str) -> None:
    """Raises, with the reason, if torch has no GPU."""
    if torch.cuda.is_initialized() or torch.cuda.is_available():  # is_initialized() is cheaper
        return
    if torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) has no CUDA"
    else:
        reason = f"torch {torch.__version__} finds no GPU; check that nvidia-smi does"
    raise RuntimeError(
        f"torchkiln.jit: {kernel}: got no GPU, expected one: {reason}. Kernels are compiled here,"
        " but cannot run"
    )


def on_device(index: int) -> AbstractContextManager[object]:
    """Makes a device current. ``torch.cuda.device`` takes microseconds even for the current one."""
    return nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


def capturing() -> bool:
    """Whether launches are captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def make_current(device: int) -> None:
    """Sets torch's context of a device if the thread has no context yet."""
    driver = library()
    context = c_void_p()
    require(driver.cuCtxGetCurrent(byref(context)), "cuCtxGetCurrent")
    if not context.value:
        require(driver.cuDevicePrimaryCtxRetain(byref(context), device), "the context")
        require(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Function:
    """A kernel loaded on one device, until the process ends."""

    def __init__(self, name: str, code: bytes, mangled: str) -> None:
        self.name = name
        driver = library()
        module, self._handle = c_void_p(), c_void_p()
        require(driver.cuModuleLoadData(byref(module), code), f"loading {name}")
        status = driver.cuModuleGetFunction(byref(self._handle), module, mangled.encode())
        require(status, f"finding {name}")
        self._shared_bytes = DEFAULT_SHARED_BYTES

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        stream: int,
        arguments: Sequence[Any],
    ) -> None:
        """Queues the kernel on a stream of the current context.

        Args:
            grid: blocks along x, y, z.
            block: threads per block along x, y, z.
            shared_bytes: bytes of dynamic shared memory per block.
            stream: the handle of the stream.
            arguments: ctypes objects; the driver copies them before this returns.
        """
        driver = library()
        if shared_bytes > self._shared_bytes:
            status = driver.cuFuncSetAttribute(
                self._handle, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
            require(status, f"{self.name}: {shared_bytes} bytes of shared memory")
            self._shared_bytes = shared_bytes
        addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        # argtypes is not set, because its conversions take half of the call's time. Without it
        # ctypes passes a Python int as a C int, so pointers are wrapped in c_void_p.
        status = driver.cuLaunchKernel(
            self._handle, *grid, *block, shared_bytes, c_void_p(stream), addresses, None
        )
        if status != 0:
            require(status, f"{self.name}[{tuple(grid)}, {tuple(block)}, {shared_bytes}]")
