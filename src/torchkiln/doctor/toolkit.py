"""The CUDA compilers that a build would look at, in its order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchkiln.doctor.environment import Environment

EXTRAS = "nvcc,nvvm,crt,cccl"
# Wheels of their own, which pip may leave out or take from another version.
PARTS = ("nvidia_cuda_runtime", "nvidia_nvvm", "nvidia_cuda_crt", "nvidia_cuda_cccl")
VARIABLES = ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Nvcc:
    """A compiler."""

    path: Path
    version: str | None
    """X.Y; none where it does not run."""
    gaps: tuple[str, ...]
    """What the registry's toolkit lacks or has of another version."""

    def __str__(self) -> str:
        """Version, path and what is wrong with it."""
        version = self.version or "one that does not run"
        lacks = f" with {', '.join(self.gaps)}" if self.gaps else ""
        return f"{version}{lacks} ({self.path})"


def nvccs(environment: Environment, cuda: str) -> list[Nvcc]:
    """All there are; the first whose version is torch's is the one that a build takes."""
    files: dict[Path, Path] = {}
    for path in _candidates(environment, cuda):
        files.setdefault(path.resolve(), path)
    return [_look(environment, path) for path in files.values()]


def install(environment: Environment, cuda: str) -> str:
    """What brings the one that matches."""
    return f"{environment.pip} 'cuda-toolkit[{EXTRAS}]=={cuda}.*'"


def _candidates(environment: Environment, cuda: str) -> Iterator[Path]:
    if named := environment.variables.get("CUDACXX"):
        yield environment.which(named) or Path(named)
        return
    homes = [environment.variables.get(name) for name in VARIABLES]
    files = [Path(home) / "bin" / "nvcc" for home in homes if home]
    files.append(Path(environment.python).with_name("nvcc"))
    if system := environment.which("nvcc"):
        files.append(system)
    folders = [environment.at("/usr/local/cuda"), environment.at(f"/usr/local/cuda-{cuda}")]
    folders += environment.in_site(f"nvidia/cu{cuda.partition('.')[0]}")
    files += [folder / "bin" / "nvcc" for folder in folders]
    yield from (file for file in files if file.is_file())


def _look(environment: Environment, path: Path) -> Nvcc:
    answer = environment.run(path, "--version")
    match = re.search(r"release (\d+\.\d+)", answer.out)
    version = match[1] if match else None
    site = path.parents[3] if len(path.parents) > 3 else path
    registry = path.parents[2].name == "nvidia" if len(path.parents) > 2 else False
    gaps = tuple(_gaps(site, version)) if registry and version else ()
    return Nvcc(path, version, gaps)


def _gaps(site: Path, version: str) -> Iterator[str]:
    for part in PARTS:
        records = [folder.name for folder in sorted(site.glob(f"{part}-*.dist-info"))]
        if not records:
            yield f"no {part}"
        elif not any(name.startswith(f"{part}-{version}.") for name in records):
            yield records[0].removesuffix(".dist-info")
