"""Arguments and grid sizes of a launch: checked against the signature, packed for the driver."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.call.signature import NUMBERS, Parameter
from torchkiln.ops._traced import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.jit.call.signature import Signature

MAX_GRID = (2**31 - 1, 65535, 65535)
"""Maximum number of blocks along x, y, z."""
MAX_BLOCK = (1024, 1024, 64)
"""Maximum number of threads along x, y, z. A block has at most 1024 threads in total."""
INTEGER_RANGES = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in NUMBERS
    if not dtype.is_floating_point and dtype != torch.bool
}
Size = int | tuple[int, ...]


def dimensions(
    where: str, name: str, given: Size, most: tuple[int, int, int]
) -> tuple[int, int, int]:
    """The x, y and z of a grid or a block that was given as a number or a tuple.

    Args:
        where: the kernel, for the error.
        name: grid or block, for the error.
        given: one to three sizes.
        most: the limits along x, y, z.
    """
    if type(given) is int and 1 <= given <= most[0]:
        return given, 1, 1
    sizes = given if isinstance(given, tuple) else (given,)
    fits = 1 <= len(sizes) <= 3 and all(isinstance(n, int) for n in sizes)
    if not fits or any(not 1 <= n <= m for n, m in zip(sizes, most, strict=False)):
        raise ValueError(
            f"{where}: {name}: got {given}, expected up to three sizes from 1 to {most}"
        )
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def common_device(where: str, signature: Signature, given: Sequence[Any]) -> int | None:
    """The index of the GPU that holds all tensors; None if no tensor was given."""
    device = None
    for parameter, value in zip(signature.parameters, given, strict=True):
        if not isinstance(value, Tensor):
            continue
        if not value.is_cuda:
            got = f"a tensor on {value.device}"
            raise ValueError(f"{where}: {parameter.name}: got {got}, expected a tensor on a GPU")
        index = value.get_device()
        if device is None:
            device = index
        elif device != index:
            raise ValueError(
                f"{where}: {parameter.name}: got a tensor on {value.device}, expected one on"
                f" cuda:{device}, the device of the tensors before it"
            )
    return device


def pack(where: str, signature: Signature, given: Sequence[Any]) -> list[Any]:
    """The arguments as ctypes objects, checked against the signature.

    Args:
        where: the kernel, for errors.
        signature: the signature of the kernel.
        given: the arguments of the call.
    """
    parameters = signature.parameters
    if len(given) != len(parameters):
        count = f"{len(given)} argument{'s' if len(given) != 1 else ''}"
        raise TypeError(f"{where}: got {count}, expected {len(parameters)}: {signature}")
    return [_pack_one(where, p, v) for p, v in zip(parameters, given, strict=True)]


def _pack_one(where: str, parameter: Parameter, value: Any) -> Any:
    if parameter.pointer:
        return _pack_pointer(where, parameter, value)
    dtype = parameter.dtype
    if dtype is None:
        return _pack_bytes(where, parameter, value)
    is_integer = dtype in INTEGER_RANGES or dtype == torch.bool
    if not isinstance(value, int if is_integer else (int, float)):
        wanted = "an int" if is_integer else "a number"
        got = type(value).__name__
        raise TypeError(f"{where}: {parameter.name}: got {got}, expected {wanted} for {parameter}")
    if dtype == torch.float16:
        return ctypes.c_uint16(struct.unpack("<H", struct.pack("<e", value))[0])
    if dtype not in NUMBERS:
        data = torch.tensor([value]).to(dtype).view(torch.uint8).tolist()
        return (ctypes.c_uint8 * len(data))(*data)
    if dtype in INTEGER_RANGES:
        least, most = INTEGER_RANGES[dtype]
        if not least <= value <= most:
            raise OverflowError(
                f"{where}: {parameter.name}: got {value}, expected {least} to {most}"
                f" for {parameter}"
            )
    return NUMBERS[dtype](value)


def _pack_bytes(where: str, parameter: Parameter, value: Any) -> Any:
    """An argument whose type is a struct of the source, given as bytes or as a ctypes object."""
    if isinstance(value, (ctypes.Structure, ctypes.Array, ctypes._SimpleCData)):
        return value
    if isinstance(value, bytes):
        return ctypes.create_string_buffer(value, len(value))
    got = type(value).__name__
    wanted = f"the bytes of a {parameter.type}"
    raise TypeError(f"{where}: {parameter.name}: got {got}, expected {wanted}")


def _pack_pointer(where: str, parameter: Parameter, value: Any) -> ctypes.c_void_p:
    """The address of a tensor's first element; None gives the null pointer."""
    if value is None:
        return ctypes.c_void_p(None)
    if not isinstance(value, Tensor):
        got, wanted = type(value).__name__, f"a torch.Tensor for {parameter}"
        raise TypeError(f"{where}: {parameter.name}: got {got}, expected {wanted}")
    if parameter.dtype not in (None, value.dtype):
        got, wanted = name_of(value.dtype), f"{name_of(parameter.dtype)} for {parameter}"
        raise TypeError(f"{where}: {parameter.name}: got dtype {got}, expected {wanted}")
    return ctypes.c_void_p(value.data_ptr())
