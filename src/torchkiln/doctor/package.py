"""Findings about torch and the build of this package."""

from __future__ import annotations

import mmap
import shlex
from pathlib import Path
from typing import Any

from torchkiln._loader import built_for, mismatch, rebuild, requirement, torches
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.finding import Finding, note, ok, problem
from torchkiln.doctor.kernels import OLDEST_GPU, kernel_of

NATIVE = "torchkiln.cuda-architectures=native"
# std::string of the C++11 ABI, in the names of types.
NEW_STRING = b"NSt7__cxx1112basic_string"


def find_torch(environment: Environment, facts: Facts) -> list[Finding]:
    """Which torch there is, and whether it has CUDA where a GPU is."""
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
    words = f"{torch.version} has no CUDA ({torch.folder}), though there is a GPU"
    index = "https://download.pytorch.org/whl/cu130"
    remedy = f"{pip} --force-reinstall torch=={torch.version} --index-url {index}"
    return [problem("torch", words, remedy)]


def find_abi(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether torch and the compiled module have the same std::string."""
    torch = environment.torch and _has_new_string(environment.torch / "lib" / "libc10.so")
    built = facts.record and built_for(facts.record, facts.torch)
    folder = environment.package / built["folder"] if environment.package and built else None
    modules = sorted(folder.glob("_C*.so")) if folder else []
    ours = [_has_new_string(module) for module in modules]
    if torch is None or facts.torch is None:
        return []
    words = f"torch has the {'C++11' if torch else 'old'} one"
    if facts.record and (not torch) in ours:
        words += f", {modules[ours.index(not torch)].name} the other"
        return [problem("C++ ABI", words, rebuild(facts.record["version"]))]
    return [ok("C++ ABI", words)]


def _has_new_string(library: Path) -> bool | None:
    """Whether a library names that string; none where it cannot be read."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            return text.find(NEW_STRING) >= 0
    except (OSError, ValueError):
        return None


def find_build(environment: Environment, facts: Facts) -> list[Finding]:
    """What the package was built for, and whether that is here."""
    record = facts.record
    if record is None:
        words = facts.record_error or "torchkiln has not been built"
        where = f" ({environment.package})" if environment.package else ""
        pip = f"{environment.pip} --force-reinstall --no-deps"
        return [problem("build", words + where, f"{pip} torchkiln", f"{pip} .     (its sources)")]
    for_cuda = f"CUDA {record['cuda']}" if record["cuda"] else "the CPU only"
    if kernels := record["cuda_architectures"]:
        for_cuda += f" ({', '.join(f'sm_{architecture}' for architecture in kernels)})"
    words = (
        f"torchkiln {record['version']} for torch {torches(record)}, Python {record['python']}, "
        f"{record['platform']}, {for_cuda}"
    )
    found = mismatch(record, facts.torch)
    if found is None:
        return [ok("build", words)]
    if facts.torch is None and found.torches:
        return [note("build", words)]
    remedies = (*found.torches, rebuild(record["version"]))
    return [problem("build", f"{words}, but found {found.here}", *remedies)]


def find_cpu_build(_: Environment, facts: Facts) -> list[Finding]:
    """Whether a GPU goes unused because the build has no kernels for any."""
    record, torch = facts.record, facts.torch
    if record is None or record["cuda"] or not facts.driver.gpus or not (torch and torch.cuda):
        return []
    words = "there is a GPU, but this build has kernels for the CPU only"
    return [problem("build", words, rebuild(record["version"], "torchkiln.cuda=on"))]


def find_import(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether the package can be imported and its kernels run."""
    trial, record = facts.trial, facts.record
    if record is None or mismatch(record, facts.torch):
        return [note("import", "not tried: the build does not belong here")] if record else []
    again = rebuild(record["version"])
    if trial.torch_error:
        return [note("import", "not tried: torch cannot be imported")]
    if trial.error:
        return [problem("import", trial.error, again)]
    # Of GPUs without kernels, find_architectures() tells.
    failed = [
        _failed_kernel(environment, record, f"cuda:{index}", error)
        for index, gpu in enumerate(facts.driver.gpus)
        if record["cuda"] and kernel_of(record, gpu.capability)
        if (error := trial.error_on(f"cuda:{index}"))
    ]
    if failed:
        return failed
    ran = [name for name, error in trial.devices.items() if error is None]
    return [ok("import", f"a kernel ran on {', '.join(['the CPU', *ran])}")]


def _failed_kernel(
    environment: Environment, record: dict[str, Any], device: str, error: str
) -> Finding:
    words = f"none ran on {device}: {error}"
    if "kernel image" in error or "device function" in error:
        return problem("kernels", words, rebuild(record["version"], NATIVE))
    program = f'import torch; torch.ones(1, device="{device}") + 1'
    alone = (
        f"{shlex.quote(environment.python)} -c '{program}'     (whether torch itself runs there)"
    )
    return problem("kernels", words, "nvidia-smi     (what else runs there)", alone)


def find_architectures(_: Environment, facts: Facts) -> list[Finding]:
    """Whether the build has kernels for each GPU."""
    record = facts.record
    if record is None or record["cuda"] is None:
        return []
    found = []
    for index, gpu in enumerate(facts.driver.gpus):
        words = f"none for cuda:{index}, {gpu}"
        if gpu.capability < OLDEST_GPU:
            needed = ".".join(map(str, OLDEST_GPU))
            found.append(note("kernels", f"{words}: they need {needed} or newer"))
        elif kernel_of(record, gpu.capability) is None:
            found.append(problem("kernels", words, rebuild(record["version"], NATIVE)))
    return found
