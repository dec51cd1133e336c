"""Facts about the installed torch, for the build.

As a scikit-build-core provider it writes the dependency on torch; run as a script it answers CMake.
Torch is never imported: that takes seconds, and fails without torch's libraries.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Any

LOADER = Path(__file__).parents[3] / "src" / "torchkiln" / "_loader.py"
find_torch = runpy.run_path(str(LOADER))["find_torch"]


LICENSE = "BSD-3-Clause"
CUDA_LICENSE = f"{LICENSE} AND LicenseRef-NVIDIA-CUDA-EULA"


class TorchRequirement:
    """Metadata that depends on the build.

    Requires-Dist: torch of the minor version that a build from source is compiled against.
    License-Expression: a wheel with CUDA kernels contains NVIDIA's CUDA runtime. Only
    TORCHKILN_CUDA=on, as in release builds, says so before CMake has run.
    """

    def __init__(self) -> None:
        self.state = "sdist"

    def build_state(self, state: str) -> None:
        self.state = state

    def dynamic_wheel(self, _settings: dict[str, Any]) -> dict[str, bool]:
        """The fields that are dynamic in the sdist."""
        return {"dependencies": True, "license": True}

    def dynamic_metadata(self, _settings: dict[str, Any], _project: dict[str, Any]) -> Any:
        kernels = os.environ.get("TORCHKILN_CUDA", "").lower() in ("on", "true")
        license_ = CUDA_LICENSE if kernels and self.state != "sdist" else LICENSE
        # A requirement would make pip replace a torch that does not match; the loader reports it.
        if self.state == "sdist" or os.environ.get("TORCHKILN_TORCHES"):
            return {"dependencies": [], "license": license_}
        return {"dependencies": [f"torch=={torch_here().minor}.*"], "license": license_}


def torch_here() -> Any:
    """The torch to build against; exits with a message if it is missing or damaged."""
    pip = f"{sys.executable} -m pip install"
    try:
        found = find_torch()
    except Exception as error:  # a damaged file may raise any error
        raise SystemExit(
            f"torchkiln: the torch in {sys.executable} is damaged: {type(error).__name__}: {error}."
            f" Type:\n  {pip} --force-reinstall torch"
        ) from None
    if found is None:
        raise SystemExit(
            f"torchkiln: found no torch in {sys.executable}, needed the torch to build against."
            f" Type:\n  {pip} 'torch>=2.11'"
        )
    return found


def nvidia_folders() -> list[str]:
    """Folders with the files of NVIDIA's CUDA wheels, which share one namespace package."""
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or []) if spec else []


if __name__ == "__main__":
    found = torch_here()
    print(found.version, found.cuda or "", found.folder, ";".join(nvidia_folders()), sep="\n")
