"""Everything that the doctor reads from the machine, so that a test can replace it."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torchkiln._cache_folder import home_folder
from torchkiln._loader import find_package


class Answer(NamedTuple):
    """The result of a command."""

    status: int | None
    """Negative after a signal; None if the command did not start or did not end in time."""
    out: str
    error: str


@dataclass(frozen=True)
class Environment:
    """A Python interpreter and the machine that it runs on."""

    python: str
    """Path of the interpreter."""
    site: tuple[Path, ...]
    """Folders with installed packages."""
    torch: Path | None
    """Folder of the torch that ``import torch`` would find."""
    package: Path | None
    """Folder with the build record of torchkiln."""
    variables: Mapping[str, str]
    home: Path
    root: Path = Path("/")
    """Root of the file system, below which system files are read."""
    load_library: Callable[[str], Any] = ctypes.CDLL

    @classmethod
    def here(cls) -> Environment:
        """Describe the running interpreter on this machine."""
        spec = find_spec("torch")
        try:
            package = find_package(sys.modules["torchkiln"].__path__)
        except ImportError:
            package = None
        return cls(
            python=sys.executable,
            site=tuple(folder for folder in map(Path, sys.path) if folder.is_dir()),
            torch=Path(spec.origin).parent if spec and spec.origin else None,
            package=package,
            variables=os.environ,
            home=home_folder() or Path("/"),
        )

    @property
    def pip(self) -> str:
        """Command that installs a package for this interpreter."""
        return f"{shlex.quote(self.python)} -m pip install"

    def which(self, name: str) -> Path | None:
        """Find a program on PATH."""
        found = shutil.which(name, path=self.variables.get("PATH", ""))
        return Path(found) if found else None

    def run(self, *words: str | Path, timeout: float = 20) -> Answer:
        """Run a command for at most ``timeout`` seconds."""
        try:
            done = subprocess.run(
                [str(word) for word in words],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env=dict(self.variables),
                stdin=subprocess.DEVNULL,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, "", f"not done after {timeout:.0f} s")
        except OSError as error:
            return Answer(None, "", str(error))
        return Answer(done.returncode, done.stdout, done.stderr)

    def at(self, path: str) -> Path:
        """Place an absolute path below ``root``."""
        return self.root / path.removeprefix("/")

    def read(self, path: str) -> str:
        """Read a system file; empty if that fails."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def in_site(self, pattern: str) -> list[Path]:
        """Find files of installed packages by a glob pattern."""
        found = (path for folder in self.site for path in sorted(folder.glob(pattern)))
        return list(dict.fromkeys(found))
