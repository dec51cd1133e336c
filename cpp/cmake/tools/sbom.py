"""Usage: sbom.py NINJA BUILD VERSION COMPILER OUT

Writes a CycloneDX list of the third-party code in the libraries of a build: the projects whose
headers were compiled in, from ninja's records, and the CUDA runtime if it is linked in.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A third-party component."""

    name: str
    version: str
    license: str
    purl: str
    included: str = "as headers, compiled in"


def compiled_in(deps: str) -> list[Path]:
    """The files in the output of `ninja -t deps`."""
    return sorted({Path(line.strip()) for line in deps.splitlines() if line.startswith("  ")})


def parts(files: Iterable[Path]) -> set[Part]:
    """The components of the files, without torchkiln, the C library and Linux."""
    found: dict[str, Part | None] = {}
    for file in map(str, files):
        for pattern, describe in OWNERS:
            if match := re.search(pattern, file):
                if match[0] not in found:
                    found[match[0]] = describe(match[0])
                break
    return {part for part in found.values() if part}


def _torch(match: str) -> Part:
    folder = Path(match).parent
    facts = runpy.run_path(str(folder / "version.py"))
    version = str(facts["__version__"]).partition("+")[0]
    return Part("torch", version, "BSD-3-Clause", f"pkg:pypi/torch@{version}")


def _pybind11(match: str) -> Part:
    text = (Path(match) / "detail" / "common.h").read_text(encoding="utf-8")
    numbers = re.findall(r"#\s*define PYBIND11_VERSION_(?:MAJOR|MINOR|MICRO)\s+(\d+)", text)
    version = ".".join(numbers)
    return Part("pybind11", version, "BSD-3-Clause", f"pkg:pypi/pybind11@{version}")


def _cccl(match: str) -> Part:
    text = Path(match).read_text(encoding="utf-8")
    (number,) = re.findall(r"#\s*define CCCL_VERSION (\d+)", text)
    version = f"{int(number) // 1000000}.{int(number) // 1000 % 1000}.{int(number) % 1000}"
    licenses = "Apache-2.0 WITH LLVM-exception AND Apache-2.0 AND BSD-3-Clause"
    return Part("CCCL", version, licenses, f"pkg:github/NVIDIA/cccl@v{version}")


def _cuda(match: str) -> Part:
    """The runtime's headers, from the wheel nvidia-cuda-runtime or from a system toolkit."""
    header, license_ = Path(match), "LicenseRef-NVIDIA-CUDA-EULA"
    name = "CUDA Toolkit headers"
    for folder in header.parents:
        for info in folder.glob("nvidia_cuda_runtime*.dist-info"):
            version = info.name.removesuffix(".dist-info").partition("-")[2]
            distribution = info.name.partition("-")[0].replace("_", "-")
            return Part(name, version, license_, f"pkg:pypi/{distribution}@{version}#include")
        if (listed := folder / "version.json").is_file():
            version = json.loads(listed.read_text(encoding="utf-8"))["cuda_cudart"]["version"]
            return Part(name, version, license_, f"pkg:generic/cuda-cudart@{version}#include")
    text = header.read_text(encoding="utf-8", errors="replace")
    (number,) = re.findall(r"#\s*define CUDART_VERSION\s+(\d+)", text)
    version = f"{int(number) // 1000}.{int(number) % 1000 // 10}"
    return Part(name, version, license_, f"pkg:generic/cuda-cudart@{version}#include")


def linked_in(commands: str, found: set[Part]) -> set[Part]:
    """The static libraries in `ninja -t commands`, with the version of their headers."""
    runtime = (part for part in found if part.name == "CUDA Toolkit headers")
    if "libcudart_static.a" not in commands:
        return set()
    return {
        part._replace(
            name="CUDA Runtime",
            purl=part.purl.replace("#include", "#lib/libcudart_static.a"),
            included="as a static library, linked in",
        )
        for part in runtime
    }


def _libstdcxx(match: str) -> Part:
    version = Path(match).name
    licenses = "GPL-3.0-or-later WITH GCC-exception-3.1"
    return Part("libstdc++ headers", version, licenses, f"pkg:generic/libstdc%2B%2B@{version}")


def _python(match: str) -> Part:
    version = Path(match).name.removeprefix("python")
    return Part("CPython headers", version, "PSF-2.0", f"pkg:generic/cpython@{version}")


def _other(match: str) -> Part:
    name = Path(match).name
    return Part(name, "of torch", "LicenseRef-with-torch", f"pkg:generic/{name}")


# The first pattern that matches a header selects its owner.
OWNERS = (
    (r"^.*/torch/include/pybind11\b", _pybind11),
    (r"^.*/torch/include(?=/(ATen|c10|caffe2|torch)/)", _torch),
    (r"^.*/torch/include/[^/]+(?=/)", _other),
    (r"^.*/cuda/std/__cccl/version\.h$", _cccl),
    (r"^.*/cuda_runtime_api\.h$", _cuda),
    (r"^.*/include/c\+\+/[\d.]+", _libstdcxx),
    (r"^.*/include/python3\.\d+", _python),
)


def bill(version: str, compiler: str, found: set[Part]) -> dict[str, Any]:
    """The document; equal builds give equal documents."""
    ours = f"pkg:pypi/torchkiln@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": part.purl,
            "name": part.name,
            "version": part.version,
            "purl": part.purl,
            "licenses": [{"expression": part.license}],
            "properties": [{"name": "torchkiln:included", "value": part.included}],
        }
        for part in sorted(found)
    ]
    name, _, number = compiler.partition(" ")
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": ours,
                "name": "torchkiln",
                "version": version,
                "purl": ours,
                "licenses": [{"expression": "BSD-3-Clause"}],
            },
            "tools": {"components": [{"type": "application", "name": name, "version": number}]},
        },
        "components": components,
        "dependencies": [
            {"ref": ours, "dependsOn": [component["bom-ref"] for component in components]}
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document))
    return {"serialNumber": f"urn:uuid:{serial}"} | document


def main() -> None:
    ninja, build, version, compiler, out = sys.argv[1:]

    def ask(tool: str) -> str:
        command = [ninja, "-C", build, "-t", tool]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = parts(Path(build, file).resolve() for file in compiled_in(ask("deps")))
    found |= linked_in(ask("commands"), found)
    if not any(part.name == "torch" for part in found):
        raise SystemExit(f"sbom.py: ninja names no header of torch in {build}, expected some")
    text = json.dumps(bill(version, compiler, found), indent=2)
    Path(out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
