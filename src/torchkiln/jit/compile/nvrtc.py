"""NVRTC, NVIDIA's compiler as a library, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import re
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COMPILATION_ERROR = 6


class CompileError(RuntimeError):
    """A source that does not compile; the message has the compiler's, with file and line."""


@functools.cache
def load(library: Path) -> Any:
    """The library. It looks for a second one by name only, which is therefore loaded before it."""
    for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(library))
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    return nvrtc


def _require(nvrtc: Any, status: int, call: str) -> None:
    if status != 0:
        reason = nvrtc.nvrtcGetErrorString(status).decode()
        raise RuntimeError(f"torchkiln.jit: {call}: got {reason}, expected success")


def _text(nvrtc: Any, program: c_void_p, what: str) -> bytes:
    """The log, or the code, of a program."""
    size = c_size_t()
    _require(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)), f"the {what} size")
    buffer = ctypes.create_string_buffer(size.value)
    _require(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), f"the {what}")
    return buffer.raw


def compile_program(
    library: Path, source: str, path: str, options: Sequence[str], names: Sequence[str]
) -> tuple[bytes, dict[str, str], str]:
    """Compiles to machine code.

    Args:
        library: NVRTC.
        source: what is compiled.
        path: what messages call it.
        options: NVRTC's.
        names: C++ names of kernels, template arguments included.

    Returns:
        The code, the names as they are in it, and what the compiler said.
    """
    nvrtc = load(library)
    program = c_void_p()
    status = nvrtc.nvrtcCreateProgram(
        byref(program), source.encode(), path.encode(), c_int(0), None, None
    )
    _require(nvrtc, status, "nvrtcCreateProgram")
    try:
        for name in names:
            status = nvrtc.nvrtcAddNameExpression(program, name.encode())
            _require(nvrtc, status, f"nvrtcAddNameExpression({name!r})")
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, c_int(len(options)), given)
        log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status != 0:
            said = authors_part(log) or nvrtc.nvrtcGetErrorString(status).decode()
            raise CompileError(f"torchkiln.jit: {path}: does not compile\n{said}{hint(log)}")
        lowered = {}
        for name in names:
            text = c_char_p()
            status = nvrtc.nvrtcGetLoweredName(program, name.encode(), byref(text))
            _require(nvrtc, status, f"nvrtcGetLoweredName({name!r})")
            lowered[name] = (text.value or b"").decode()
        return _text(nvrtc, program, "CUBIN"), lowered, log
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def authors_part(log: str) -> str:
    """The log without what follows from the request for names of kernels that do not compile."""
    parts = log.split("\n\n")
    kept = [part for part in parts if not part.startswith("__nv_name_map")]
    if len(kept) == len(parts) or not any(": error: " in part for part in kept):
        return log
    return "\n\n".join(part for part in kept if " in the compilation of " not in part)


HOST_SIGN = re.compile(
    r'"(?:torch/|ATen/|c10/|pybind11/)'
    r'|"(?:iostream|vector|string|memory|cstdio|stdio\.h|cstdlib|stdlib\.h)"'
    r'|identifier "cuda(?!Grid|Trigger)[A-Z]'
    r"|\b(?:at|torch|c10)::|launching a kernel|kernel launch"
)


def hint(log: str) -> str:
    """What to do about a source with code for the host."""
    if HOST_SIGN.search(log):
        return (
            "\nOnly kernels and device functions are compiled here. For a source with code for the"
            " host, use torchkiln.jit.extension(sources=[...])"
        )
    if '"nv/target"' in log or '"cuda/' in log or '"cub/' in log:
        return (
            "\nThis header belongs to CUDA's C++ library; type\n  python -m pip install"
            " 'nvidia-cuda-cccl'     of torch's CUDA version"
        )
    return ""
