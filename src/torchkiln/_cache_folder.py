"""The folder of compiled kernels. The doctor uses it, too, so it does not import torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TORCHKILN_CACHE"


def home_folder() -> Path | None:
    """The user's home folder; None for a user without one, as in many containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_folder(variables: Mapping[str, str], home: Path | None) -> Path:
    """The folder below TORCHKILN_CACHE, else below the user's cache folder.

    Raises an OSError if there is neither: the error of a folder that cannot be written.
    """
    if given := variables.get(VARIABLE):
        return Path(given) / "jit"
    if given := variables.get("XDG_CACHE_HOME"):
        return Path(given) / "torchkiln" / "jit"
    if home is None:
        raise FileNotFoundError(errno.ENOENT, "the user has no home folder")
    return home / ".cache" / "torchkiln" / "jit"


def danger(facts: os.stat_result) -> str:
    """The way in which other users could change a file or a folder; empty if they cannot."""
    if facts.st_uid != os.geteuid():
        return f"it belongs to user {facts.st_uid}"
    return "other users can write to it" if facts.st_mode & 0o022 else ""
