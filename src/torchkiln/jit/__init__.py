"""Kernels that are compiled while Python runs, without a CUDA toolkit."""

from torchkiln.jit.compile.nvrtc import CompileError
from torchkiln.jit.cpp_extension import extension
from torchkiln.jit.custom_op import Op, op
from torchkiln.jit.elementwise_op import Elementwise, elementwise
from torchkiln.jit.module import Kernel, Module, inline, load

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
