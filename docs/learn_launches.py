"""Launches of the kernels in docs/learn."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchkiln import jit

LEARN = Path(__file__).resolve().parent / "learn"
THREADS = 256
EPS = 1e-5
SCALE = 0.5


@functools.cache
def load(file: str) -> jit.Module:
    """The kernels of a file below this folder. Some include headers of the repository's cuda/."""
    return jit.load(LEARN / file, include=[LEARN.parents[1] / "cuda"])


def kernel(file: str, name: str, *arguments: object) -> jit.Kernel:
    """A kernel of a file; of a template, with its arguments."""
    return load(file)[f"{name}<{', '.join(map(str, arguments))}>" if arguments else name]


def cxx(tensor: Tensor) -> str:
    """The C++ type of the elements."""
    return {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}[tensor.dtype]


def lanes(tensor: Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // tensor.itemsize


def blocks(threads: int) -> int:
    """Blocks of THREADS threads."""
    return -(-threads // THREADS)


# A square


def square(x: Tensor) -> Tensor:
    """One element per thread."""
    y = torch.empty_like(x)
    kernel("square/1_square.cu", "square")[blocks(x.numel()), THREADS](x, y, x.numel())
    return y


def square_vectors(x: Tensor) -> Tensor:
    """16 bytes per thread."""
    y = torch.empty_like(x)
    run = kernel("square/2_vectors.cu", "square", cxx(x))
    run[blocks(-(-x.numel() // lanes(x))), THREADS](x, y, x.numel())
    return y


def vector_add(a: Tensor, b: Tensor) -> Tensor:
    """The exercise of the square."""
    y = torch.empty_like(a)
    run = kernel("solutions/vector_add.cu", "vector_add", cxx(a))
    run[blocks(-(-a.numel() // lanes(a))), THREADS](a, b, y, a.numel())
    return y


# Fusion


def separate(x: Tensor, bias: Tensor) -> Tensor:
    """Three kernels."""
    first, second, y = (torch.empty_like(x) for _ in range(3))
    n, grid = x.numel(), blocks(x.numel() // lanes(x))
    launch = functools.partial(kernel, "fusion/1_separate.cu")
    launch("multiply", cxx(x))[grid, THREADS](x, first, SCALE, n)
    launch("add", cxx(x))[grid, THREADS](first, bias, second, x.shape[1], n)
    launch("relu", cxx(x))[grid, THREADS](second, y, n)
    return y


def fused(x: Tensor, bias: Tensor) -> Tensor:
    """One kernel."""
    y = torch.empty_like(x)
    run = kernel("fusion/2_fused.cu", "bias_relu", cxx(x))
    run[blocks(x.numel() // lanes(x)), THREADS](x, bias, y, SCALE, x.shape[1], x.numel())
    return y


def fused_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """The exercise of fusion."""
    y = torch.empty_like(x)
    run = kernel("solutions/bias_relu_residual.cu", "bias_relu_residual", cxx(x))
    grid = blocks(x.numel() // lanes(x))
    run[grid, THREADS](x, bias, residual, y, SCALE, x.shape[1], x.numel())
    return y


# A reduction


def one_per_thread(file: str) -> Callable[[Tensor], Tensor]:
    """Steps 1 to 3: a thread for each element."""

    def run(x: Tensor) -> Tensor:
        out = torch.zeros((), device=x.device)
        kernel(file, "sum")[blocks(x.numel()), THREADS](x, out, x.numel())
        return out

    return run


def resident_blocks(x: Tensor) -> int:
    """Blocks of THREADS threads that run at the same time: 8 per multiprocessor."""
    return 8 * torch.cuda.get_device_properties(x.device).multi_processor_count


def sum_vectors(x: Tensor) -> Tensor:
    """Step 4."""
    out = torch.zeros((), device=x.device)
    kernel("reduction/4_vectors.cu", "sum")[resident_blocks(x), THREADS](x, out, x.numel())
    return out


@functools.cache
def workspace(device: torch.device, count: int) -> tuple[Tensor, Tensor]:
    """Sums of blocks, and the count of blocks that ended, which each launch leaves at zero."""
    return torch.empty(count, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def sum_same_bits(x: Tensor) -> Tensor:
    """Step 5."""
    out = torch.empty((), device=x.device)
    grid = resident_blocks(x)
    run = kernel("reduction/5_same_bits.cu", "sum")
    run[grid, THREADS](x, out, x.numel(), *workspace(x.device, grid))
    return out


def column_sum(x: Tensor) -> Tensor:
    """The exercise of the reduction."""
    (rows, columns), count = x.shape, 64
    parts, out = torch.empty(count, columns, device=x.device), torch.empty(columns, device=x.device)
    kernels, grid = load("solutions/column_sum.cu"), blocks(columns)
    kernels.sum_parts[(grid, count), THREADS](x, parts, rows, columns)
    kernels.add_parts[grid, THREADS](parts, out, count, columns)
    return out


# A norm


def norm_per_thread(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Step 1."""
    y, (rows, columns) = torch.empty_like(x), x.shape
    run = kernel("norm/1_thread_per_row.cu", "layer_norm", cxx(x))
    run[blocks(rows), THREADS](x, weight, bias, y, rows, columns, EPS)
    return y


def norm_per_block(file: str, *, in_registers: bool = False) -> Callable[..., Tensor]:
    """Steps 2 to 5."""

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, (rows, columns) = torch.empty_like(x), x.shape
        vectors = [blocks(-(-columns // lanes(x)))] if in_registers else []
        found = kernel(file, "layer_norm", cxx(x), *vectors)
        found[rows, THREADS](x, weight, bias, y, columns, EPS)
        return y

    return run


def rms_norm(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    """The exercise of the norm."""
    y, (rows, columns) = torch.empty_like(x), x.shape
    run = kernel("solutions/rms_norm.cu", "rms_norm", cxx(x), blocks(-(-columns // lanes(x))))
    run[rows, THREADS](x, weight, y, columns, EPS)
    return y


def rms_norm_gradient(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """The exercise of the last page."""
    y, (rows, columns) = torch.empty_like(x), x.shape
    vectors = blocks(-(-columns // lanes(x)))
    run = kernel("solutions/rms_norm_gradient.cu", "rms_norm_gradient", cxx(x), vectors)
    run[rows, THREADS](grad, x, weight, y, columns, EPS)
    return y


# A product


def product(file: str, tile: int, block: int | tuple[int, int], shared: int = 0) -> Any:
    """Steps 1 to 5: a block for each square tile of the result."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[0]
        c = torch.empty(m, n, dtype=a.dtype, device=a.device)
        grid = (-(-n // tile), -(-m // tile))
        kernel(file, "product")[grid, block, shared](a, b, c, m, n, k)
        return c

    return run


@functools.lru_cache(maxsize=64)
def tensor_map(address: int, rows: int, columns: int, box_rows: int) -> bytes:
    """The description of a bfloat16 matrix from which TMA copies boxes of box_rows x 64."""
    memory = (ctypes.c_uint8 * (128 + 64))()
    first = ctypes.addressof(memory)
    aligned = first + -first % 64
    bfloat16, swizzle_128b, l2_256b = 9, 3, 3
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        bfloat16,
        2,  # dimensions, the contiguous one first
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * 2),  # bytes from row to row
        (ctypes.c_uint32 * 2)(64, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        swizzle_128b,
        l2_256b,
        0,  # elements outside the matrix arrive as zeros
    )
    if status != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled: got status {status}, expected 0")
    return ctypes.string_at(aligned, 128)


def product_hopper(a: Tensor, b: Tensor, *, any_size: bool = False) -> Tensor:
    """Step 6, or the solution that takes any size."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    rows, columns, depth, stages = 128, 256, 64, 4
    shared = stages * ((rows + columns) * depth * 2 + 2 * 8)
    maps = tensor_map(a.data_ptr(), m, k, rows), tensor_map(b.data_ptr(), n, k, columns)
    grid = (-(-n // columns), -(-m // rows))
    if any_size:
        run = kernel("solutions/product_of_any_size.cu", "product_of_any_size")
        run[grid, 3 * 128, shared](*maps, c, m, n, k)
    else:
        kernel("product/6_hopper.cu", "product")[grid, 3 * 128, shared](*maps, c, n, k)
    return c


def linear_relu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """The exercise of the tensor cores."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    run = kernel("solutions/linear_relu.cu", "linear_relu")
    run[(n // 128, m // 128), THREADS](a, b, bias, c, m, n, k)
    return c


# FP8


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Step 1: the numbers, and the scales in the order that products read."""
    rows, k = x.shape
    data = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(k // 128, rows, device=x.device)
    run = kernel("fp8/1_quantize.cu", "quantize")
    run[blocks(x.numel() // 8), THREADS](x, data, scale, rows, k)
    return data, scale.T


def dequantize(x: Tensor) -> Tensor:
    """The exercise of FP8, of what step 1 writes."""
    data, scale = quantize(x)
    y = torch.empty_like(x)
    run = kernel("solutions/dequantize.cu", "dequantize")
    run[blocks(x.numel() // 8), THREADS](data, scale.T, y, *x.shape)
    return y
