"""Usage: check_wheel.py WHEEL

Checks a wheel against the torch of this environment, without importing either: contents, metadata,
symbols, versions of the C library, run paths. Prints a line for each check, and fails at the end.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import elf

# What manylinux_2_28 allows, by the newest version of each family of symbols.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

# Defined by every C++ library, under names that no other one has a use for.
OURS = re.compile(
    r"torchkiln|^(typeinfo|vtable|guard variable|construction vtable|VTT|(non-)?virtual thunk)"
)

# Loaded by whoever loads us: torch, CUDA's runtime, the system.
OUTSIDE = re.compile(
    r"^(libtorch|libc10|libcudart\.so|lib(c|m|dl|rt|gomp|pthread|stdc\+\+|gcc_s)\.so|ld-linux)"
)

RUNPATH = re.compile(r"^\$ORIGIN(/lib|/\.\./\.\./(torch|nvidia/cu\d+)/lib)?$")

CONTENTS = (
    r"torchkiln/__init__\.py",
    r"torchkiln/py\.typed",
    r"torchkiln_command/__init__\.py",
    r"torchkiln/_C\.pyi",
    r"torchkiln/_C\.cpython-\d+-[\w-]+\.so",
    r"torchkiln/_build_info\.json",
    r"torchkiln/new/templates/common/CMakeLists\.txt",
    r"torchkiln/new/templates/common/dot_gitignore",
    r"torchkiln/new/templates/elementwise/cuda/OPNAME\.cu",
    r"torchkiln/lib/libtorchkiln\.so",
    r"torchkiln/lib/libtorchkiln_kernels\.so",
    r"torchkiln/include/torchkiln/version\.h",
    r"torchkiln/include/torchkiln/ops\.h",
    r"torchkiln/include/torchkiln/explain\.h",
    r"torchkiln/include/torchkiln/listener\.h",
    r"torchkiln/include/torchkiln/kernels/pointwise\.h",
    r"torchkiln/share/cmake/torchkiln/torchkilnConfig\.cmake",
    r"torchkiln-[\d.]+\.dist-info/licenses/LICENSE",
    r"torchkiln-[\d.]+\.dist-info/entry_points\.txt",
)
# Templates of packages are sources of others.
NOT_CONTENTS = re.compile(
    r"^(?!torchkiln/new/templates/).*(\.(cpp|cu|o|a|txt\.in)$|/CMakeLists\.txt$)"
    r"|^(tests|cpp|cuda|src)/|\.so\.\d|__pycache__"
)

MOST_BYTES = 100 * 2**20  # what PyPI takes


class Checks:
    """Prints each check's outcome and remembers whether one has failed."""

    def __init__(self) -> None:
        self.failed = False

    def none(self, what: str, offending: Iterable[str]) -> None:
        """Passes when nothing offends."""
        found = sorted(offending)
        print(f"{'FAILED' if found else 'ok    '} {what}")
        for line in found[:20]:
            print(f"         {line}")
        if len(found) > 20:
            print(f"         ... and {len(found) - 20} more")
        self.failed |= bool(found)


def check_contents(checks: Checks, names: list[str], wheel: Path) -> None:
    missing = [pattern for pattern in CONTENTS if not any(re.fullmatch(pattern, n) for n in names)]
    checks.none("everything that belongs in is there", missing)
    checks.none("no sources, objects or versioned copies", filter(NOT_CONTENTS.search, names))
    size = wheel.stat().st_size
    print(f"       {size / 1024:.0f} KiB in {len(names)} files")
    checks.none(f"at most {MOST_BYTES >> 20} MiB", [f"{size} bytes"] if size > MOST_BYTES else [])


def check_metadata(checks: Checks, root: Path, torch: Path) -> None:
    (info,) = root.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    record = json.loads((root / "torchkiln" / "_build_info.json").read_text())
    tags = Parser().parsestr((info / "WHEEL").read_text()).get_all("Tag", [])
    print(f"       built against {record}")
    version = re.search(r"__version__ = '([\d.]+)", (torch / "version.py").read_text())
    here = version[1] if version else "unknown"
    minor = ".".join(record["torch"].split(".")[:2])
    python = "cp" + record["python"].replace(".", "")

    def differs(what: str, found: object, expected: object) -> list[str]:
        return [] if found == expected else [f"{what}: found {found}, expected {expected}"]

    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    problems = [
        *differs("Requires-Dist", required, [f"torch=={minor}.*"]),
        *differs("Version", metadata["Version"], record["version"]),
        *differs("torch here", ".".join(here.split(".")[:2]), minor),
        *differs("License-Expression", metadata["License-Expression"], "BSD-3-Clause"),
        *(
            f"tag {tag}, expected {python}"
            for tag in tags
            if not tag.startswith(f"{python}-{python}-")
        ),
    ]
    checks.none("metadata, record and torch agree", problems)


def check_symbols(checks: Checks, ours: list[elf.Library], torch: Path) -> None:
    """Each undefined symbol has to be offered by a library that is named as needed."""
    offered: dict[str, frozenset[str]] = {}
    for path in [*(torch / "lib").glob("*.so*"), *toolkit_libraries()]:
        library = elf.read(path)
        offered[library.soname or path.name] = library.defined
    offered |= {library.soname or library.path.name: library.defined for library in ours}
    for name, library in system_libraries(
        {n for o in ours for n in o.needed} - offered.keys()
    ).items():
        offered[name] = library.defined

    for library in ours:
        within_reach = frozenset[str]().union(
            *(offered.get(name, frozenset()) for name in library.needed)
        )
        python = {s for s in library.undefined if s.startswith(("Py", "_Py"))}
        unresolved = library.undefined - within_reach
        if library.path.name.startswith("_C."):
            unresolved -= python
        checks.none(
            f"{library.path.name}: all {len(library.undefined)} symbols resolve",
            elf.demangle(sorted(unresolved)),
        )
        checks.none(
            f"{library.path.name}: needs only what will be there",
            (
                name
                for name in library.needed
                if not OUTSIDE.match(name) and name not in {o.soname for o in ours}
            ),
        )


def toolkit_libraries() -> Iterable[Path]:
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from Path(folder).glob("cu*/lib/libcudart.so.*")


def system_libraries(names: set[str]) -> dict[str, elf.Library]:
    """The libraries that the linker would take from the system."""
    found = {}
    for name in names:
        done = subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        path = Path(done.stdout.strip())
        if path.is_absolute():
            found[name] = elf.read(path.resolve())
    return found


def check_exports(checks: Checks, ours: list[elf.Library]) -> None:
    for library in ours:
        if library.path.name.startswith("_C."):
            # One listener for the process: libraries and stand-alone kernels look for this name.
            known = {"PyInit__C", "_ZN9torchkiln7explain8listenerE"}
            foreign = [name for name in library.defined if name not in known]
        else:
            foreign = [
                name for name in elf.demangle(sorted(library.defined)) if not OURS.search(name)
            ]
        checks.none(f"{library.path.name}: exports nothing but its own", foreign)


def check_portability(checks: Checks, ours: list[elf.Library]) -> None:
    for library in ours:
        newer = []
        for name in library.versions:
            family, _, version = name.partition("_")
            numbers = tuple(int(n) for n in version.split(".") if n.isdigit())
            if family in NEWEST and numbers > NEWEST[family]:
                newer.append(f"{name}, allowed up to {'.'.join(map(str, NEWEST[family]))}")
        checks.none(f"{library.path.name}: runs where manylinux_2_28 wheels run", newer)
        checks.none(
            f"{library.path.name}: looks for libraries only in the wheel and beside it",
            (entry for entry in library.runpath if not RUNPATH.match(entry)),
        )


def main() -> None:
    wheel = Path(sys.argv[1])
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("no torch in this environment to check against")
    torch = Path(spec.origin).parent
    checks = Checks()
    print(f"{wheel.name} against {torch}")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        root = Path(folder)
        check_contents(checks, archive.namelist(), wheel)
        check_metadata(checks, root, torch)
        ours = [elf.read(path) for path in sorted(root.rglob("*.so"))]
        check_symbols(checks, ours, torch)
        check_exports(checks, ours)
        check_portability(checks, ours)
    if checks.failed:
        raise SystemExit("the wheel has failed")


if __name__ == "__main__":
    main()
