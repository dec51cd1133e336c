"""``torchkiln check-hub``: what Hugging Face's hub requires of a kernel, without Nix or a download.

A folder is a project of ``kernel-builder`` (``build.toml``), a repository with builds
(``build/VARIANT``), or both.
"""

from __future__ import annotations

from pathlib import Path

from torchkiln.hub_check.binary import check_module
from torchkiln.hub_check.build import check_build
from torchkiln.hub_check.problem import Problem
from torchkiln.hub_check.project import check_project
from torchkiln.hub_check.python_source import check_package

WHERE = "torchkiln.check-hub"


def check_hub(folder: Path) -> list[Problem]:
    """Returns the requirements that a kernel does not meet.

    Raises:
        ValueError: the folder has neither sources nor builds.
    """
    has_project = (folder / "build.toml").is_file()
    builds = sorted(path for path in (folder / "build").glob("*") if path.is_dir())
    if not has_project and not builds:
        raise ValueError(
            f"{WHERE}: DIR: got {folder}, expected a folder with build.toml or build/VARIANT"
        )
    found = list(check_project(folder)) if has_project else []
    for build in builds:
        found += check_build(build)
        found += check_package(build)
        for module in sorted(build.rglob("*.so")):
            found += check_module(module)
    return found


__all__ = ["Problem", "check_hub"]
