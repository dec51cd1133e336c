"""C++ and CUDA sources with code for the host, through torch.utils.cpp_extension."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchkiln.jit.compile import cache, toolkit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CUDA_SUFFIXES = (".cu", ".cuh")


def extension(
    sources: Sequence[str | Path],
    *,
    name: str = "",
    cxx_flags: Sequence[str] = (),
    cuda_flags: Sequence[str] = (),
    include: Sequence[str | Path] = (),
    verbose: bool = False,
) -> Any:
    """Builds a Python module of sources with pybind11 or torch's registration, and imports it.

    It takes a compiler, the time that torch's headers take and, for .cu files, nvcc of torch's CUDA
    version; what is only a kernel needs none of it with :func:`torchkiln.jit.load`.

    Args:
        sources: .cpp and .cu files. torchkiln's headers are found.
        name: of the module; by default one made of the paths.
        cxx_flags: for g++, after ours.
        cuda_flags: for nvcc, after ours.
        include: folders with headers.
        verbose: whether the build prints.
    """
    files = [Path(source).resolve() for source in sources]
    if not files:
        raise ValueError("torchkiln.jit.extension: sources: got none, expected .cpp and .cu files")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"torchkiln.jit.extension: sources: got {file}, expected a file"
            )
    digest = hashlib.sha256("\n".join(map(str, files)).encode()).hexdigest()[:8]
    stem = re.sub(r"\W", "_", files[0].stem)
    module = name or f"{stem}_{digest}"
    folder = cache.folder() / "extensions" / _environment() / module
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"torchkiln.jit.extension: cache folder: {folder} cannot be made ({error.strerror});"
            " TORCHKILN_CACHE names another"
        ) from error
    with_cuda = any(file.suffix in CUDA_SUFFIXES for file in files)
    from torch.utils import cpp_extension  # noqa: PLC0415  slow to import

    if with_cuda:
        home = cuda_home(folder.parent)
        cpp_extension.CUDA_HOME = str(home)
    with locked(folder):
        return cpp_extension.load(
            name=module,
            sources=list(map(str, files)),
            extra_cflags=["-O3", "-std=c++17", *cxx_flags],
            extra_cuda_cflags=["-O3", "-std=c++17", "--extended-lambda", *cuda_flags],
            extra_include_paths=[str(toolkit.torchkiln_include()), *map(str, include)],
            build_directory=str(folder),
            with_cuda=with_cuda,
            verbose=verbose,
        )


def _environment() -> str:
    """Modules are for one Python and one torch."""
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    return f"py{python}-torch{torch.__version__}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time in a folder. The lock goes with the process that holds it.

    torch's own is a file, which a killed process leaves and all others then wait for; whoever holds
    ours may remove it.
    """
    with (folder / "torchkiln.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


def cuda_home(folder: Path) -> Path:
    """A toolkit of torch's CUDA version, to the minor: the system's, else one made of packages."""
    wanted = torch.version.cuda
    if wanted is None:
        raise RuntimeError(
            f"torchkiln.jit.extension: sources: got a .cu file, but torch {torch.__version__} has"
            " no CUDA; install one that has"
        )
    seen = []
    for root in system_first():
        nvcc = root / "bin" / "nvcc"
        if not nvcc.is_file():
            continue
        version = nvcc_version(nvcc)
        if version == ".".join(wanted.split(".")[:2]):
            return root if (root / "lib64").exists() else shadow(root, folder)
        seen.append(f"{version} in {root}")
    raise RuntimeError(
        f"torchkiln.jit.extension: nvcc: got {', '.join(seen) or 'none'}, expected {wanted}, that"
        f" of torch; type\n  {sys.executable} -m pip install 'cuda-toolkit[nvcc,nvvm,crt,cccl]"
        f"=={wanted}.*'"
    )


def system_first() -> Iterator[Path]:
    """Toolkits of the system before those of Python packages, as CMake looks for them here."""
    found = list(dict.fromkeys(toolkit.roots()))
    yield from (root for root in found if "site-packages" not in root.parts)
    yield from (root for root in found if "site-packages" in root.parts)


def nvcc_version(nvcc: Path) -> str:
    """13.0 of what nvcc says."""
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else "unknown"


def shadow(root: Path, folder: Path) -> Path:
    """The packages' toolkit as a build expects one: libraries in lib64, without version numbers."""
    home = folder / "toolkit"
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)  # a real folder: nvcc looks for what lies beside it
    pairs = [(home / "bin" / tool.name, tool) for tool in (root / "bin").iterdir()]
    pairs += [(home / name, root / name) for name in ("include", "nvvm")]
    for library in (root / "lib").glob("*.so*"):
        pairs.append((home / "lib64" / library.name, library))
        pairs.append((home / "lib64" / (library.name.partition(".so")[0] + ".so"), library))
    for link, target in pairs:
        if not link.is_symlink() and not link.exists():
            try:
                link.symlink_to(target)
            except FileExistsError:
                continue  # another process was first
    return home
