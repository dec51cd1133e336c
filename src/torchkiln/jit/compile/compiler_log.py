"""Selects the errors from NVRTC's log, and adds advice about common ones."""

from __future__ import annotations

import re

from torchkiln.jit.compile.toolkit import pip_install

HOST_CODE = re.compile(
    r'"(?:torch/|ATen/|c10/|pybind11/)'
    r'|"(?:iostream|vector|string|memory|cstdio|stdio\.h|cstdlib|stdlib\.h)"'
    r'|identifier "cuda(?!Grid|Trigger)[A-Z]'
    r"|\b(?:at|torch|c10)::|launching a kernel|kernel launch"
)


def source_errors(log: str) -> str:
    """The log without follow-up errors of ``__nv_name_map``, which NVRTC uses to look up names."""
    parts = log.split("\n\n")
    kept = [part for part in parts if not part.startswith("__nv_name_map")]
    if len(kept) == len(parts) or not any(": error: " in part for part in kept):
        return log
    return "\n\n".join(part for part in kept if " in the compilation of " not in part)


def advice(log: str) -> str:
    """A line with the remedy for host code or a missing CUDA header; empty for other errors."""
    if HOST_CODE.search(log):
        return (
            "\nNVRTC compiles kernels and device functions only. For a source with code for the"
            " host, use torchkiln.jit.extension(sources=[...])"
        )
    if '"nv/target"' in log or '"cuda/' in log or '"cub/' in log:
        return (
            "\nThis header belongs to CUDA's C++ library; to install it, type\n"
            f"  {pip_install('cccl')}"
        )
    return ""
