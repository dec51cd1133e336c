"""Writes the tables of docs/choosing.md: which kernel takes which rows on which GPU.

The choices are host functions, in the choose.h of a family. tests/kernels has a program that calls
these functions without CUDA. This script compiles the program with the C++ compiler and searches
for the row lengths where another kernel takes over. --check changes nothing, and fails if the page
differs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import torchkiln

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "choosing.md"
BLOCK = re.compile(r"(?<=<!-- plans -->\n).*?(?=<!-- /plans -->)", re.DOTALL)
ROWS = (16384, 64)
"""The tables are for so many rows: many, and fewer than a GPU has SMs."""
LONGEST = 2**23
"""Elements of the longest row of a table."""
SIZES = {"bfloat16": 2, "float32": 4, "float64": 8}


class Launch(NamedTuple):
    """A line of the program."""

    gpu: str
    op: str
    operands: str
    dtype: str
    alignment: str
    rows: int
    columns: int
    kernel: str
    why: str
    blocks_x: int
    blocks_y: int
    threads: int
    most_threads: int
    """Maximum number of threads per block, in the launch bounds of the kernel."""
    blocks_per_multiprocessor: int
    """Minimum number of blocks per SM, in the same launch bounds."""
    cluster: int
    shared_bytes: int
    is_cooperative: int
    multiprocessors: int
    """SMs of the GPU. All fields below describe the GPU, too."""
    runs_90_code: int
    most_shared_bytes: int
    shared_of_multiprocessor: int
    threads_of_multiprocessor: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * SIZES[self.dtype]


class Line(NamedTuple):
    """A line of a table, and a column."""

    op: str
    operands: str
    dtype: str
    alignment: str
    gpu: str


def compiled(folder: Path) -> Path:
    """The program that prints plans, compiled without CUDA."""
    program = folder / "plans"
    sources = sorted((ROOT / "tests" / "kernels").glob("*.cpp"))
    installed = Path(torchkiln.cmake_prefix_path).parents[1] / "include"  # has version.h
    includes = [f"-I{folder}" for folder in (ROOT / "cuda" / "include", ROOT / "cuda", installed)]
    built = "-DTORCHKILN_WITH_SM90=1"  # as a wheel, which has the kernels of every architecture
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", built, *includes]
    command = [os.environ.get("CXX", "c++"), *options, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the choices do not compile without CUDA:\n{done.stderr}")
    return program


def plans(program: Path, shapes: Iterable[tuple[int, int]], op: str = "") -> Iterator[Launch]:
    """The plans of an op, or of all, for rows of these shapes, on every GPU."""
    given = "".join(f"{rows} {columns} {op}\n" for rows, columns in shapes)
    done = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        yield Launch._make(int(f) if f.isdigit() else f for f in line.split("\t"))


def windows(program: Path, rows: int, op: str) -> dict[Line, list[Launch]]:
    """For each line, the plans at both ends of the row lengths that take the same kernel."""
    found: dict[Line, dict[int, Launch]] = {}
    lengths = {step << power for power in range(22) for step in (2, 3)} | {1}
    lengths = {length for length in lengths if length <= LONGEST}
    while lengths:
        for plan in plans(program, ((rows, length) for length in sorted(lengths)), op):
            if plan.dtype == "float64":
                continue
            line = Line(plan.op, plan.operands, plan.dtype, plan.alignment, plan.gpu)
            found.setdefault(line, {})[plan.columns] = plan
        lengths = {
            (shorter + longer) // 2
            for of_line in found.values()
            for shorter, longer in pairwise(sorted(of_line))
            if of_line[shorter].kernel != of_line[longer].kernel and longer - shorter > SPACING
        }
    return {line: [of_line[c] for c in sorted(of_line)] for line, of_line in found.items()}


SPACING = 9
"""Aligned lengths of bfloat16 are 8 elements apart."""


def size(count: int) -> str:
    """Bytes of a row, to within a vector: ``3 KiB`` for 3070."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        nearest = round(count / factor)
        if nearest and abs(count - nearest * factor) <= SPACING * 8:
            return f"{nearest} {unit}"
    return f"{count / 2**10:.1f} KiB" if count >= 2**10 else f"{count} B"


def cell(line: Sequence[Launch]) -> str:
    """The kernels of a line, each with the longest row that it takes."""
    groups = [(kernel, list(group)) for kernel, group in groupby(line, lambda plan: plan.kernel)]
    words = [f"{kernel} to {size(group[-1].row_bytes)}" for kernel, group in groups[:-1]]
    return ", ".join([*words, groups[-1][0]])


def operands_of(names: Iterable[str]) -> str:
    """Operands, the names of functions as code."""
    return ", ".join(f"`{name}`" if name.isidentifier() else name for name in names)


def table(cells: dict[tuple[int, Line], str]) -> Iterator[str]:
    """A table of an op. Lines and GPUs with the same cells share a line and a column.

    The cells that most lines have are those of the last line, which is for all other rows.
    """
    gpus = dict.fromkeys(line.gpu for _, line in cells)
    rows = list(dict.fromkeys((count, line._replace(gpu="")) for count, line in cells))
    columns: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        column = tuple(cells[count, line._replace(gpu=gpu)] for count, line in rows)
        columns.setdefault(column, []).append(gpu)
    alike: dict[tuple[str, ...], dict[tuple[str, str], dict[str, list[str]]]] = {}
    for index, (count, line) in enumerate(rows):
        kinds = alike.setdefault(tuple(column[index] for column in columns), {})
        found = kinds.setdefault((line.dtype, line.alignment), {})
        found.setdefault(line.operands, []).append(f"{count:,}")
    usual = max(reversed(alike), key=lambda texts: sum(map(len, alike[texts].values())))
    yield "| rows | of | dtype, alignment | " + " | ".join(map(", ".join, columns.values())) + " |"
    yield "|---:|---|---|" + "---|" * len(columns)
    for texts, kinds in alike.items():
        lines: dict[tuple[str, str], list[str]] = {}
        for kind, counted in kinds.items():
            names: dict[str, list[str]] = {}
            for operands, counts in counted.items():
                names.setdefault("" if len(counts) == len(ROWS) else counts[0], []).append(operands)
            for number, own in names.items():
                lines.setdefault((number, operands_of(own)), []).append(", ".join(kind))
        for first, others in lines.items() if texts != usual else ():
            yield " | ".join([f"| {first[0]}", first[1], "; ".join(others), *texts]) + " |"
    all_operands = operands_of(dict.fromkeys(line.operands for _, line in rows))
    rest = ("the others", "") if len(alike) > 1 else (all_operands, "all")
    yield " | ".join(["| ", *rest, *usual]) + " |"


def tables(program: Path) -> str:
    """The tables of all families."""
    text: list[str] = []
    for op in dict.fromkeys(plan.op for plan in plans(program, [(1, 1)])):
        found = {
            (count, line): ends
            for count in ROWS
            for line, ends in windows(program, count, op).items()
        }
        kernels = {plan.kernel: plan.why for ends in found.values() for plan in ends}
        text += [f"## {op}", "", "| kernel | why |", "|---|---|"]
        text += [f"| {kernel} | {why} |" for kernel, why in kernels.items()]
        text += ["", *table({row: cell(ends) for row, ends in found.items()}), ""]
    return "\n".join(text) + "\n"


def written(page: str, program: Path) -> str:
    """The page with new tables."""
    return BLOCK.sub(lambda _: tables(program), page)


def main(given: Sequence[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it differs")
    options = parser.parse_args(given)
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        expected = written(page, compiled(Path(folder)))
    if expected == page:
        return 0
    if options.check:
        print(f"{PAGE.name} differs from the choices: type nox -s figures", file=sys.stderr)
        return 1
    PAGE.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
