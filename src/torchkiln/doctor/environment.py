"""What the doctor looks at, as data, so that a test can hand it a machine with a fault."""

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


class Answer(NamedTuple):
    """What became of a command."""

    status: int | None
    """Negative after a signal, none where the command could not be started or did not end."""
    out: str
    error: str


@dataclass(frozen=True)
class Environment:
    """A Python on a machine."""

    python: str
    """Its executable."""
    site: tuple[Path, ...]
    """The folders in which its packages lie."""
    torch: Path | None
    """The folder of the torch that it would import."""
    package: Path | None
    """The folder in which the build of this package is recorded."""
    variables: Mapping[str, str]
    home: Path
    root: Path = Path("/")
    """Of the file system: where the folders of the system are looked for."""
    load_library: Callable[[str], Any] = ctypes.CDLL

    @classmethod
    def here(cls) -> Environment:
        """This Python, on this machine."""
        spec = find_spec("torch")
        return cls(
            python=sys.executable,
            site=tuple(folder for folder in map(Path, sys.path) if folder.is_dir()),
            torch=Path(spec.origin).parent if spec and spec.origin else None,
            package=_package(),
            variables=os.environ,
            home=Path.home(),
        )

    @property
    def pip(self) -> str:
        """The command that installs into it."""
        return f"{shlex.quote(self.python)} -m pip install"

    def which(self, name: str) -> Path | None:
        """A program on the PATH."""
        found = shutil.which(name, path=self.variables.get("PATH", ""))
        return Path(found) if found else None

    def run(self, *words: str | Path, timeout: float = 20) -> Answer:
        """Run a command to its end."""
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
        """A folder or file of the system, from its absolute path."""
        return self.root / path.removeprefix("/")

    def read(self, path: str) -> str:
        """The text of a file of the system; empty where it cannot be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def in_site(self, pattern: str) -> list[Path]:
        """The files of packages that match a pattern."""
        found = (path for folder in self.site for path in sorted(folder.glob(pattern)))
        return list(dict.fromkeys(found))


def _package() -> Path | None:
    from torchkiln._loader import find_package  # noqa: PLC0415

    try:
        return find_package(sys.modules["torchkiln"].__path__)
    except ImportError:
        return None
