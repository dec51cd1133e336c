"""NVRTC, NVIDIA's compiler as a library, through ctypes.

torch's dependency cuda-bindings wraps NVRTC, too. Its import takes 30 to 70 ms, about half of the
time to compile a kernel, and a torch without CUDA does not install it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchkiln.jit.compile.compiler_log import advice, source_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

NOWHERE = "/dev/null/"
"""The folder of sources without a file. NVRTC searches the folder of the source, or the working
folder for a name without a folder. This folder contains no files."""


class CompileError(RuntimeError):
    """A source does not compile. The message contains the compiler's log, with file and line."""


@functools.cache
def load(library: Path) -> Any:
    """Loads NVRTC, after its builtins library, which NVRTC looks up without a path."""
    for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(library))
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    return nvrtc


def _call(nvrtc: Any, function: str, *arguments: Any) -> None:
    status = getattr(nvrtc, function)(*arguments)
    if status != 0:
        reason = nvrtc.nvrtcGetErrorString(status).decode()
        raise RuntimeError(f"torchkiln.jit: {function}: got {reason}, expected success")


def _output(nvrtc: Any, program: c_void_p, name: str) -> bytes:
    """An output of a program: ``ProgramLog`` or ``CUBIN``."""
    size = c_size_t()
    _call(nvrtc, f"nvrtcGet{name}Size", program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(nvrtc, f"nvrtcGet{name}", program, buffer)
    return buffer.raw


def compile_program(
    library: Path, source: str, path: str, options: Sequence[str], names: Sequence[str]
) -> tuple[bytes, dict[str, str]]:
    """Compiles a source to machine code.

    Args:
        library: the path of NVRTC.
        source: CUDA C++.
        path: the file of the source, or a name for messages.
        options: options for NVRTC.
        names: the C++ names of kernels, template arguments included.

    Returns:
        The machine code, and the mangled name for each of ``names``.
    """
    nvrtc = load(library)
    program = c_void_p()
    file = path if Path(path).is_absolute() else NOWHERE + path
    arguments = (source.encode(), file.encode(), 0, None, None)
    _call(nvrtc, "nvrtcCreateProgram", byref(program), *arguments)
    try:
        for name in names:
            _call(nvrtc, "nvrtcAddNameExpression", program, name.encode())
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        if status != 0:
            log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            log = log.replace(NOWHERE, "")
            errors = source_errors(log.strip()) or nvrtc.nvrtcGetErrorString(status).decode()
            raise CompileError(f"torchkiln.jit: {path}: does not compile\n{errors}{advice(log)}")
        mangled = {}
        for name in names:
            text = c_char_p()
            _call(nvrtc, "nvrtcGetLoweredName", program, name.encode(), byref(text))
            mangled[name] = (text.value or b"").decode()
        return _output(nvrtc, program, "CUBIN"), mangled
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
