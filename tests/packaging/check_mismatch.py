"""Usage: check_mismatch.py BUILT FOUND

Imports torchkiln where another torch than its own comes first: the ImportError has to name both
and tell what to type.
"""

from __future__ import annotations

import sys


def main() -> None:
    built, found = sys.argv[1:]
    try:
        import torchkiln  # noqa: F401, PLC0415
    except ImportError as error:
        print(error)
        message = str(error)
    else:
        raise SystemExit(f"imported beside torch {found}, expected an ImportError")
    if "torch" in sys.modules:
        raise SystemExit("torch was imported before the versions were compared")
    for part in (f"built for torch {built}", f"found torch {found}", "pip install 'torch=="):
        if part not in message:
            raise SystemExit(f"the message does not say {part!r}")


if __name__ == "__main__":
    main()
