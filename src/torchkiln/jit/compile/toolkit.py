"""Finds what kernels are compiled with: NVRTC and CUDA's headers, from torch's dependencies first.

Torch with CUDA brings both, so that nothing has to be installed. What else there is on the machine
is taken where they are missing.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Toolkit:
    """Where NVRTC lies, and where the headers that belong to it."""

    library: Path
    includes: tuple[Path, ...]

    @functools.cached_property
    def identity(self) -> str:
        """Changes when another NVRTC takes this one's place."""
        facts = self.library.stat()
        return f"{self.library.resolve()}:{facts.st_size}:{facts.st_mtime_ns}"


def torchkiln_include() -> Path:
    """The folder with torchkiln's own headers."""
    import torchkiln  # noqa: PLC0415  this package is a part of it

    return Path(torchkiln.cmake_prefix_path).parents[1] / "include"


def roots() -> Iterator[Path]:
    """Folders with a CUDA: those in Python's environment, then the system's, the newest first."""
    site = Path(torch.__file__).parents[1]
    folders = [site, *(Path(entry) for entry in sys.path if entry and Path(entry) != site)]
    for folder in folders:
        nvidia = folder / "nvidia"
        if nvidia.is_dir():
            yield from sorted(nvidia.glob("cu[0-9]*"), reverse=True)
            yield nvidia / "cuda_nvrtc"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in os.environ:
            yield Path(os.environ[name])
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)


def libraries() -> Iterator[tuple[Path, Path]]:
    """Every NVRTC there is, with its root."""
    for root in roots():
        for folder in (root / "lib", root / "lib64"):
            for library in sorted(folder.glob("libnvrtc.so.*"), key=lambda path: len(path.name)):
                yield root, library


def headers_of(root: Path) -> Iterator[Path]:
    """Include folders of a root: with the half precision types, then with CUDA's C++ library."""
    for folder in (root / "include", root.parent / "cuda_runtime" / "include"):
        if (folder / "cuda_fp16.h").is_file():
            yield folder
            if (folder / "cccl" / "nv" / "target").is_file():
                yield folder / "cccl"
            return


def major_of(library: Path) -> str:
    """13 of libnvrtc.so.13.0.88."""
    match = re.search(r"\.so\.(\d+)", library.name)
    return match[1] if match else ""


@functools.cache
def find() -> Toolkit:
    """NVRTC of the CUDA that torch was built with; without such a torch, any."""
    wanted = torch.version.cuda.split(".")[0] if torch.version.cuda else None
    seen = []
    for root, library in libraries():
        includes = tuple(headers_of(root))
        if wanted in (None, major_of(library)) and includes:
            return Toolkit(library, includes)
        seen.append(str(library))
    name = f"libnvrtc.so.{wanted}" if wanted else "libnvrtc.so"
    package = f"nvidia-cuda-nvrtc=={wanted}.*" if wanted else "nvidia-cuda-nvrtc"
    raise RuntimeError(
        f"torchkiln.jit: NVRTC: got {', '.join(seen) or 'none'}, expected {name} and cuda_fp16.h"
        f" beside it. They come with torch's own dependencies; type\n"
        f"  {sys.executable} -m pip install '{package}' '{package.replace('nvrtc', 'runtime')}'"
    )
