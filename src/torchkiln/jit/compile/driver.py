"""CUDA's driver through ctypes: loads compiled code and queues its kernels."""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute
SHARED_BYTES_ALWAYS_ALLOWED = 48 * 1024


@functools.cache
def library() -> Any:
    """The driver, which comes with the GPU's."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            "torchkiln.jit: launch: got no libcuda.so.1, expected the driver of an NVIDIA GPU;"
            " kernels are compiled here, but cannot run"
        ) from error
    addresses = ctypes.POINTER(c_void_p)
    driver.cuLaunchKernel.argtypes = (c_void_p, *[c_uint] * 7, c_void_p, addresses, addresses)
    return driver


def require(status: int, call: str) -> None:
    """Raises the driver's words for a status that is none of success."""
    if status == 0:
        return
    driver = library()
    name, words = c_char_p(), c_char_p()
    driver.cuGetErrorName(c_int(status), byref(name))
    driver.cuGetErrorString(c_int(status), byref(words))
    found = f"{(name.value or b'').decode() or status} ({(words.value or b'unknown').decode()})"
    raise RuntimeError(f"torchkiln.jit: {call}: got {found}, expected success")


def require_gpu(what: str) -> None:
    """Says why nothing can be launched."""
    if torch.cuda.is_initialized() or torch.cuda.is_available():  # the first costs less
        return
    if torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) has no CUDA"
    else:
        reason = f"torch {torch.__version__} sees no GPU; nvidia-smi tells whether the driver does"
    raise RuntimeError(
        f"torchkiln.jit: {what}: got no GPU, expected one: {reason}. Kernels are compiled here, but"
        " cannot run"
    )


def on_device(index: int) -> AbstractContextManager[object]:
    """Makes a device the current one, if it is not: torch's own costs some microseconds always."""
    return nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


def capturing() -> bool:
    """Whether launches go into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def make_current(device: int) -> None:
    """Torch's context of the device, which a thread that never called CUDA has not yet."""
    driver = library()
    context = c_void_p()
    require(driver.cuCtxGetCurrent(byref(context)), "cuCtxGetCurrent")
    if not context.value:
        require(driver.cuDevicePrimaryCtxRetain(byref(context), c_int(device)), "the context")
        require(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Function:
    """A kernel in the memory of one device. The code stays there as long as the process."""

    def __init__(self, name: str, code: bytes, lowered: str) -> None:
        self.name = name
        driver = library()
        module, self._handle = c_void_p(), c_void_p()
        require(driver.cuModuleLoadData(byref(module), code), f"loading {name}")
        status = driver.cuModuleGetFunction(byref(self._handle), module, lowered.encode())
        require(status, f"finding {name}")
        self._shared_bytes = SHARED_BYTES_ALWAYS_ALLOWED

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
            block: threads of each along x, y, z.
            shared_bytes: of dynamic shared memory.
            stream: its handle.
            arguments: ctypes objects, which are copied before this returns.
        """
        driver = library()
        if shared_bytes > self._shared_bytes:
            status = driver.cuFuncSetAttribute(
                self._handle, c_int(MAX_DYNAMIC_SHARED_SIZE_BYTES), c_int(shared_bytes)
            )
            require(status, f"{self.name}: {shared_bytes} bytes of shared memory")
            self._shared_bytes = shared_bytes
        addresses = (c_void_p * max(len(arguments), 1))(*map(ctypes.addressof, arguments))
        status = driver.cuLaunchKernel(
            self._handle, *grid, *block, shared_bytes, stream, addresses, None
        )
        if status != 0:
            require(status, f"{self.name}[{tuple(grid)}, {tuple(block)}, {shared_bytes}]")
