"""Finds out whether this build can be loaded here, and explains when it cannot.

Torch's C++ interface changes with every minor version. Loaded beside another torch, a compiled
module fails with a mangled symbol at best and crashes in the first call at worst, so everything is
compared before anything is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

RECORD = "_build_info.json"


class Torch(NamedTuple):
    """The torch of this interpreter."""

    version: str
    cuda: str | None
    folder: Path

    @property
    def minor(self) -> str:
        """The part of the version within which the C++ interface stays the same."""
        return minor(self.version)


def minor(version: str) -> str:
    """The first two numbers of a version: 2.13 of 2.13.0."""
    return ".".join(version.split(".")[:2])


def find_torch() -> Torch | None:
    """Reads which torch an import would take, without importing it: it may be a broken one."""
    if module := sys.modules.get("torch"):
        version, cuda, origin = module.__version__, module.version.cuda, module.__file__
    else:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        origin = spec.origin
        facts: dict[str, Any] = {}
        exec(Path(origin).with_name("version.py").read_text(encoding="utf-8"), facts)
        version, cuda = facts["__version__"], facts.get("cuda")
    return Torch(str(version).partition("+")[0], cuda, Path(str(origin)).parent)


def find_package(folders: Iterable[str]) -> Path:
    """The folder with what was built; when editable, it is not the one with the Python files."""
    for folder in map(Path, folders):
        if (folder / RECORD).is_file():
            return folder
    raise ImportError(
        f"torchkiln has not been built: found no {RECORD} in {', '.join(folders)}."
        f" In the folder with its sources, type\n  {sys.executable} -m pip install ."
    )


def check(folder: Path) -> dict[str, Any]:
    """Compares what was recorded when the package was built with what is here; returns it."""
    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if record["python"] != python:
        _refuse(record, folder, f"Python {record['python']}", f"Python {python} ({sys.executable})")
    platform = sysconfig.get_platform()
    if record["platform"] != platform:
        _refuse(record, folder, record["platform"], platform)

    torch = find_torch()
    if torch is None:
        _refuse(
            record,
            folder,
            f"torch {record['torch']}",
            f"no torch in {sys.executable}",
            _install_torch(record),
        )
    if torch.minor != minor(record["torch"]):
        found = f"torch {torch.version} ({torch.folder})"
        _refuse(record, folder, f"torch {record['torch']}", found, _install_torch(record))
    # A build without CUDA kernels runs beside any flavour of its torch.
    if record["cuda"] and torch.cuda != record["torch_cuda"]:
        found = f"torch {torch.version} with {_flavour(torch.cuda)} ({torch.folder})"
        _refuse(
            record, folder, f"torch {record['torch']} with {_flavour(record['torch_cuda'])}", found
        )
    return record


def _flavour(cuda: str | None) -> str:
    return f"CUDA {cuda}" if cuda else "no CUDA"


def _install_torch(record: dict[str, Any]) -> str:
    return (
        f"  {sys.executable} -m pip install 'torch=={minor(record['torch'])}.*'"
        "     to get the torch that it was built for, or\n"
    )


def _refuse(
    record: dict[str, Any], folder: Path, built: str, found: str, remedy: str = ""
) -> NoReturn:
    pip = f"{sys.executable} -m pip install"
    rebuild = (
        f"  {pip} 'scikit-build-core>=1.1' && {pip} --force-reinstall --no-deps"
        f" --no-build-isolation --no-binary torchkiln torchkiln=={record['version']}"
    )
    raise ImportError(
        f"torchkiln {record['version']} ({folder}) was built for {built}, but found {found}."
        f" Type\n{remedy}{rebuild}     to build it for what is here"
    )
