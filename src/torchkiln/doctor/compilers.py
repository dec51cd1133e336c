"""Findings about compilers. A missing one is a problem only if torchkiln must be built here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchkiln.doctor import Finding, note, ok, problem
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts

OLDEST_CXX = (11,)
OLDEST_CMAKE = (3, 28)
EXTRAS = "nvcc,nvvm,crt,cccl"
# The CUDA toolkit of the package registry: separate wheels, which pip may omit or mismatch.
PARTS = ("nvidia_cuda_runtime", "nvidia_nvvm", "nvidia_cuda_crt", "nvidia_cuda_cccl")
VARIABLES = ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Nvcc:
    """One CUDA compiler."""

    path: Path
    version: str | None
    """X.Y, or None if it does not run."""
    gaps: tuple[str, ...]
    """Missing or mismatched wheels of the registry's toolkit."""

    def __str__(self) -> str:
        version = self.version or "one that does not run"
        gaps = f" with {', '.join(self.gaps)}" if self.gaps else ""
        return f"{version}{gaps} ({self.path})"


def nvccs(environment: Environment, cuda: str) -> list[Nvcc]:
    """All CUDA compilers, in the order in which a build tries them."""
    files: dict[Path, Path] = {}
    for path in _candidates(environment, cuda):
        files.setdefault(path.resolve(), path)
    return [_inspect(environment, path) for path in files.values()]


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


def _inspect(environment: Environment, path: Path) -> Nvcc:
    match = re.search(r"release (\d+\.\d+)", environment.run(path, "--version").out)
    version = match[1] if match else None
    # SITE/nvidia/cu13/bin/nvcc comes from the package registry.
    from_registry = len(path.parents) > 3 and path.parents[2].name == "nvidia"
    gaps = tuple(_gaps(path.parents[3], version)) if from_registry and version else ()
    return Nvcc(path, version, gaps)


def _gaps(site: Path, version: str) -> Iterator[str]:
    for part in PARTS:
        records = [folder.name for folder in sorted(site.glob(f"{part}-*.dist-info"))]
        if not records:
            yield f"no {part}"
        elif not any(name.startswith(f"{part}-{version}.") for name in records):
            yield records[0].removesuffix(".dist-info")


def _toolkit(environment: Environment, cuda: str) -> str:
    """Command that installs the matching toolkit."""
    return f"{environment.pip} 'cuda-toolkit[{EXTRAS}]=={cuda}.*'"


def find_nvcc(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether an nvcc has exactly torch's CUDA version."""
    if facts.torch is None or facts.torch.cuda is None:
        return []
    cuda = facts.torch.cuda
    found = nvccs(environment, cuda)
    match = next((nvcc for nvcc in found if nvcc.version == cuda and not nvcc.gaps), None)
    others = ", ".join(str(nvcc) for nvcc in found if nvcc is not match)
    if match:
        return [ok("nvcc", f"{match}{f'; also {others}' if others else ''}")]
    state = problem if facts.building and facts.driver.device_there else note
    what = others or "none"
    remedies = [_toolkit(environment, cuda)]
    if environment.variables.get("CUDACXX"):
        what += ", named by CUDACXX"
        remedies.insert(0, "unset CUDACXX")
    return [state("nvcc", f"{what}; torch's CUDA needs nvcc {cuda}", *remedies)]


def find_cuda_home(environment: Environment, _: Facts) -> list[Finding]:
    """Whether the folders in ``VARIABLES``, such as CUDA_HOME, contain an nvcc."""
    found = []
    for name in VARIABLES:
        named = environment.variables.get(name)
        if named and not (Path(named) / "bin" / "nvcc").is_file():
            found.append(problem(name, f"{named} has no bin/nvcc", f"unset {name}"))
    return found


def find_nvrtc(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether kernels can be compiled at run time."""
    if facts.torch is None or facts.torch.cuda is None:
        return []
    cuda = facts.torch.cuda
    name = f"libnvrtc.so.{cuda.split('.')[0]}"
    found = environment.in_site(f"nvidia/*/lib/{name}") + environment.in_site(f"torch/lib/{name}")
    folders = [environment.at("/usr/local/cuda/lib64")]
    folders += map(Path, environment.variables.get("LD_LIBRARY_PATH", "").split(":"))
    found += [folder / name for folder in folders if (folder / name).is_file()]
    if found:
        return [ok("NVRTC", str(found[0]))]
    words = f"no {name}, which compiles kernels at run time"
    return [_missing_wheel(environment, facts, "NVRTC", words, "nvidia-cuda-nvrtc")]


def find_headers(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether CUDA's headers are installed.

    cuda_fp16.h includes nv/target under nvcc, but not under NVRTC. So nv/target is needed only if
    an nvcc is installed in the same toolkit.
    """
    if facts.torch is None or facts.torch.cuda is None:
        return []
    folders = environment.in_site("nvidia/*/include")
    folders.append(environment.at("/usr/local/cuda/include"))
    if home := environment.variables.get("CUDA_HOME"):
        folders.append(Path(home) / "include")
    folder = next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)
    if folder is None:
        words = "no cuda_fp16.h, which kernels compiled at run time include"
        return [_missing_wheel(environment, facts, "headers", words, "nvidia-cuda-runtime")]
    targets = (folder / "nv" / "target", folder / "cccl" / "nv" / "target")
    if (folder.parent / "bin" / "nvcc").is_file() and not any(map(Path.is_file, targets)):
        words = f"{folder} has cuda_fp16.h, but not nv/target, which nvcc needs with it"
        return [note("headers", words, _toolkit(environment, facts.torch.cuda))]
    return [ok("headers", str(folder))]


def _missing_wheel(
    environment: Environment, facts: Facts, topic: str, words: str, package: str
) -> Finding:
    """A missing wheel: a problem on a machine with a GPU, else a note."""
    cuda = (facts.torch and facts.torch.cuda) or ""
    suffix = "-cu12" if cuda.startswith("12.") else ""
    state = problem if facts.driver.gpus else note
    return state(topic, words, f"{environment.pip} '{package}{suffix}=={cuda}.*'")


def find_cxx(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether g++ is installed and new enough."""
    path = environment.which(environment.variables.get("CXX") or "g++")
    version = _version(environment, path, "-dumpfullversion")
    return _build_tool(facts, "g++", path, version, OLDEST_CXX, "sudo apt-get install g++")


def find_cmake(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether cmake is installed and new enough."""
    remedy = f"{environment.pip} 'cmake>=3.28'"
    # A build prefers the cmake that is installed for this Python.
    own = Path(environment.python).with_name("cmake")
    path = own if own.is_file() else environment.which("cmake")
    version = _version(environment, path, "--version")
    return _build_tool(facts, "cmake", path, version, OLDEST_CMAKE, remedy)


def _version(environment: Environment, path: Path | None, option: str) -> str | None:
    answer = environment.run(path, option).out if path else ""
    match = re.search(r"\d+(\.\d+)+", answer)
    return match[0] if match else None


def _build_tool(
    facts: Facts,
    topic: str,
    path: Path | None,
    version: str | None,
    oldest: tuple[int, ...],
    remedy: str,
) -> list[Finding]:
    if version and tuple(map(int, version.split("."))) >= oldest:
        return [ok(topic, f"{version} ({path})")]
    found = f"{version or 'unknown version'} ({path})" if path else "none"
    words = f"{found}, a build needs {'.'.join(map(str, oldest))} or newer"
    if facts.building:
        return [problem(topic, words, remedy)]
    return [note(topic, f"{words}; nothing has to be built here", remedy)]
