"""Kernels that are compiled while Python runs, without a CUDA toolkit."""

from torchkiln.jit.elementwise import Elementwise, elementwise
from torchkiln.jit.extension import extension
from torchkiln.jit.module import Kernel, Module, inline, load
from torchkiln.jit.nvrtc import CompileError
from torchkiln.jit.op import Op, op

__all__ = [
    "CompileError",
    "Elementwise",
    "Kernel",
    "Module",
    "Op",
    "elementwise",
    "extension",
    "inline",
    "load",
    "op",
]
