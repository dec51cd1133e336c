"""What a kernel is called with, against what its signature says."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.call.signature import NUMBERS, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.jit.call.signature import Signature

MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = (1024, 1024, 64)
LIMITS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in NUMBERS
    if not dtype.is_floating_point and dtype != torch.bool
}
"""Of integers."""
Size = int | tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """Float32 of torch.float32, in lower case."""
    return str(dtype).removeprefix("torch.")


def sizes(where: str, given: Size, most: tuple[int, int, int]) -> tuple[int, int, int]:
    """Three sizes of a grid or a block."""
    if type(given) is int and 1 <= given <= most[0]:
        return given, 1, 1
    sizes = given if isinstance(given, tuple) else (given,)
    fits = 1 <= len(sizes) <= 3 and all(isinstance(n, int) for n in sizes)
    if not fits or any(not 1 <= n <= m for n, m in zip(sizes, most, strict=False)):
        raise ValueError(f"{where}: got {given}, expected up to three sizes from 1 to {most}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def placed(where: str, signature: Signature, given: Sequence[Any]) -> int | None:
    """The index of the GPU that all tensors are on; None where there is no tensor."""
    device = None
    for parameter, value in zip(signature.parameters, given, strict=True):
        if not isinstance(value, Tensor):
            continue
        if not value.is_cuda:
            got = f"a tensor on {value.device}"
            raise ValueError(f"{where}: {parameter.name}: got {got}, expected one on a GPU")
        index = value.get_device()
        if device is None:
            device = index
        elif device != index:
            raise ValueError(
                f"{where}: {parameter.name}: got a tensor on {value.device}, expected one on"
                f" cuda:{device}, where the tensors before it are"
            )
    return device


def pack(where: str, signature: Signature, given: Sequence[Any]) -> list[Any]:
    """The arguments as ctypes objects."""
    parameters = signature.parameters
    if len(given) != len(parameters):
        count = f"{len(given)} argument{'s' if len(given) != 1 else ''}"
        raise TypeError(f"{where}: got {count}, expected {len(parameters)}: {signature}")
    return [pack_one(where, p, v) for p, v in zip(parameters, given, strict=True)]


def pack_one(where: str, parameter: Parameter, value: Any) -> Any:
    """One argument."""
    if parameter.pointer:
        return pack_pointer(where, parameter, value)
    dtype = parameter.dtype
    if dtype is None:
        return pack_bytes(where, parameter, value)
    whole = dtype in LIMITS or dtype == torch.bool
    if not isinstance(value, int if whole else (int, float)):
        wanted = "an int" if whole else "a number"
        got = type(value).__name__
        raise TypeError(f"{where}: {parameter.name}: got {got}, expected {wanted} for {parameter}")
    if dtype == torch.float16:
        return ctypes.c_uint16(struct.unpack("<H", struct.pack("<e", value))[0])
    if dtype not in NUMBERS:
        bits = torch.tensor([value]).to(dtype).view(torch.uint8).tolist()
        return (ctypes.c_uint8 * len(bits))(*bits)
    if dtype in LIMITS:
        least, most = LIMITS[dtype]
        if not least <= value <= most:
            raise OverflowError(
                f"{where}: {parameter.name}: got {value}, expected {least} to {most}"
                f" for {parameter}"
            )
    return NUMBERS[dtype](value)


def pack_bytes(where: str, parameter: Parameter, value: Any) -> Any:
    """An argument of a type of the author's."""
    if isinstance(value, (ctypes.Structure, ctypes.Array, ctypes._SimpleCData)):
        return value
    if isinstance(value, bytes):
        return ctypes.create_string_buffer(value, len(value))
    got = type(value).__name__
    wanted = f"the bytes of a {parameter.type}"
    raise TypeError(f"{where}: {parameter.name}: got {got}, expected {wanted}")


def pack_pointer(where: str, parameter: Parameter, value: Any) -> ctypes.c_void_p:
    """The address of a tensor's first element; None is the null pointer."""
    if value is None:
        return ctypes.c_void_p(None)
    if not isinstance(value, Tensor):
        got, wanted = type(value).__name__, f"a torch.Tensor for {parameter}"
        raise TypeError(f"{where}: {parameter.name}: got {got}, expected {wanted}")
    if parameter.dtype not in (None, value.dtype):
        got, wanted = dtype_name(value.dtype), f"{dtype_name(parameter.dtype)} for {parameter}"
        raise TypeError(f"{where}: {parameter.name}: got dtype {got}, expected {wanted}")
    return ctypes.c_void_p(value.data_ptr())
