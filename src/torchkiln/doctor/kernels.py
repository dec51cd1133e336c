"""Which of the kernels in a build a GPU runs."""

from __future__ import annotations

import re
from typing import Any

OLDEST_GPU = (7, 5)


def kernel_of(record: dict[str, Any], capability: tuple[int, int]) -> str | None:
    """The machine code, else the PTX that the driver compiles; none where neither runs."""
    names = [(*_parse(name), name) for name in record["cuda_architectures"]]
    # Machine code runs on later GPUs of its major version; with an a behind it, on its own alone.
    fitting = [
        (number, name)
        for number, suffix, name in names
        if number == capability or (suffix != "a" and number[0] == capability[0])
        if number <= capability
    ]
    if fitting:
        return f"sm_{max(fitting)[1]} kernel"
    portable = [(*_parse(name), name) for name in record.get("cuda_ptx", [])]
    older = [(number, name) for number, suffix, name in portable if not suffix]
    older = [found for found in older if found[0] <= capability]
    return f"PTX of sm_{max(older)[1]}, which the driver compiles" if older else None


def _parse(name: str) -> tuple[tuple[int, int], str]:
    """The compute capability and the letter: 9.0 and a of 90a."""
    match = re.fullmatch(r"(\d+)(\d)([af]?)", name)
    if match is None:
        return (0, 0), ""
    return (int(match[1]), int(match[2])), match[3]
