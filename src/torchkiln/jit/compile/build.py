"""Machine code of a source: read from the cache, else compiled by NVRTC."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import torch

from torchkiln.jit.compile import cache, nvrtc, toolkit
from torchkiln.jit.compile.cache import Binary
from torchkiln.jit.compile.includes import scan, search_folders

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WITHOUT_GPU = "sm_80"
"""The architecture of kernels that are compiled without a GPU."""

# Functions without __device__ count as device functions: headers shared with the CPU have some.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--generate-line-info")

APPENDED = "NVRTC_APPEND_FLAGS"
"""The environment variable from which NVRTC reads further options."""
VARIABLES = re.compile(r"NVRTC|EDG_|LLVM_|NV_NVVM|LIBNVVM")
"""The environment variables that NVRTC and the libraries inside it read."""


def architecture_of(device: int | None = None) -> str:
    """NVRTC's name for the architecture of a GPU, by default the current one."""
    if not torch.cuda.is_available():
        return WITHOUT_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"  # a: features that only this GPU has


def build(
    source: str,
    path: str,
    names: Sequence[str],
    *,
    architecture: str,
    include: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> Binary:
    """Compiles a source, or reads the result of an earlier call from the cache.

    Args:
        source: CUDA C++ of kernels.
        path: the file of the source, for messages and for its own includes; a name without a folder
            if there is no file.
        names: the C++ names of the wanted kernels.
        architecture: sm_90a and the like.
        include: folders with headers, searched before torchkiln's.
        options: options for NVRTC after the default ones.
    """
    tools = toolkit.find()
    settings = (
        *OPTIONS,
        *options,
        f"--gpu-architecture={architecture}",
        *(f"--include-path={folder}" for folder in search_folders(path, include, tools.includes)),
    )
    read_too = (*options, *os.environ.get(APPENDED, "").split())
    found = scan(source, path, include, read_too)
    name = None
    if found.is_complete:
        name = cache.key(
            source,
            path,
            sorted(names),
            sorted((str(file), text) for file, text in found.files.items()),
            settings,
            sorted(item for item in os.environ.items() if VARIABLES.match(item[0])),
            tools.identity(found.names),
        )
        if binary := cache.read(name):
            return binary
    binary = Binary(*nvrtc.compile_program(tools.library, source, path, settings, names))
    # The name is a hash of the headers as they were read above. If a header was saved between that
    # and the compilation, the name is wrong, so nothing is stored.
    if name is not None and scan(source, path, include, read_too) == found:
        cache.write(name, binary)
    return binary
