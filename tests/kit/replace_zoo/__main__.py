"""``python -m replace_zoo NAME``: one case in a process of its own."""

from __future__ import annotations

import sys

from replace_zoo.cases import CASES

if __name__ == "__main__":
    found = CASES[sys.argv[1]].problems()
    sys.exit("\n".join(found[:5]) if found else 0)
