"""Where the command ``torchkiln`` begins: outside of the package, whose import may fail.

That import loads torch and the compiled module, and refuses where they do not belong together. The
doctor is for those who were refused, so it is started without it; so is ``new``, which writes files
and would wait for nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec

WITHOUT_TORCH = ("doctor", "new")


def main() -> int:
    """Run the command line; the exit status."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in WITHOUT_TORCH:
        if "torchkiln" not in sys.modules:
            _lay_out_package()
        status: int = import_module(f"torchkiln.{word}.__main__").main(sys.argv[2:])
        return status
    from torchkiln.cli import main as command  # noqa: PLC0415

    return command()


def _lay_out_package() -> None:
    """Make the package's modules importable one by one: it is there, but not executed."""
    spec = find_spec("torchkiln")
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"torchkiln: not found in {sys.executable}. Type\n"
            f"  {sys.executable} -m pip install torchkiln"
        )
    sys.modules["torchkiln"] = module_from_spec(spec)
