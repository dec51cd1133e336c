"""From an idea to a running kernel in a tenth of a second, without a CUDA toolkit."""

from torchkiln.jit.module import Kernel, Module, inline, load
from torchkiln.jit.nvrtc import CompileError

__all__ = ["CompileError", "Kernel", "Module", "inline", "load"]
