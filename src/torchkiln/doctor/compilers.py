"""Findings about what compiles: missed only where there is something to build."""

from __future__ import annotations

import re
from pathlib import Path

from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.finding import Finding, note, ok, problem
from torchkiln.doctor.toolkit import VARIABLES, install, nvccs

OLDEST_CXX = (11,)
OLDEST_CMAKE = (3, 28)


def find_nvcc(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether one has exactly the version of torch's CUDA."""
    if facts.torch is None or facts.torch.cuda is None:
        return []
    cuda = facts.torch.cuda
    found = nvccs(environment, cuda)
    match = next((nvcc for nvcc in found if nvcc.version == cuda and not nvcc.gaps), None)
    others = [str(nvcc) for nvcc in found if nvcc is not match]
    if match:
        beside = f"; beside it {', '.join(others)}" if others else ""
        return [ok("nvcc", f"{match}{beside}")]
    state = problem if facts.building and facts.driver.device_there else note
    what = ", ".join(others) or "none"
    remedies = [install(environment, cuda)]
    if environment.variables.get("CUDACXX"):
        what += ", named by CUDACXX"
        remedies.insert(0, "unset CUDACXX")
    return [state("nvcc", f"{what}; torch's CUDA needs nvcc {cuda}", *remedies)]


def find_cuda_home(environment: Environment, _: Facts) -> list[Finding]:
    """Whether the folders that are named for CUDA are there."""
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
    found = _libraries(environment, name)
    if found:
        return [ok("NVRTC", str(found[0]))]
    package = "nvidia-cuda-nvrtc" + ("-cu12" if cuda.startswith("12.") else "")
    remedy = f"{environment.pip} '{package}=={cuda}.*'"
    state = problem if facts.driver.gpus else note
    return [state("NVRTC", f"no {name}, which compiles kernels at run time", remedy)]


def _libraries(environment: Environment, name: str) -> list[Path]:
    found = environment.in_site(f"nvidia/*/lib/{name}")
    found += environment.in_site(f"torch/lib/{name}")
    folders = [environment.at("/usr/local/cuda/lib64")]
    folders += map(Path, environment.variables.get("LD_LIBRARY_PATH", "").split(":"))
    return [*found, *(folder / name for folder in folders if (folder / name).is_file())]


def find_headers(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether CUDA's headers are there.

    Those of half precision include one of CUDA's C++ library when nvcc reads them, but not at run
    time: without an nvcc beside them nobody misses it.
    """
    if facts.torch is None or facts.torch.cuda is None:
        return []
    cuda = facts.torch.cuda
    folders = environment.in_site("nvidia/*/include")
    folders.append(environment.at("/usr/local/cuda/include"))
    if home := environment.variables.get("CUDA_HOME"):
        folders.append(Path(home) / "include")
    halves = next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)
    if halves is None:
        words = "no cuda_fp16.h, which kernels include that are compiled at run time"
        package = "nvidia-cuda-runtime" + ("-cu12" if cuda.startswith("12.") else "")
        state = problem if facts.driver.gpus else note
        return [state("headers", words, f"{environment.pip} '{package}=={cuda}.*'")]
    targets = (halves / "nv" / "target", halves / "cccl" / "nv" / "target")
    if (halves.parent / "bin" / "nvcc").is_file() and not any(map(Path.is_file, targets)):
        words = f"{halves} has cuda_fp16.h, but not the nv/target that nvcc wants with it"
        return [note("headers", words, install(environment, cuda))]
    return [ok("headers", str(halves))]


def find_cxx(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether g++ is there and new enough."""
    name = environment.variables.get("CXX") or "g++"
    path = environment.which(name)
    version = _version(environment, path, "-dumpfullversion")
    return _tool(facts, "g++", path, version, OLDEST_CXX, "sudo apt-get install g++")


def find_cmake(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether cmake is there and new enough."""
    remedy = f"{environment.pip} 'cmake>=3.28'"
    # The build takes that of this Python's packages first.
    beside = Path(environment.python).with_name("cmake")
    path = beside if beside.is_file() else environment.which("cmake")
    version = _version(environment, path, "--version")
    return _tool(facts, "cmake", path, version, OLDEST_CMAKE, remedy)


def _version(environment: Environment, path: Path | None, question: str) -> str | None:
    answer = environment.run(path, question).out if path else ""
    match = re.search(r"\d+(\.\d+)+", answer)
    return match[0] if match else None


def _tool(  # noqa: PLR0917
    facts: Facts,
    topic: str,
    path: Path | None,
    version: str | None,
    oldest: tuple[int, ...],
    remedy: str,
) -> list[Finding]:
    if version and tuple(map(int, version.split("."))) >= oldest:
        return [ok(topic, f"{version} ({path})")]
    found = f"{version or 'one that does not tell its version'} ({path})" if path else "none"
    words = f"{found}, needed {'.'.join(map(str, oldest))} or newer to build"
    if facts.building:
        return [problem(topic, words, remedy)]
    return [note(topic, f"{words}, which is not needed here", remedy)]
