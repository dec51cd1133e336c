"""The PEP 517 backend: scikit-build-core, which refuses builds that would replace the user's torch.

A build in isolation cannot see the torch of the user's environment. It would fetch the newest one,
and the wheel would require that version. Such a build ends before anything is downloaded, unless a
setting names the torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

SETTING = "torchkiln.torch"
ISOLATED = f"""\
torchkiln: found a build in isolation, which cannot see the torch that is installed and would
replace it. Nothing was changed. To build for the installed torch, type
  python -m pip install 'scikit-build-core>=1.1' 'cmake>=3.28' ninja
  python -m pip install -v --no-build-isolation .
To build for another version of torch, and to install that version, name it:
  python -m pip install -C{SETTING}=2.13.0 ."""


def check_python() -> None:
    """Exits with a message if pyproject.toml requires a newer Python."""
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^requires-python = ">=([\d.]+)"', text, re.MULTILINE)
    if sys.version_info[:2] < tuple(map(int, oldest.split("."))):
        version = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(
            f"torchkiln: found Python {version} ({sys.executable}), needed {oldest} or newer"
        )


def named_torch(config_settings: dict[str, Any] | None) -> list[str]:
    """The requirement of the torch that the setting names; exits if a build needs the setting."""
    check_python()
    named = (config_settings or {}).get(SETTING)
    if named is None:
        if importlib.util.find_spec("torch") or os.environ.get("TORCHKILN_TORCHES"):
            return []
        raise SystemExit(ISOLATED)
    if not re.fullmatch(r"\d+\.\d+\.\d+", str(named)):
        raise SystemExit(f"torchkiln: found {SETTING}={named}, needed a version such as 2.13.0")
    return [f"torch=={named}"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The packages that a build in isolation installs before it builds a wheel."""
    torch = named_torch(config_settings)
    return torch + build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The packages that a build in isolation installs before it makes an editable install."""
    torch = named_torch(config_settings)
    return torch + build.get_requires_for_build_editable(config_settings)
