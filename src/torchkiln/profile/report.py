"""Figures of each kernel, read from the output of ``ncu --csv --page raw``."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass

from torchkiln.bench.report import duration, size
from torchkiln.trace.kernel_names import pretty

UNITS = {
    "": 1.0,
    "%": 0.01,
    "inst": 1.0,
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "s": 1.0,
    "second": 1.0,
    "byte": 1.0,
    "kbyte": 1e3,
    "mbyte": 1e6,
    "gbyte": 1e9,
}
"""Units of old and new versions of ncu, in lower case."""

DURATION = "gpu__time_duration.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
ACTIVE = "sm__warps_active.avg.pct_of_peak_sustained_active"
POSSIBLE = "sm__maximum_warps_per_active_cycle_pct"
REGISTERS = "launch__registers_per_thread"
LOCAL = tuple(f"l1tex__t_bytes_pipe_lsu_mem_local_op_{op}.sum" for op in ("ld", "st"))
LIMITS = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_barriers": "barriers",
}
METRICS = (
    *(DURATION, READ, WRITTEN, DRAM, L2, SM, ACTIVE, POSSIBLE, REGISTERS),
    *LOCAL,
    *list(LIMITS)[:4],
)
"""Metrics requested by name; ncu's sections contain the other metrics."""

STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
STALLS = {
    "long_scoreboard": "waiting for data from memory",
    "short_scoreboard": "waiting for shared memory or a special function",
    "barrier": "waiting for other warps at a barrier",
    "membar": "waiting for a memory fence",
    "lg_throttle": "too many memory instructions queued",
    "mio_throttle": "too many shared memory instructions queued",
    "math_pipe_throttle": "the arithmetic units are busy",
    "wait": "fixed latency of instructions",
    "not_selected": "another warp was issued",
    "no_instruction": "waiting for instructions",
    "drain": "waiting for stores at the end",
    "selected": "issuing",
}


@dataclass(frozen=True)
class Figures:
    """Counters of one kernel: times in seconds, shares of the peak; None without a figure."""

    kernel: str
    seconds: float | None
    read: float | None
    """Bytes read from DRAM."""
    written: float | None
    dram: float | None
    l2: float | None
    compute: float | None
    occupancy: float | None
    possible_occupancy: float | None
    limiter: str | None
    """The resource that limits the blocks per multiprocessor."""
    registers: int | None
    """Registers per thread."""
    local: float | None
    """Bytes to and from local memory: spilled registers."""
    stall: str | None
    """The most frequent reason for which warps wait."""

    def lines(self) -> list[str]:
        """The figures as text, one line each."""
        name, variant = pretty(self.kernel)
        words = [f"{name}{variant}"]
        if self.seconds is not None:
            words.append(f"  {duration(self.seconds)} by ncu")
        if self.read is not None and self.written is not None:
            words.append(
                f"  DRAM: {size(round(self.read))} read, {size(round(self.written))} written"
                + ("" if self.dram is None else f", {self.dram:.1%} of its peak")
            )
        if self.l2 is not None:
            words.append(f"  L2: {self.l2:.1%} of its peak")
        if self.compute is not None:
            words.append(f"  multiprocessors: {self.compute:.1%} of their peak")
        if self.occupancy is not None:
            most = self.possible_occupancy
            words.append(
                f"  occupancy: {self.occupancy:.1%}"
                + ("" if most is None else f" of {most:.0%} possible")
                + (f", limited by {self.limiter}" if self.limiter and most and most < 1 else "")
            )
        if self.registers is not None:
            spills = "no spills" if not self.local else f"{size(round(self.local))} of spills"
            words.append(f"  {self.registers} registers per thread, {spills}")
        if self.stall is not None:
            words.append(f"  warps mostly stall: {self.stall}")
        return words


def read(text: str) -> list[Figures]:
    """The kernels in the output of ncu; its messages before and after are skipped."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return []
    table = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    headings, units = table[0], table[1] if len(table) > 1 else []
    found = []
    for cells in table[2:]:
        if len(cells) != len(headings):  # messages can follow the table
            continue
        values = {
            heading: number(cell, unit)
            for heading, cell, unit in zip(headings, cells, units, strict=True)
        }
        found.append(_figures(cells[headings.index("Kernel Name")], values))
    return found


def number(cell: str, unit: str) -> float | None:
    """A figure in seconds, bytes or shares; None for words, such as "no data"."""
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value * UNITS.get(unit.lower(), 1.0)


def _figures(kernel: str, values: dict[str, float | None]) -> Figures:
    limits = {
        words: value
        for name, words in LIMITS.items()
        if (value := values.get(name)) is not None and value > 0
    }
    stalls = {
        match[1]: value
        for name, value in values.items()
        if (match := STALL.fullmatch(name)) and value is not None and match[1] != "selected"
    }
    local = [value for name in LOCAL if (value := values.get(name)) is not None]
    registers = values.get(REGISTERS)
    stall = max(stalls, key=stalls.__getitem__) if stalls else None
    return Figures(
        kernel=kernel,
        seconds=values.get(DURATION),
        read=values.get(READ),
        written=values.get(WRITTEN),
        dram=values.get(DRAM),
        l2=values.get(L2),
        compute=values.get(SM),
        occupancy=values.get(ACTIVE),
        possible_occupancy=values.get(POSSIBLE),
        limiter=min(limits, key=limits.__getitem__) if limits else None,
        registers=None if registers is None else round(registers),
        local=sum(local) if local else None,
        stall=None if stall is None else STALLS.get(stall, stall.replace("_", " ")),
    )
