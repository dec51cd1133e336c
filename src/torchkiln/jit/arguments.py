"""What a kernel is called with, against what its signature says."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.signature import NUMBERS, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.jit.signature import Signature

MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = (1024, 1024, 64)
Size = int | tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """Float32 of torch.float32, in lower case."""
    return str(dtype).removeprefix("torch.")


def sizes(where: str, given: Size, most: tuple[int, int, int]) -> tuple[int, int, int]:
    """Three sizes of a grid or a block."""
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
        if value.device.type != "cuda":
            got = f"a tensor on {value.device}"
            raise ValueError(f"{where}: {parameter.name}: got {got}, expected one on a GPU")
        if device not in (None, value.device.index):
            raise ValueError(
                f"{where}: {parameter.name}: got a tensor on {value.device}, expected one on"
                f" cuda:{device}, where the tensors before it are"
            )
        device = value.device.index
    return device


def pack(where: str, signature: Signature, given: Sequence[Any]) -> list[Any]:
    """The arguments as ctypes objects."""
    parameters = signature.parameters
    if len(given) != len(parameters):
        count = f"{len(given)} argument{'s' if len(given) != 1 else ''}"
        raise TypeError(f"{where}: got {count}, expected {len(parameters)}: {signature}")
    return [pack_one(f"{where}: {p.name}", p, v) for p, v in zip(parameters, given, strict=True)]


def pack_one(where: str, parameter: Parameter, value: Any) -> Any:
    """One argument."""
    if parameter.pointer:
        return pack_pointer(where, parameter, value)
    kind, dtype = type(value).__name__, parameter.dtype
    if dtype is None:
        if isinstance(value, (ctypes.Structure, ctypes.Array, ctypes._SimpleCData)):
            return value
        if isinstance(value, bytes):
            return ctypes.create_string_buffer(value, len(value))
        raise TypeError(f"{where}: got {kind}, expected the bytes of a {parameter.type}")
    whole = not dtype.is_floating_point
    if not isinstance(value, int if whole else (int, float)):
        wanted = "an int" if whole else "a number"
        raise TypeError(f"{where}: got {kind}, expected {wanted} for {parameter}")
    if dtype == torch.float16:
        return ctypes.c_uint16(struct.unpack("<H", struct.pack("<e", value))[0])
    if dtype not in NUMBERS:
        bits = torch.tensor([value]).to(dtype).view(torch.uint8).tolist()
        return (ctypes.c_uint8 * len(bits))(*bits)
    if whole and dtype != torch.bool:
        limits = torch.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            span = f"{limits.min} to {limits.max}"
            raise OverflowError(f"{where}: got {value}, expected {span} for {parameter}")
    return NUMBERS[dtype](value)


def pack_pointer(where: str, parameter: Parameter, value: Any) -> ctypes.c_void_p:
    """The address of a tensor's first element; None is the null pointer."""
    if value is None:
        return ctypes.c_void_p(None)
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise TypeError(f"{where}: got {got}, expected a torch.Tensor for {parameter}")
    if parameter.dtype not in (None, value.dtype):
        wanted = f"{dtype_name(parameter.dtype)} for {parameter}"
        raise TypeError(f"{where}: got dtype {dtype_name(value.dtype)}, expected {wanted}")
    return ctypes.c_void_p(value.data_ptr())
