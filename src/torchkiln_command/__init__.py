"""Where the command ``torchkiln`` begins: outside of the package, whose import may fail.

That import loads torch and the compiled module, and refuses where they do not belong together. The
doctor is for those who were refused, so it alone is started without it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec


def main() -> int:
    """Run the command line; the exit status."""
    if sys.argv[1:2] == ["doctor"]:
        if "torchkiln" not in sys.modules:
            _lay_out_package()
        from torchkiln.doctor.__main__ import main as doctor  # noqa: PLC0415

        return doctor(sys.argv[2:])
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
