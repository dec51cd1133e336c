"""Findings about folders in which compiled code is kept."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path

from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.finding import Finding, ok, problem

# No build takes as long. Torch waits for the file to vanish, whoever made it and died.
STALE = 3600


def find_caches(environment: Environment, _: Facts) -> list[Finding]:
    """Whether they can be written, and whether a build that died has left one locked."""
    found = []
    for variable, folder in folders(environment).items():
        if not writable(folder):
            words = f"{folder} cannot be written"
            other = f"export {variable}={environment.home}/{folder.name}-of-mine"
            remedies = (f"sudo chown -R $(id -u) {folder}", other)
            found.append(problem("cache", words, *remedies))
    for lock in stale_locks(folders(environment)["TORCH_EXTENSIONS_DIR"]):
        words = f"{lock} was left by a build that died: torch waits for it without end"
        found.append(problem("lock", words, f"rm '{lock}'"))
    if not found:
        places = [str(folder) for folder in folders(environment).values() if folder.is_dir()]
        found.append(ok("caches", ", ".join(places) or "none yet"))
    return found


def folders(environment: Environment) -> dict[str, Path]:
    """By the variable that names another one: torch's, Triton's and the driver's."""
    given, home = environment.variables, environment.home
    cache = Path(given.get("XDG_CACHE_HOME") or home / ".cache")
    temporary = Path(given.get("TMPDIR") or environment.at("/tmp"))
    defaults = {
        "TORCH_EXTENSIONS_DIR": cache / "torch_extensions",
        "TORCHINDUCTOR_CACHE_DIR": temporary / f"torchinductor_{_user()}",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
    }
    return {name: Path(given.get(name) or folder) for name, folder in defaults.items()}


def writable(folder: Path) -> bool:
    """Whether it can be written, or made."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def stale_locks(folder: Path) -> list[Path]:
    """Files named lock, of an extension or of one below a folder for Python and CUDA."""
    now = time.time()
    found = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    return sorted(lock for lock in found if now - lock.stat().st_mtime > STALE)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
