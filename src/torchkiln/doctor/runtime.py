"""Findings about profiling, folders for compiled code and libraries that must be loaded once."""

from __future__ import annotations

import getpass
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from torchkiln._cache_folder import VARIABLE, cache_folder, danger
from torchkiln.doctor import Finding, note, ok, problem
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts

NCU_PLACES = (
    "/usr/local/cuda/bin/ncu",
    "/usr/local/cuda-*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
)
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38
COUNTERS_FOR_ALL = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee "
    "/etc/modprobe.d/nvidia-profiling.conf && sudo update-initramfs -u && sudo reboot"
)
COUNTERS_IN_CONTAINER = (
    "docker run --cap-add=SYS_ADMIN ...     (driver 565 and later: --cap-add=PERFMON)"
)

STALE_SECONDS = 3600
"""Age in seconds above which a lock counts as orphaned: no build takes as long."""

# Copies that wheels bundle have a hash in the name: libgomp-a34b3233.so.1.
OPENMP = re.compile(r"^lib(gomp|iomp5|omp)(-[0-9a-f]+)?\.so")
CUDA_RUNTIME = re.compile(r"^libcudart(-[0-9a-f]+)?\.so")


def find_ncu(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether Nsight Compute is installed and may read the GPU's counters."""
    if not facts.driver.device_there:
        return []
    path = environment.which("ncu") or installed_ncu(environment.root)
    if path is None:
        package = "sudo apt-get install nsight-compute     (from NVIDIA's repository)"
        return [note("ncu", "not found: `torchkiln profile` has times, but no counters", package)]
    driver_options = environment.read("/proc/driver/nvidia/params")
    restricted = re.search(r"RmProfilingAdminOnly: *1", driver_options)
    if restricted and not _is_privileged(environment):
        words = f"{path}, but the driver lets only administrators read the counters"
        return [note("ncu", words, COUNTERS_FOR_ALL, COUNTERS_IN_CONTAINER)]
    return [ok("ncu", str(path))]


def installed_ncu(root: Path = Path("/")) -> Path | None:
    """Find ncu in the folders of its installers."""
    for place in NCU_PLACES:
        if found := sorted(root.glob(place.removeprefix("/"))):
            return found[-1]
    return None


def _is_privileged(environment: Environment) -> bool:
    match = re.search(r"CapEff:\s*([0-9a-f]+)", environment.read("/proc/self/status"))
    capabilities = int(match[1], 16) if match else 0
    return bool(capabilities >> CAP_SYS_ADMIN & 1 or capabilities >> CAP_PERFMON & 1)


def find_caches(environment: Environment, _: Facts) -> list[Finding]:
    """Whether folders for compiled code are writable and free of orphaned locks."""
    found = []
    caches = cache_folders(environment)
    for variable, folder in caches.items():
        if not writable(folder):
            own = f"export {variable}={environment.home}/{folder.name}-of-mine"
            remedies = (f"sudo chown -R $(id -u) {folder}", own)
            found.append(problem("cache", f"{folder} is not writable", *remedies))
    kernels = caches[VARIABLE]
    if kernels.is_dir() and (words := danger(kernels.stat())):
        repair = [f"chmod go-w {kernels}"] if "write" in words else []
        own = f"export {VARIABLE}={environment.home}/kernels-of-mine"
        words = f"{kernels} is not used, because {words}: kernels are compiled by every process"
        found.append(problem("cache", words, *repair, own))
    for lock in stale_locks(caches["TORCH_EXTENSIONS_DIR"]):
        words = f"{lock} was left by a build that died: torch waits for it forever"
        found.append(problem("lock", words, f"rm '{lock}'"))
    if not found:
        present = [str(folder) for folder in caches.values() if folder.is_dir()]
        found.append(ok("caches", ", ".join(present) or "none yet"))
    return found


def cache_folders(environment: Environment) -> dict[str, Path]:
    """Folders of torchkiln, torch, Triton and the driver, by the variable that overrides each."""
    given, home = environment.variables, environment.home
    cache = Path(given.get("XDG_CACHE_HOME") or home / ".cache")
    temporary = Path(given.get("TMPDIR") or environment.at("/tmp"))
    defaults = {
        "TORCH_EXTENSIONS_DIR": cache / "torch_extensions",
        "TORCHINDUCTOR_CACHE_DIR": temporary / f"torchinductor_{_user()}",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
    }
    others = {name: Path(given.get(name) or folder) for name, folder in defaults.items()}
    return {VARIABLE: cache_folder(given, home), **others}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def writable(folder: Path) -> bool:
    """Whether a folder is writable, or can be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def stale_locks(folder: Path) -> list[Path]:
    """Old files named lock, in EXTENSION/ or PYTHON_AND_CUDA/EXTENSION/."""
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    return sorted(lock for lock in locks if time.time() - lock.stat().st_mtime > STALE_SECONDS)


def find_duplicates(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether a process loads, or can load, two copies of OpenMP or of the CUDA runtime."""
    found = []
    for topic, name, why in (
        ("OpenMP", OPENMP, "each starts its own threads, which compete for the cores"),
        ("CUDA runtime", CUDA_RUNTIME, "errors in one are invisible to the other"),
    ):
        loaded = _matching(name, map(Path, facts.trial.libraries))
        present = _matching(name, _libraries(environment))
        words = ", ".join(map(str, loaded if len(loaded) > 1 else present))
        if len(loaded) > 1:
            remedies = _unload(environment, loaded)
            found.append(problem(topic, f"{words} are loaded at once: {why}", *remedies))
        elif len(present) > 1:
            found.append(note(topic, f"{words}: do not load them in one process, {why}"))
        elif loaded or present:
            found.append(ok(topic, str((loaded or present)[0])))
    return found


def _matching(name: re.Pattern[str], paths: Iterable[Path]) -> list[Path]:
    """The files whose name matches, with links resolved, sorted."""
    return sorted({path.resolve() for path in paths if name.match(path.name)})


def _libraries(environment: Environment) -> list[Path]:
    patterns = ("*.libs/lib*omp*", "*/lib/lib*omp*", "*/.libs/lib*omp*", "*/*/lib/libcudart*")
    found = [path for pattern in patterns for path in environment.in_site(pattern)]
    found += environment.in_site("*/lib/libcudart*")
    # Packages of conda share the library folder of the environment.
    prefix = Path(environment.python).parent.parent / "lib"
    return found + sorted(prefix.glob("lib*omp*.so*")) + sorted(prefix.glob("libcudart.so*"))


def _unload(environment: Environment, loaded: list[Path]) -> list[str]:
    """Commands that prevent the second library: they unset the variables that refer to it."""
    outside = [path for path in loaded if not any(path.is_relative_to(s) for s in environment.site)]
    found = []
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        folders = re.split("[: ]", environment.variables.get(variable, ""))
        named = {str(Path(folder).resolve()) for folder in folders if folder}
        if any({str(path), str(path.parent)} & named for path in outside or loaded):
            found.append(f"unset {variable}")
    return found or [f"{environment.python} -m pip list     (uninstall what brings the second)"]
