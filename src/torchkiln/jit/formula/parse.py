"""Parses Python in one thread at a time."""

from __future__ import annotations

import ast
import threading
from typing import Any

LOCK = threading.Lock()
"""CPython 3.11 counts the recursion of all threads together, which can raise SystemError."""


def parsed(text: str, mode: str = "exec") -> Any:
    """The syntax tree of a text."""
    with LOCK:
        return ast.parse(text, mode=mode)
