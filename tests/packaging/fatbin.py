"""The GPU code in a library, read from the section that nvcc writes.

The section is a sequence of containers, one per source file. Each contains machine code and PTX
with a header that states the architecture. The layout is not documented, but has not changed since
CUDA 5. Other layouts raise an error here.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
# Flag of an entry whose code runs only on this architecture, such as 90a.
SPECIFIC = 1 << 20


@dataclass
class GpuCode:
    """Stored bytes by architecture, such as 80 or 90a."""

    machine_code: Counter[str] = field(default_factory=Counter)
    ptx: Counter[str] = field(default_factory=Counter)


def read(library: Path) -> GpuCode:
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".nv_fatbin")
        data = section.data() if section else b""
    found = GpuCode()
    at = 0
    while at < len(data):
        if data[at : at + 8].count(0) == len(data[at : at + 8]):  # padding
            at += 8
            continue
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            raise ValueError(f"{library}: no container of GPU code at {at} of .nv_fatbin")
        at += header
        end = at + size
        while at < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            (architecture,) = struct.unpack_from("<I", data, at + 28)
            (flags,) = struct.unpack_from("<Q", data, at + 40)
            if kind not in {PTX, MACHINE_CODE}:
                raise ValueError(f"{library}: GPU code of unknown kind {kind}")
            counts = found.ptx if kind == PTX else found.machine_code
            counts[f"{architecture}{'a' if flags & SPECIFIC else ''}"] += header + payload
            at += header + payload
        at = end
    return found
