"""Usage: check_wheel.py WHEEL [FOLDER...]

Checks a wheel against every torch that it is for, without importing any: contents, metadata, GPU
code, symbols, versions of the C library, run paths. Each FOLDER has one of those torches in it;
without any, it is the torch of this environment. Prints a line for each check, and fails at the
end.
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
from typing import Any

import elf
import fatbin
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

# What manylinux_2_28 allows, by the newest version of each family of symbols. A wheel that says so
# in its name may ask for a newer glibc.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

# Defined by every C++ library, under names that no other one has a use for.
OURS = re.compile(
    r"torchkiln|^(typeinfo|vtable|guard variable|construction vtable|VTT|(non-)?virtual thunk)"
)

# Loaded by whoever loads us: torch, CUDA's runtime, the system.
OUTSIDE = re.compile(
    r"^(libtorch|libc10|libcudart\.so|lib(c|m|dl|rt|gomp|pthread|stdc\+\+|gcc_s)\.so|ld-linux)"
)

RUNPATH = re.compile(r"^\$ORIGIN(/lib|/\.\./\.\./lib|(/\.\.){2,3}/torch/lib)?$")

# What may name torch's CUDA half, and is only loaded where there is one.
CUDA_PART = "libtorchkiln_cuda.so"
OF_CUDA = re.compile(r"^lib(torch_cuda|c10_cuda|cudart|cu[a-z]+|nv[a-z]+)[.\d]*\.so")
OF_TORCH = re.compile(r"^lib(torch|c10)")

CONTENTS = (
    r"torchkiln/__init__\.py",
    r"torchkiln/py\.typed",
    r"torchkiln_command/__init__\.py",
    r"torchkiln/_C\.pyi",
    r"torchkiln/_build_info\.json",
    r"torchkiln/new/templates/common/CMakeLists\.txt",
    r"torchkiln/new/templates/common/dot_gitignore",
    r"torchkiln/new/templates/elementwise/cuda/OPNAME\.cu",
    r"torchkiln/lib/libtorchkiln_kernels\.so",
    r"torchkiln/include/torchkiln/version\.h",
    r"torchkiln/include/torchkiln/ops\.h",
    r"torchkiln/include/torchkiln/explain\.h",
    r"torchkiln/include/torchkiln/listener\.h",
    r"torchkiln/include/torchkiln/kernels/pointwise\.h",
    r"torchkiln/share/cmake/torchkiln/torchkilnConfig\.cmake",
    r"torchkiln-[\d.]+\.dist-info/licenses/LICENSE",
    r"torchkiln-[\d.]+\.dist-info/entry_points\.txt",
    r"torchkiln-[\d.]+\.dist-info/sboms/torchkiln\.cdx\.json",
)
# Templates of packages are sources of others.
NOT_CONTENTS = re.compile(
    r"^(?!torchkiln/new/templates/).*(\.(cpp|cu|o|a|txt\.in)$|/CMakeLists\.txt$)"
    r"|^(tests|cpp|cuda|src)/|\.so\.\d|__pycache__"
)

FOR_EACH_TORCH = (
    r"torchkiln/{folder}_C\.cpython-\d+-[\w-]+\.so",
    r"torchkiln/{folder}lib/libtorchkiln\.so",
)
PARTS = (
    ("kernels", r"/libtorchkiln_kernels\.so$"),
    ("for one torch: {0}", r"^torchkiln/(torch[\d.]+)/"),
    ("for one torch", r"\.so$"),
    ("headers and CMake", r"^torchkiln/(include|share)/"),
    ("Python", r"\.pyi?$"),
    ("metadata", r""),
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


def check_contents(
    checks: Checks, archive: zipfile.ZipFile, wheel: Path, record: dict[str, Any]
) -> None:
    names = archive.namelist()
    wanted = list(CONTENTS)
    for built in record["torches"]:
        folder = "" if built["folder"] == "." else re.escape(built["folder"] + "/")
        wanted += [pattern.format(folder=folder) for pattern in FOR_EACH_TORCH]
        if record["cuda"]:
            wanted.append(f"torchkiln/{folder}lib/{re.escape(CUDA_PART)}")
    missing = [pattern for pattern in wanted if not any(re.fullmatch(pattern, n) for n in names)]
    checks.none("everything that belongs in is there", missing)
    checks.none("no sources, objects or versioned copies", filter(NOT_CONTENTS.search, names))
    size = wheel.stat().st_size
    print(f"       {size / 1024:.0f} KiB in {len(names)} files, of which")
    for part, taken in parts(archive).items():
        print(f"       {taken / 1024:8.0f} KiB {part}")
    checks.none(f"at most {MOST_BYTES >> 20} MiB", [f"{size} bytes"] if size > MOST_BYTES else [])


def parts(archive: zipfile.ZipFile) -> dict[str, int]:
    """The compressed bytes of each part of the wheel."""
    taken: dict[str, int] = {}
    for entry in archive.infolist():
        for part, pattern in PARTS:
            if match := re.search(pattern, entry.filename):
                name = part.format(*match.groups())
                taken[name] = taken.get(name, 0) + entry.compress_size
                break
    return taken


def find_torches(
    checks: Checks, record: dict[str, Any], folders: list[Path]
) -> dict[str, tuple[Path, str]]:
    """By the folder of the wheel that is for it: a torch, and its version."""
    here = {}
    for folder in folders:
        version = re.search(r"__version__ = '([\d.]+)", (folder / "version.py").read_text())
        if version:
            here[minor(version[1])] = (folder, version[1])
    needed = {minor(built["version"]): built["folder"] for built in record["torches"]}
    checks.none(
        f"beside every torch that it is for: {', '.join(needed)}",
        (f"no torch {version} to check against" for version in needed.keys() - here.keys()),
    )
    return {needed[version]: here[version] for version in needed if version in here}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_metadata(checks: Checks, root: Path, record: dict[str, Any]) -> None:
    (info,) = root.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    tags = Parser().parsestr((info / "WHEEL").read_text()).get_all("Tag", [])
    print(f"       {record}")
    python = "cp" + record["python"].replace(".", "")

    def differs(what: str, found: object, expected: object) -> list[str]:
        return [] if found == expected else [f"{what}: found {found}, expected {expected}"]

    # For several torches, the loader has the say: pip would replace a torch that is none of them.
    torches = [minor(built["version"]) for built in record["torches"]]
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    problems = [
        *differs(
            "Requires-Dist", required, [f"torch=={torches[0]}.*"] if len(torches) == 1 else []
        ),
        *differs("Version", metadata["Version"], record["version"]),
        *differs("License-Expression", metadata["License-Expression"], "BSD-3-Clause"),
        *(
            f"tag {tag}, expected {python}"
            for tag in tags
            if not tag.startswith(f"{python}-{python}-")
        ),
    ]
    checks.none("metadata and record agree", problems)


def check_bill(checks: Checks, root: Path, record: dict[str, Any]) -> None:
    """The list of what is inside is valid, and as long as it has to be."""
    for path in root.glob("*.dist-info/sboms/torchkiln.cdx.json"):
        text = path.read_text()
        invalid = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        checks.none("the SBOM is CycloneDX", [str(invalid)] if invalid else [])
        bill = json.loads(text)
        found = {part["name"]: part["version"] for part in bill["components"]}
        print(f"       {', '.join(f'{name} {version}' for name, version in found.items())}")
        expected = {"torch", "pybind11", "libstdc++ headers", "CPython headers"}
        if record["cuda"]:
            expected |= {"CCCL", "CUDA Toolkit headers", "CUDA Runtime"}
        problems = [f"only there or here: {name}" for name in sorted(found.keys() ^ expected)]
        if bill["metadata"]["component"]["version"] != record["version"]:
            problems.append(f"it is of torchkiln {bill['metadata']['component']['version']}")
        checks.none("the SBOM lists what the build took from others, and nothing else", problems)


def check_gpu_code(checks: Checks, kernels: Path, record: dict[str, Any]) -> None:
    code = fatbin.read(kernels)
    for kind, found in (("machine code", code.machine_code), ("PTX", code.ptx)):
        for architecture, taken in sorted(found.items()):
            print(f"       {taken / 1024:8.0f} KiB {kind} of {architecture}")
    wanted = set(record["cuda_architectures"])
    # The products of a warpgroup, which no other architecture has.
    extra = {"90a"} if any(name.startswith("90") for name in wanted) else set()
    checks.none(
        f"machine code of {', '.join(sorted(wanted)) or 'no GPU'}",
        (wanted | extra) ^ code.machine_code.keys(),
    )
    checks.none("PTX as recorded", set(record["cuda_ptx"]) ^ code.ptx.keys())


def check_boundary(checks: Checks, ours: list[elf.Library]) -> None:
    for library in ours:
        if library.path.name == "libtorchkiln_kernels.so":
            checks.none(
                "the kernels know nothing of torch",
                [name for name in library.needed if OF_TORCH.match(name)]
                + [name for name in elf.demangle(sorted(library.undefined)) if "at::" in name],
            )
        if library.path.name != CUDA_PART:
            checks.none(
                f"{place(library)}: loads beside a torch without CUDA",
                filter(OF_CUDA.match, library.needed),
            )


def place(library: elf.Library) -> str:
    """Its path in the package."""
    return "/".join(library.path.parts[library.path.parts.index("torchkiln") + 1 :])


def check_symbols(checks: Checks, ours: list[elf.Library], torch: Path, version: str) -> None:
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
            f"{place(library)}: {len(library.undefined)} symbols resolve beside torch {version}",
            elf.demangle(sorted(unresolved)),
        )
        checks.none(
            f"{place(library)}: needs only what will be there",
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
        checks.none(f"{place(library)}: exports nothing but its own", foreign)


def check_portability(checks: Checks, ours: list[elf.Library], wheel: Path) -> None:
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
        checks.none(f"{place(library)}: runs where glibc {glibc[0]}.{glibc[1]} is", newer)
        checks.none(
            f"{place(library)}: looks for libraries only in the wheel and beside it",
            (entry for entry in library.runpath if not RUNPATH.match(entry)),
        )


def main() -> None:
    wheel, *given = map(Path, sys.argv[1:])
    spec = find_spec("torch") if not given else None
    if spec and spec.origin:
        given = [Path(spec.origin).parents[1]]
    checks = Checks()
    print(wheel.name)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        package = Path(folder, "torchkiln")
        record = json.loads((package / "_build_info.json").read_text())
        check_contents(checks, archive, wheel, record)
        check_metadata(checks, Path(folder), record)
        check_bill(checks, Path(folder), record)
        check_gpu_code(checks, package / "lib" / "libtorchkiln_kernels.so", record)
        torches = find_torches(checks, record, [folder / "torch" for folder in given])
        kernels = [elf.read(package / "lib" / "libtorchkiln_kernels.so")]
        ours = list(kernels)
        for part, (torch, version) in torches.items():
            built = [elf.read(path) for path in for_one_torch(package / part)]
            check_symbols(checks, kernels + built, torch, version)
            ours += built
        check_boundary(checks, ours)
        check_exports(checks, ours)
        check_portability(checks, ours, wheel)
    if checks.failed:
        raise SystemExit("the wheel has failed")


def for_one_torch(folder: Path) -> list[Path]:
    found = [*folder.glob("*.so"), *(folder / "lib").glob("*.so")]
    return sorted(path for path in found if path.name != "libtorchkiln_kernels.so")


if __name__ == "__main__":
    main()
