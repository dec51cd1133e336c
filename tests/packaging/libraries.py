"""Checks of the shared libraries in a wheel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import elf
import fatbin
import symbols
from checks import Checks

# The newest version of each family of symbols that manylinux_2_28 allows. A wheel with another
# platform tag may require a newer glibc.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

# Our symbols, and those that every C++ library defines for its classes.
OURS = re.compile(
    r"torchkiln|^(typeinfo|vtable|guard variable|construction vtable|VTT|(non-)?virtual thunk)"
)

# Libraries that other packages provide: torch, the CUDA runtime, the system.
OUTSIDE = re.compile(
    r"^(libtorch|libc10|libcudart\.so|lib(c|m|dl|rt|gomp|pthread|stdc\+\+|gcc_s)\.so|ld-linux)"
)

KERNELS = "libtorchkiln_kernels.so"
# The only library that may link torch's CUDA library; it is loaded only if torch has CUDA.
CUDA_PART = "libtorchkiln_cuda.so"
OF_CUDA = re.compile(r"^lib(torch_cuda|c10_cuda|cudart|cu[a-z]+|nv[a-z]+)[.\d]*\.so")
OF_TORCH = re.compile(r"^lib(torch|c10)")
TORCH_NAMES = re.compile(r"\b(at|c10|torch)::")
# Text that only the CUDA runtime contains: the name of an error.
OF_RUNTIME = b"cudaErrorInvalidValue"


def check_libraries(
    checks: Checks, package: Path, record: dict[str, Any], folders: list[Path], wheel: Path
) -> None:
    """Checks the libraries without loading one; each of the folders contains a torch."""
    torches = find_torches(checks, record, folders)
    kernels = elf.read(package / "lib" / KERNELS)
    ours = [kernels]
    for part, (torch, version) in torches.items():
        built = [elf.read(path) for path in for_one_torch(package / part)]
        check_symbols(checks, package, [kernels, *built], torch, version)
        ours += built
    known = {kernels.path}
    known.update(*(for_one_torch(package / built["folder"]) for built in record["torches"]))
    checks.none("no library of others", (str(p) for p in others(package.parent, known)))
    check_gpu_code(checks, kernels.path, record)
    check_boundary(checks, package, ours, record)
    check_exports(checks, package, ours)
    symbols.check(checks, ours, record)
    check_portability(checks, package, ours, wheel)


def find_torches(
    checks: Checks, record: dict[str, Any], folders: list[Path]
) -> dict[str, tuple[Path, str]]:
    """The torch to check against, and its version, for each folder of the wheel."""
    here = {}
    for folder in folders:
        version = re.search(r"__version__ = '([\d.]+)", (folder / "version.py").read_text())
        if version:
            here[minor(version[1])] = (folder, version[1])
    needed = {minor(built["version"]): built["folder"] for built in record["torches"]}
    problems = [f"no torch {version} to check against" for version in needed.keys() - here.keys()]
    problems += [f"nothing for torch {version}" for version in here.keys() - needed.keys()]
    checks.none(f"beside every torch that it is for: {', '.join(needed)}", problems)
    return {needed[version]: here[version] for version in needed if version in here}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def for_one_torch(folder: Path) -> list[Path]:
    found = [*folder.glob("*.so"), *(folder / "lib").glob("*.so")]
    return sorted(path for path in found if path.name != KERNELS)


def others(root: Path, known: set[Path]) -> list[Path]:
    """Libraries that are not ours, such as copies made by auditwheel."""
    return [path.relative_to(root) for path in root.rglob("*.so*") if path not in known]


def check_gpu_code(checks: Checks, kernels: Path, record: dict[str, Any]) -> None:
    code = fatbin.read(kernels)
    for kind, found in (("machine code", code.machine_code), ("PTX", code.ptx)):
        for architecture, taken in sorted(found.items()):
            print(f"       {taken / 1024:8.0f} KiB {kind} of {architecture}")
    wanted = set(record["cuda_architectures"])
    # Warpgroup products (wgmma) add code for 90a.
    extra = {"90a"} if any(name.startswith("90") for name in wanted) else set()
    checks.none(
        f"machine code of {', '.join(sorted(wanted)) or 'no GPU'}",
        (wanted | extra) ^ code.machine_code.keys(),
    )
    checks.none("PTX as recorded", set(record["cuda_ptx"]) ^ code.ptx.keys())
    asked = os.environ.get("TORCHKILN_CUDA_ARCHITECTURES", "")
    if record["cuda"] and asked not in {"", "all", "native"}:
        names = {re.sub("-(real|virtual)$", "", name) for name in asked.split(";")}
        checks.none(f"built for {asked}, as was asked", names ^ wanted)


def check_boundary(
    checks: Checks, package: Path, ours: list[elf.Library], record: dict[str, Any]
) -> None:
    for library in ours:
        name = library.path.name
        if name == KERNELS:
            checks.none(
                "the kernels know nothing of torch",
                [needed for needed in library.needed if OF_TORCH.match(needed)]
                + [s for s in elf.demangle(sorted(library.undefined)) if TORCH_NAMES.search(s)],
            )
        if name != CUDA_PART:
            checks.none(
                f"{place(package, library)}: loads beside a torch without CUDA",
                filter(OF_CUDA.match, library.needed),
            )
    linked_in = {library.path.name for library in ours if OF_RUNTIME in library.path.read_bytes()}
    expected = {KERNELS} if record["cuda"] else set()
    checks.none("the CUDA runtime is linked into the kernels alone", linked_in ^ expected)


def place(package: Path, library: elf.Library) -> str:
    """The path of a library relative to the package."""
    return str(library.path.relative_to(package))


def check_symbols(
    checks: Checks, package: Path, ours: list[elf.Library], torch: Path, version: str
) -> None:
    """Each undefined symbol must be defined by a library that is listed as needed."""
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
        where = place(package, library)
        checks.none(
            f"{where}: {len(library.undefined)} symbols resolve beside torch {version}",
            elf.demangle(sorted(unresolved)),
        )
        checks.none(
            f"{where}: needs only what will be there",
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
    """The libraries of these names that g++ finds on the system."""
    found = {}
    for name in names:
        done = subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        path = Path(done.stdout.strip())
        if path.is_absolute():
            found[name] = elf.read(path.resolve())
    return found


def check_exports(checks: Checks, package: Path, ours: list[elf.Library]) -> None:
    for library in ours:
        if library.path.name.startswith("_C."):
            # Libraries and stand-alone kernels look up this symbol, so a process has one listener.
            known = {"PyInit__C", "_ZN9torchkiln5trace8listenerE"}
            foreign = [name for name in library.defined if name not in known]
        else:
            foreign = [
                name for name in elf.demangle(sorted(library.defined)) if not OURS.search(name)
            ]
        checks.none(f"{place(package, library)}: exports nothing but its own", foreign)


def check_portability(checks: Checks, package: Path, ours: list[elf.Library], wheel: Path) -> None:
    tags = [int(number) for number in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    glibc = (2, min(tags, default=28))
    newest = NEWEST | {"GLIBC": glibc}
    for library in ours:
        newer = []
        for name in library.versions:
            family, _, version = name.partition("_")
            numbers = tuple(int(n) for n in version.split(".") if n.isdigit())
            if family in newest and numbers > newest[family]:
                newer.append(f"{name}, allowed up to {'.'.join(map(str, newest[family]))}")
        where = place(package, library)
        checks.none(f"{where}: runs where glibc {glibc[0]}.{glibc[1]} is", newer)
        checks.none(
            f"{where}: looks for libraries only in the wheel and beside it",
            (entry for entry in library.runpath if not is_near(entry, Path("torchkiln", where))),
        )


def is_near(entry: str, library: Path) -> bool:
    """Whether an entry of a library's run path leads to the package or to torch."""
    origin, _, rest = entry.partition("/")
    folder = Path(os.path.normpath(library.parent / rest))
    is_ours = folder.is_relative_to("torchkiln")
    return origin == "$ORIGIN" and (is_ours or folder == Path("torch/lib"))
