"""Findings about torch and the build of torchkiln."""

from __future__ import annotations

import mmap
import shlex
from pathlib import Path

from torchkiln._loader import built_for, mismatch, rebuild, requirement, torches
from torchkiln.doctor import Finding, note, ok, problem
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.gpu import NATIVE, kernel_for

# Part of every symbol with a std::string argument in the C++11 ABI.
NEW_STRING = b"NSt7__cxx1112basic_string"


def find_torch(environment: Environment, facts: Facts) -> list[Finding]:
    """The installed torch, and whether it has CUDA if there is a GPU."""
    pip = environment.pip
    if facts.torch_error:
        words = f"{environment.torch} is damaged: {facts.torch_error}"
        return [problem("torch", words, f"{pip} --force-reinstall torch")]
    torch = facts.torch
    if torch is None:
        wanted = requirement(facts.record) if facts.record else "torch>=2.11"
        return [problem("torch", f"none in {environment.python}", f"{pip} '{wanted}'")]
    if facts.trial.torch_error:
        words = f"{torch.version} ({torch.folder}) cannot be imported: {facts.trial.torch_error}"
        return [problem("torch", words, f"{pip} --force-reinstall torch=={torch.version}")]
    if torch.cuda or not facts.driver.gpus:
        flavour = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA"
        return [ok("torch", f"{torch.version} with {flavour} ({torch.folder})")]
    words = f"{torch.version} has no CUDA ({torch.folder}), although there is a GPU"
    index = "https://download.pytorch.org/whl/cu130"
    remedy = f"{pip} --force-reinstall torch=={torch.version} --index-url {index}"
    return [problem("torch", words, remedy)]


def find_abi(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether torch and the compiled module use the same std::string."""
    torch = environment.torch and _has_new_string(environment.torch / "lib" / "libc10.so")
    if torch is None or facts.torch is None:
        return []
    words = f"torch uses the {'C++11' if torch else 'old'} one"
    built = facts.record and built_for(facts.record, facts.torch)
    folder = environment.package / built["folder"] if environment.package and built else None
    for module in sorted(folder.glob("_C*.so")) if folder else []:
        if facts.record and _has_new_string(module) is (not torch):
            remedy = rebuild()
            return [problem("C++ ABI", f"{words}, {module.name} the other", remedy)]
    return [ok("C++ ABI", words)]


def _has_new_string(library: Path) -> bool | None:
    """Whether a library uses the C++11 std::string; None if it cannot be read."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            return text.find(NEW_STRING) >= 0
    except (OSError, ValueError):
        return None


def find_build(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether this machine has the Python, torch and CUDA that the package was built for."""
    record = facts.record
    if record is None:
        words = facts.record_error or "torchkiln has not been built"
        where = f" ({environment.package})" if environment.package else ""
        return [problem("build", words + where, rebuild())]
    target = f"CUDA {record['cuda']}" if record["cuda"] else "the CPU only"
    if kernels := record["cuda_architectures"]:
        target += f" ({', '.join(f'sm_{architecture}' for architecture in kernels)})"
    words = (
        f"torchkiln {record['version']} for torch {torches(record)}, Python {record['python']}, "
        f"{record['platform']}, {target}"
    )
    found = mismatch(record, facts.torch)
    if found is None:
        return [ok("build", words)]
    if facts.torch is None and found.torches:
        return [note("build", words)]
    remedies = (*found.torches, rebuild())
    return [problem("build", f"{words}, but found {found.here}", *remedies)]


def find_cpu_build(_: Environment, facts: Facts) -> list[Finding]:
    """Whether a GPU is unused because the build has no CUDA kernels."""
    record, torch = facts.record, facts.torch
    if record is None or record["cuda"] or not facts.driver.gpus or not (torch and torch.cuda):
        return []
    words = "there is a GPU, but this build has kernels for the CPU only"
    return [problem("build", words, rebuild("torchkiln.cuda=on"))]


def find_import(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether the package can be imported, and its kernels run on each GPU."""
    trial, record = facts.trial, facts.record
    if record is None:
        return []
    if mismatch(record, facts.torch):
        return [note("import", "not tried: the package was built for something else")]
    if trial.torch_error:
        return [note("import", "not tried: torch cannot be imported")]
    if trial.error:
        return [problem("import", trial.error, rebuild())]
    # find_architectures() reports GPUs for which the build has no kernel.
    failed = [
        _failed_kernel(environment, f"cuda:{index}", error)
        for index, gpu in enumerate(facts.driver.gpus)
        if record["cuda"] and kernel_for(record, gpu.capability)
        if (error := trial.error_on(f"cuda:{index}"))
    ]
    if failed:
        return failed
    ran = [name for name, error in trial.devices.items() if error is None]
    return [ok("import", f"a kernel ran on {', '.join(['the CPU', *ran])}")]


def _failed_kernel(environment: Environment, device: str, error: str) -> Finding:
    words = f"none ran on {device}: {error}"
    if "kernel image" in error or "device function" in error:
        return problem("kernels", words, rebuild(NATIVE))
    program = f'import torch; torch.ones(1, device="{device}") + 1'
    torch_alone = f"{shlex.quote(environment.python)} -c '{program}'     (does torch itself run?)"
    return problem("kernels", words, "nvidia-smi     (what else runs there?)", torch_alone)
