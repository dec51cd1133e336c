"""From a source to machine code: the cache, else NVRTC."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchkiln.jit.compile import cache, nvrtc, toolkit
from torchkiln.jit.compile.cache import Binary
from torchkiln.jit.compile.includes import included

if TYPE_CHECKING:
    from collections.abc import Sequence

WITHOUT_GPU = "sm_80"
"""What is compiled for where no GPU says otherwise."""

# Functions without __device__ are taken for the device: headers that serve the CPU, too, have some.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--generate-line-info")


def architecture_of(device: int | None = None) -> str:
    """The name that NVRTC has for a GPU, by default the current one."""
    if not torch.cuda.is_available():
        return WITHOUT_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"  # a: all of that very GPU


def build(
    source: str,
    path: str,
    names: Sequence[str],
    *,
    architecture: str,
    include: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> Binary:
    """Compiles, or reads what an earlier call has compiled.

    Args:
        source: CUDA C++ of kernels.
        path: where the source lies, for messages and for its own includes.
        names: C++ names of the kernels that are wanted.
        architecture: sm_90a and the like.
        include: folders with headers, before torchkiln's own.
        options: NVRTC's, after ours.
    """
    tools = toolkit.find()
    ours = toolkit.torchkiln_include()
    beside = Path(path).parent
    ours_first = (ours / "torchkiln" / "nvrtc", *include, ours)
    files = included(source, beside, ours_first)
    settings = (
        *OPTIONS,
        *options,
        f"--gpu-architecture={architecture}",
        *(f"--include-path={folder}" for folder in (beside, *ours_first, *tools.includes)),
    )
    name = None
    if files is not None:
        headers = sorted((str(file), text) for file, text in files.items())
        name = cache.key(source, path, sorted(names), headers, settings, tools.identity)
        if binary := cache.read(name):
            return binary
    code, lowered, _ = nvrtc.compile_program(tools.library, source, path, settings, names)
    binary = Binary(code, lowered)
    # The compiler has read headers after us: one that was saved meanwhile belongs to another name.
    if name is not None and included(source, beside, ours_first) == files:
        cache.write(name, binary)
    return binary
