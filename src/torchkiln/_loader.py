"""Chooses the compiled module for the torch that is installed, or explains why none fits.

Torch's C++ interface changes with every minor version. With another torch, a compiled module fails
with a missing mangled symbol, or crashes in the first call. So versions are compared before
anything is loaded. A build from source has a module for one torch, the published wheel has one
module for each of several versions of torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import struct
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RECORD = "_build_info.json"
KEYS = ("version", "python", "platform", "cuda", "cuda_architectures", "cuda_ptx", "torches")
INSTRUCTIONS = {"avx2": {"avx2", "fma", "f16c", "bmi2"}}
INSTRUCTIONS["avx512"] = {*INSTRUCTIONS["avx2"], "avx512f", "avx512bw", "avx512vl", "avx512dq"}
"""CPU features that the kernels of an instruction set need, as /proc/cpuinfo names them."""
KEYS_OF_TORCH = ("version", "cuda", "folder")
ELF = struct.Struct("<32xQ16xH6x")
"""Offset and number of the segment headers, in the header of a 64-bit library."""
SEGMENT = struct.Struct("<8xQ16xQ16x")
"""Offset and size of a segment in the file."""
PYTHON = shlex.quote(sys.executable)
PIP = f"{PYTHON} -m pip install"


class Torch(NamedTuple):
    """The torch that is installed for this interpreter."""

    version: str
    cuda: str | None
    folder: Path

    @property
    def minor(self) -> str:
        """Major and minor version, within which the C++ interface does not change."""
        return minor(self.version)


def minor(version: str) -> str:
    """The first two numbers of a version: 2.13 of 2.13.0."""
    return ".".join(version.split(".")[:2])


def find_torch() -> Torch | None:
    """The torch that would be imported, found without an import, because torch may be broken."""
    if module := sys.modules.get("torch"):
        version, cuda = module.__version__, module.version.cuda
        return Torch(_bare(version), cuda, Path(str(module.__file__)).parent)
    spec = importlib.util.find_spec("torch")
    return read_torch(Path(spec.origin).parent) if spec and spec.origin else None


def read_torch(folder: Path) -> Torch:
    """The torch in a folder, from its version.py."""
    facts: dict[str, Any] = {}
    exec((folder / "version.py").read_text(encoding="utf-8"), facts)
    return Torch(_bare(facts["__version__"]), facts.get("cuda"), folder)


def _bare(version: object) -> str:
    return str(version).partition("+")[0]


def find_package(folders: Iterable[str]) -> Path:
    """The folder with the compiled files; in an editable install the Python files are elsewhere."""
    for folder in map(Path, folders):
        if (folder / RECORD).is_file():
            return folder
    raise ImportError(
        f"torchkiln has not been built: found no {RECORD} in {', '.join(folders)}."
        f" In the folder with its sources, type\n  {PIP} --no-build-isolation ."
    )


def read_record(folder: Path) -> dict[str, Any]:
    """The record that was written when the package was built; ImportError if it is damaged."""
    try:
        return parse_record((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"{RECORD}: {error}") from error


def parse_record(text: str) -> dict[str, Any]:
    """The record in a text; ValueError if a field is missing."""
    record: Any = json.loads(text)
    try:
        complete = all(key in record for key in KEYS) and all(
            key in built for built in record["torches"] for key in KEYS_OF_TORCH
        )
        if complete and record["torches"]:
            return dict(record)
    except TypeError:  # a list or a number, not an object
        pass
    raise ValueError(f"got {text.strip()[:40]!r}, expected an object with {', '.join(KEYS)}")


def damaged(folder: Path, why: str) -> ImportError:
    """The error for a package of which a file is missing or broken."""
    return ImportError(
        f"torchkiln ({folder}) is damaged, reinstall it: {why}. Type\n"
        f"  {PIP} --force-reinstall --no-deps --no-build-isolation .\n"
        "in the folder with its sources, or name the file of its wheel in place of the point"
    )


def load(package: Path, folder: Path) -> None:
    """Import the compiled module.

    Raises an ImportError if the module or a library is damaged, or if another copy is loaded.

    Args:
        package: the folder of the record and of the kernels.
        folder: the folder of the compiled module.
    """
    libraries = [*folder.glob("_C.*.so"), *folder.glob("lib/*.so"), *package.glob("lib/*.so")]
    for library in libraries:
        if not is_whole(library):
            raise damaged(package, f"{library.relative_to(package)} is shorter than its parts")
    if other := loaded_elsewhere(package):
        raise ImportError(
            f"torchkiln ({package}): got a second copy in one process, expected one: {other} is"
            " loaded already. Start Python again, and remove one copy from its path"
        )
    try:
        importlib.import_module("torchkiln._C")
    except ImportError as error:
        raise damaged(package, str(error)) from error


def is_whole(library: Path) -> bool:
    """Whether a library file contains all segments; reading a missing part would raise SIGBUS."""
    size = library.stat().st_size
    with library.open("rb") as file:
        header = file.read(ELF.size)
        if len(header) < ELF.size:
            return False
        table, count = ELF.unpack(header)
        file.seek(table)
        segments = file.read(SEGMENT.size * count)
    if len(segments) < SEGMENT.size * count:
        return False
    ends = (offset + length for offset, length in SEGMENT.iter_unpack(segments))
    return all(end <= size for end in ends)


def loaded_elsewhere(package: Path) -> str | None:
    """A library that this process has loaded from another copy of the package, or None."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    own = f"{package.resolve()}{os.sep}"
    lines = (line for line in maps.splitlines() if "/libtorchkiln" in line)
    found = (re.search(r"/.*/libtorchkiln(_kernels|_cuda)?\.so\b.*", line) for line in lines)
    return next((path[0] for path in found if path and not path[0].startswith(own)), None)


def check(folder: Path) -> dict[str, Any]:
    """Compare the build record with this Python and torch; ImportError if they do not match.

    Returns the record, and as "torch" and "torch_cuda" the versions of torch and CUDA that the
    chosen module was compiled against.
    """
    record, torch = read_record(folder), find_torch()
    if found := mismatch(record, torch):
        raise ImportError(
            f"torchkiln {record['version']} ({folder}) was built for {found.built}, but found"
            f" {found.here}. Type\n"
            + "".join(f"  {words}, or\n" for words in found.torches)
            + f"  {rebuild()}     to build it for what is here, or\n"
            f"  {PYTHON} -m torchkiln_command doctor     to see everything that has to be repaired"
        )
    if missing := missing_instructions(record.get("cpu_instructions", [])):
        raise ImportError(
            f"torchkiln {record['version']} ({folder}) was built for a processor with"
            f" {', '.join(sorted(missing))}, which this one lacks. Type\n"
            f"  {rebuild()}     to build it for this processor"
        )
    built = built_for(record, torch)
    assert built is not None  # without one, mismatch() has a reason
    return record | {"torch": built["version"], "torch_cuda": built["cuda"]}


def missing_instructions(built: Sequence[str], facts: Path = Path("/proc/cpuinfo")) -> set[str]:
    """CPU features that a build for one instruction set needs and this processor does not have."""
    needed = INSTRUCTIONS.get(built[0], set()) if len(built) == 1 else set()
    if not needed or not facts.is_file():
        return set()
    with facts.open(encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), None)
    return needed - set(flags.split()) if flags else set()


def require_torch(init_file: str) -> None:
    """Raise an ImportError that explains that a package was built against another torch.

    ``torchkiln_add_module`` installs a module and ``_torch.txt`` with the version of torch at build
    time. A package calls ``torchkiln.extend.require_torch(__file__)`` before it imports the module.

    Args:
        init_file: the package's ``__init__.py``.
    """
    folder, torch = Path(init_file).parent, find_torch()
    record = folder / "_torch.txt"
    if not record.is_file():  # editable install: the compiled files are elsewhere
        return
    built = record.read_text(encoding="utf-8").strip()
    if torch is None or minor(built) != torch.minor:
        here = f"torch {torch.version} ({torch.folder})" if torch else "no torch"
        raise ImportError(
            f"{folder.name} ({folder}) was built for torch {built}, but found {here}. Type\n"
            f"  {PIP} 'torch=={minor(built)}.*'     to get the torch that it was built for, or"
            f" build {folder.name} beside the torch that is here"
        )


def built_for(record: dict[str, Any], torch: Torch | None) -> dict[str, Any] | None:
    """The part of a build for the minor version of this torch: version, CUDA and folder."""
    same = (
        built for built in record["torches"] if torch and minor(built["version"]) == torch.minor
    )
    return next(same, None)


def module_folder(folder: Path, record: dict[str, Any]) -> Path:
    """The folder with the compiled module that check() has chosen."""
    (found,) = (b["folder"] for b in record["torches"] if b["version"] == record["torch"])
    return folder / found


def torches(record: dict[str, Any]) -> str:
    """The versions of torch that a build supports, as text: 2.12, 2.13 and 2.14."""
    versions = [built["version"] for built in record["torches"]]
    if len(versions) == 1:
        return str(versions[0])
    minors = sorted(map(minor, versions), key=_numbers)
    return f"{', '.join(minors[:-1])} and {minors[-1]}"


def requirement(record: dict[str, Any]) -> str:
    """The versions of torch that a build supports, as a requirement for pip."""
    minors = sorted((minor(built["version"]) for built in record["torches"]), key=_numbers)
    if len(minors) == 1:
        return f"torch=={minors[0]}.*"
    major, last = _numbers(minors[-1])
    return f"torch>={minors[0]},<{major}.{last + 1}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def python_version() -> str:
    """The Python version of modules that this interpreter loads: 3.14, or 3.14t without a GIL."""
    free_threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"{sys.version_info.major}.{sys.version_info.minor}{free_threaded}"


class Mismatch(NamedTuple):
    """The reason why a build cannot be loaded, as text."""

    built: str
    here: str
    torches: tuple[str, ...] = ()
    """Commands that install a torch that the build supports, each with its purpose."""


def mismatch(record: dict[str, Any], torch: Torch | None) -> Mismatch | None:
    """The first difference that prevents a build from being loaded in this Python, or None."""
    python = python_version()
    if record["python"] != python:
        return Mismatch(f"Python {record['python']}", f"Python {python} ({sys.executable})")
    platform = sysconfig.get_platform()
    if record["platform"] != platform:
        return Mismatch(record["platform"], platform)
    built = f"torch {torches(record)}"
    install = (f"{PIP} '{requirement(record)}'     to get {_wanted(record)}",)
    if torch is None:
        return Mismatch(built, f"no torch in {sys.executable}", install)
    if built_for(record, torch) is None:
        return Mismatch(built, f"torch {torch.version} ({torch.folder})", install)
    # The kernels contain their CUDA runtime, and a build without kernels fits every CUDA version.
    cuda = record["cuda"]
    if cuda and torch.cuda and cuda.partition(".")[0] != torch.cuda.partition(".")[0]:
        here = f"torch {torch.version} with CUDA {torch.cuda} ({torch.folder})"
        return Mismatch(f"{built} with CUDA {cuda}", here)
    return None


def _wanted(record: dict[str, Any]) -> str:
    several = len(record["torches"]) > 1
    return "one of those that it was built for" if several else "the torch that it was built for"


def rebuild(*settings: str) -> str:
    """The command that builds the package again, against the installed torch."""
    given = "".join(f" -C {setting}" for setting in settings)
    return (
        f"{PIP} 'scikit-build-core>=1.1' 'cmake>=3.28' ninja && {PIP} --force-reinstall --no-deps"
        f" --no-build-isolation{given} .     (in the folder with its sources)"
    )
