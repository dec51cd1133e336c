"""Usage: check_wheel.py WHEEL [FOLDER...]

Checks contents, metadata, SBOM and libraries of a wheel against every torch version that it
supports, without importing torch. Each FOLDER contains one of these versions; the default is the
torch of this environment. If TORCHKILN_CUDA_ARCHITECTURES is a list, the wheel must have GPU code
for each entry. Prints a line per check, and fails at the end if one failed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checks import Checks
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from libraries import CUDA_PART, check_libraries, minor
from packaging.requirements import Requirement

CONTENTS = (
    r"torchkiln/__init__\.py",
    r"torchkiln/py\.typed",
    r"torchkiln/hub/kernel/build/torch-cuda/metadata\.json",
    r"torchkiln_command/__init__\.py",
    r"torchkiln/_C\.pyi",
    r"torchkiln/_build_info\.json",
    r"torchkiln/new/templates/common/CMakeLists\.txt",
    r"torchkiln/new/templates/common/dot_gitignore",
    r"torchkiln/new/templates/custom/cuda/ops/OPNAME\.cu",
    r"torchkiln/lib/libtorchkiln_kernels\.so",
    r"torchkiln/include/torchkiln/version\.h",
    r"torchkiln/include/torchkiln/core/trace\.h",
    r"torchkiln/include/torchkiln/cpu/elementwise\.h",
    r"torchkiln/include/torchkiln/device/elementwise\.cuh",
    r"torchkiln/include/torchkiln/torch/bind\.h",
    r"torchkiln/include/torchkiln/torch/ops\.h",
    r"torchkiln/include/torchkiln/kernels/pointwise\.h",
    r"torchkiln/share/cmake/torchkiln/torchkilnConfig\.cmake",
    r"torchkiln/share/cmake/torchkiln/formula\.cu\.in",
    r"torchkiln-[\d.]+\.dist-info/licenses/LICENSE",
    r"torchkiln-[\d.]+\.dist-info/licenses/THIRD_PARTY_NOTICES\.txt",
    r"torchkiln-[\d.]+\.dist-info/entry_points\.txt",
    r"torchkiln-[\d.]+\.dist-info/sboms/torchkiln\.cdx\.json",
)
# Templates contain sources of other packages.
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

LICENSE = "BSD-3-Clause"
CUDA_LICENSE = f"{LICENSE} AND LicenseRef-NVIDIA-CUDA-EULA"

SETS = {"baseline", "avx2", "avx512"}

MOST_BYTES = 100 * 2**20  # the limit of PyPI


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


def check_metadata(checks: Checks, root: Path, record: dict[str, Any]) -> None:
    (info,) = root.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    tags = Parser().parsestr((info / "WHEEL").read_text()).get_all("Tag", [])
    print(f"       {record}")
    python = "cp" + record["python"].replace(".", "")

    def differs(what: str, found: object, expected: object) -> list[str]:
        return [] if found == expected else [f"{what}: found {found}, expected {expected}"]

    # A wheel for several torches does not require one: pip would replace a torch of a new version.
    torches = [minor(built["version"]) for built in record["torches"]]
    every = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    required = [str(line) for line in every if not line.marker]
    extra = [line for line in every if line.marker and line.marker.evaluate({"extra": "torch"})]
    problems = [
        *differs(
            "Requires-Dist", required, [f"torch=={torches[0]}.*"] if len(torches) == 1 else []
        ),
        *differs("extra torch", [line.name for line in extra], ["torch"]),
        *(f"torchkiln[torch] is {words}" for line in extra for words in wrong(line, torches)),
        *differs("Version", metadata["Version"], record["version"]),
        *instruction_problems(record),
        *license_problems(metadata["License-Expression"], record),
        *differs(
            "License-File",
            metadata.get_all("License-File"),
            ["LICENSE", "THIRD_PARTY_NOTICES.txt"],
        ),
        *(
            f"tag {tag}, expected {python}"
            for tag in tags
            if not tag.startswith(f"{python}-{python}-")
        ),
    ]
    checks.none("metadata and record agree", problems)


def instruction_problems(record: dict[str, Any]) -> Iterable[str]:
    """A wheel for several torches is published, so it needs kernels for all instruction sets."""
    built = set(record["cpu_instructions"])
    if len(record["torches"]) > 1 and "x86_64" in record["platform"]:
        yield from (f"CPU kernels for {name}: missing" for name in sorted(SETS - built))


def license_problems(found: str, record: dict[str, Any]) -> Iterable[str]:
    """A published wheel with kernels names NVIDIA's license, as it contains the CUDA runtime.

    For a local build CMake decides on kernels after its metadata is written.
    """
    expected = {CUDA_LICENSE if record["cuda"] else LICENSE}
    if len(record["torches"]) == 1:
        expected.add(LICENSE)
    if found not in expected:
        yield f"License-Expression: found {found}, expected {' or '.join(sorted(expected))}"


def wrong(extra: Requirement, torches: list[str]) -> Iterable[str]:
    """The torch extra must accept each of these versions, and reject the next older and newer."""
    takes = extra.specifier.contains
    yield from (f"not for torch {version}" for version in torches if not takes(f"{version}.0"))
    numbers = sorted(tuple(map(int, version.split("."))) for version in torches)
    (major, first), (_, last) = numbers[0], numbers[-1]
    outside = (f"{major}.{first - 1}", f"{major}.{last + 1}") if len(torches) > 1 else ()
    yield from (f"for torch {version}, too" for version in outside if takes(f"{version}.0"))


def check_bill(checks: Checks, root: Path, record: dict[str, Any]) -> None:
    """The SBOM is valid and lists all expected components."""
    for path in root.glob("*.dist-info/sboms/torchkiln.cdx.json"):
        text = path.read_text()
        invalid = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        checks.none("the SBOM is CycloneDX", [str(invalid)] if invalid else [])
        bill = json.loads(text)
        found = [(part["name"], part["version"]) for part in bill["components"]]
        print(f"       {', '.join(f'{name} {version}' for name, version in found)}")
        expected = {"torch", "pybind11", "libstdc++ headers", "CPython headers"}
        if record["cuda"]:
            expected |= {"CCCL", "CUDA Toolkit headers", "CUDA Runtime"}
        names = {name for name, _ in found}
        problems = [f"only there or here: {name}" for name in names ^ expected]
        named = {version for name, version in found if name == "torch"}
        built = {torch["version"] for torch in record["torches"]}
        problems += [f"only there or here: torch {version}" for version in named ^ built]
        if bill["metadata"]["component"]["version"] != record["version"]:
            problems.append(f"it is of torchkiln {bill['metadata']['component']['version']}")
        checks.none("the SBOM lists what the build took from others, and nothing else", problems)


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
        check_libraries(checks, package, record, [folder / "torch" for folder in given], wheel)
    if checks.failed:
        raise SystemExit("the wheel has failed")


if __name__ == "__main__":
    main()
