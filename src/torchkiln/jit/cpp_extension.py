"""Extensions: C++ and CUDA sources with host code, built by torch.utils.cpp_extension."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sysconfig
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
    """Builds a Python module from sources with pybind11 or torch's registration, and imports it.

    The build needs a C++ compiler, the time to compile torch's headers (about a minute) and, for
    .cu files, nvcc of torch's CUDA version. :func:`torchkiln.jit.load` compiles plain kernels
    without all that.

    Args:
        sources: .cpp and .cu files, which may include torchkiln's headers.
        name: the name of the module; by default derived from the paths.
        cxx_flags: flags for the C++ compiler after the default ones.
        cuda_flags: flags for nvcc after the default ones.
        include: folders with headers.
        verbose: whether the build prints its commands.
    """
    files = [Path(source).resolve() for source in sources]
    if not files:
        raise ValueError("torchkiln.jit.extension: sources: got none, expected .cpp and .cu files")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"torchkiln.jit.extension: sources: got {file}, expected a file"
            )
    if name and not (name.isascii() and name.isidentifier()):
        raise ValueError(
            f"torchkiln.jit.extension: name: got {name!r}, expected a Python identifier of ASCII"
            " characters"
        )
    digest = hashlib.sha256("\n".join(map(str, files)).encode()).hexdigest()[:8]
    stem = re.sub(r"\W", "_", files[0].stem)
    module = name or f"{stem}_{digest}"
    try:
        folder = cache.folder() / "extensions" / _environment() / module
        cache.prepare(folder)
    except OSError as error:
        raise RuntimeError(
            f"torchkiln.jit.extension: cache folder: got {error.filename} ({error.strerror}),"
            " expected a folder that only you can write to; set TORCHKILN_CACHE to one"
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
    """A folder name for the Python, the machine and the torch that a module is built for."""
    return f"{sysconfig.get_config_var('SOABI')}-torch{torch.__version__}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets one process build in a folder at a time.

    The operating system frees this lock when the process ends. torch's lock is a file: if a killed
    process has left it, all other processes wait. So the holder of this lock removes torch's file.
    """
    with (folder / "torchkiln.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


def cuda_home(folder: Path) -> Path:
    """A toolkit of torch's CUDA version: the system's, else one linked from Python packages."""
    wanted = torch.version.cuda
    if wanted is None:
        raise RuntimeError(
            f"torchkiln.jit.extension: sources: got a .cu file, expected .cpp files: torch"
            f" {torch.__version__} has no CUDA; install a torch with CUDA"
        )
    seen = []
    for root in system_first():
        nvcc = root / "bin" / "nvcc"
        if not nvcc.is_file():
            continue
        version = nvcc_version(nvcc)
        if version == ".".join(wanted.split(".")[:2]):
            return root if (root / "lib64").exists() else link_toolkit(root, folder)
        seen.append(f"{version} in {root}")
    raise RuntimeError(
        f"torchkiln.jit.extension: nvcc: got {', '.join(seen) or 'none'}, expected {wanted} as in"
        f" torch; type\n  {toolkit.pip_install('nvcc,nvvm,crt,cccl')}"
    )


def system_first() -> Iterator[Path]:
    """Toolkits of the system, then of Python packages, as in torchkiln's CMake build."""
    found = list(dict.fromkeys(toolkit.roots()))
    yield from (root for root in found if "site-packages" not in root.parts)
    yield from (root for root in found if "site-packages" in root.parts)


def nvcc_version(nvcc: Path) -> str:
    """The version that nvcc prints, such as 13.0."""
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else "unknown"


def link_toolkit(root: Path, folder: Path) -> Path:
    """Links a toolkit of Python packages into the layout that a build expects.

    The libraries are linked in lib64, with and without version numbers in their names.
    """
    home = folder / "toolkit"
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)  # not a link: nvcc finds its parts relative to it
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
                continue  # another process has made the link
    return home
