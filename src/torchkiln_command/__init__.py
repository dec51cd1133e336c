"""Start of the command ``torchkiln``, outside of the package, whose import may fail.

Importing torchkiln imports torch and the compiled module, and raises if they do not match. The
doctor has to work then, and ``--help`` should not wait for torch. So the package is only created
here; :func:`torchkiln.cli.load_package` executes it for the commands that need it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

CANNOT_RUN = 3
"""As in torchkiln.cli.status, which cannot be imported without the package."""


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if "torchkiln" not in sys.modules and not _create_package():
            return CANNOT_RUN
        from torchkiln.cli import main as command  # noqa: PLC0415
    except KeyboardInterrupt:
        return 130
    return command()


def _create_package() -> bool:
    """Make modules importable without executing torchkiln/__init__.py; False if there are none."""
    spec = find_spec("torchkiln")
    if spec is None or spec.origin is None:
        print(
            f"torchkiln: not found in {sys.executable}. In the folder with its sources, type\n"
            f"  {sys.executable} -m pip install --no-build-isolation .",
            file=sys.stderr,
        )
        return False
    sys.modules["torchkiln"] = module_from_spec(spec)
    return True
