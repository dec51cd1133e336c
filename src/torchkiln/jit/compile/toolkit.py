"""Finds NVRTC and CUDA's headers: among torch's dependencies first, then on the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import torchkiln

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CXX_LIBRARY = ("cuda", "cub", "thrust")
"""The folders of CUDA's C++ library, with 2,300 files."""


@dataclass(frozen=True)
class Toolkit:
    """The path of NVRTC, and the include folders that belong to it."""

    library: Path
    includes: tuple[Path, ...]

    def identity(self, names: Iterable[str] = ()) -> str:
        """A hash that changes with the installed NVRTC and with the CUDA headers.

        Args:
            names: the headers that a source includes. The files of CUDA's C++ library count only if
                one of these names belongs to it.
        """
        uses_library = any(name.split("/")[0] in CXX_LIBRARY for name in names)
        files = [*self.library.parent.glob("libnvrtc*")]
        facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        # the folder cccl is an include folder itself, so it is read once
        skipped = ("cccl",) if uses_library else ("cccl", *CXX_LIBRARY)
        for folder in self.includes:
            facts += _facts(str(folder), skipped)
        return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()


def _facts(folder: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of each file below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                facts = entry.stat(follow_symlinks=False)
                yield entry.path, facts.st_size, facts.st_mtime_ns
            elif entry.name not in skipped:
                yield from _facts(entry.path, skipped)


def torchkiln_include() -> Path:
    """The folder with torchkiln's own headers."""
    return Path(torchkiln.include_path())


def roots() -> Iterator[Path]:
    """CUDA's folders: first those of Python packages, then the system's, newer versions first."""
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
    """All installed NVRTC libraries: the CUDA folder and the path of each."""
    for root in roots():
        for folder in (root / "lib", root / "lib64"):
            for library in sorted(folder.glob("libnvrtc.so.*"), key=lambda path: len(path.name)):
                yield root, library


def headers_of(root: Path) -> Iterator[Path]:
    """Include folders of a CUDA folder: CUDA's headers, then its C++ library if installed.

    Python packages of CUDA 12 have a folder per component, those of CUDA 13 one common folder.
    """
    packages = root.parent
    for headers, library in (
        (root / "include", root / "include" / "cccl"),
        (packages / "cuda_runtime" / "include", packages / "cuda_cccl" / "include"),
    ):
        if (headers / "cuda_fp16.h").is_file():
            yield headers
            if (library / "nv" / "target").is_file():
                yield library
            return


def major_of(library: Path) -> str:
    """The major version in a library's name: 13 for libnvrtc.so.13.0.88."""
    match = re.search(r"\.so\.(\d+)", library.name)
    return match[1] if match else ""


@functools.cache
def find() -> Toolkit:
    """The first NVRTC with headers of torch's CUDA major version; any if torch has no CUDA."""
    wanted = torch.version.cuda.split(".")[0] if torch.version.cuda else None
    seen = []
    for root, library in libraries():
        includes = tuple(headers_of(root))
        if wanted in (None, major_of(library)) and includes:
            return Toolkit(library, includes)
        seen.append(str(library))
    name = f"libnvrtc.so.{wanted}" if wanted else "libnvrtc.so"
    raise RuntimeError(
        f"torchkiln.jit: NVRTC: got {', '.join(seen) or 'none'}, expected {name} with cuda_fp16.h"
        f" beside it. A torch with CUDA depends on both; to install them, type\n"
        f"  {pip_install('nvrtc,cudart')}"
    )


def pip_install(components: str) -> str:
    """The command that installs components of the CUDA toolkit in the version of torch's CUDA."""
    version = f"=={torch.version.cuda}.*" if torch.version.cuda else ""
    return f"{sys.executable} -m pip install 'cuda-toolkit[{components}]{version}'"
