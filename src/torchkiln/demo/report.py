"""Output of the demo: stages with their times, and tables."""

from __future__ import annotations

import platform
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import torch

import torchkiln
from torchkiln.bench import Measurement
from torchkiln.bench.case import BACKWARD, FORWARD
from torchkiln.bench.plan import default_device
from torchkiln.bench.report import Table, show, tables
from torchkiln.demo.speed import by_family, mean_speedup
from torchkiln.demo.train import TOLERANCE, Outcome
from torchkiln.ops._traced import name_of
from torchkiln.testing.environment import processor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torchkiln.demo.accuracy import Errors

T = TypeVar("T")

NEXT = (
    ("torchkiln doctor", "checks this installation and says which ops run here"),
    ("torchkiln explain rms_norm", "shows the kernels, bytes and memory of one call"),
    ("torchkiln bench rms_norm", "times one op beside its peers and its ceiling"),
    ("torchkiln new my_op", "writes a package with an op of your own"),
    ("torchkiln demo --full", "prints every row of these tables, for larger tensors"),
)


def environment() -> torch.device:
    """Print versions and hardware; return the device of the demo."""
    info = torchkiln.build_info()
    device = default_device()
    kernels = f"for {', '.join(info['cuda_architectures'])}" if info["cuda"] else "not built"
    print(f"torchkiln {torchkiln.__version__}, built with torch {info['torch']}, CUDA {kernels}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    threads = torch.get_num_threads()
    print(f"CPU: {processor()}, {threads} {'thread' if threads == 1 else 'threads'}")
    if torch.cuda.is_available():
        print(f"GPU: {torch.cuda.get_device_name(0)}{gpu_remark(device)}")
    print(f"the demo runs on {device}", flush=True)
    return device


def gpu_remark(device: torch.device) -> str:
    """The reason why the GPU is not used; empty if it is used."""
    if device.type == "cuda":
        return ""
    return ", not used: this torchkiln has no CUDA kernels; type: torchkiln doctor"


def stage(title: str, entries: Iterable[T], words: Callable[[T], str]) -> list[T]:
    """Collect ``entries``; prints the title, on a terminal the current entry, and the time."""
    start = time.perf_counter()
    live = sys.stderr.isatty()
    print(f"\n{title} ...", flush=True)
    found = []
    for entry in entries:
        found.append(entry)
        if live:
            print(f"\r\x1b[K  {len(found)}: {words(entry)}", end="", file=sys.stderr, flush=True)
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(f"  done in {time.perf_counter() - start:.1f} s", flush=True)
    return found


def errors(rows: list[Errors], *, full: bool) -> None:
    """Print the largest error of each family of ops, or the errors of each op in all dtypes."""
    title = "Largest error against float64, in rounding steps of the dtype"
    counts = [row.samples for row in rows]
    if not full:
        title += ", of each family of ops"
        groups = by_family(rows).values()
        counts = [sum(row.samples for row in group) for group in groups]
        rows = list(map(worst, groups))
    lines = tuple(
        (
            row.op,
            str(count),
            name_of(row.dtype),
            row.direction,
            f"{row.ours:.2f}",
            f"{row.torch:.2f}",
            "WRONG" if row.complaint else "ok",
        )
        for row, count in zip(rows, counts, strict=True)
    )
    headings = ("op", "calls", "dtype", "direction", "torchkiln", "eager torch", "verdict")
    show([Table(title, headings, (False, True, False, False, True, True, False), lines)])


def worst(rows: list[Errors]) -> Errors:
    """The row with a wrong result, if there is one, else the row with the largest error.

    Float64 rows count only if they are wrong, because the reference is rounded to float64, too.
    """
    return max(rows, key=lambda row: (bool(row.complaint), row.dtype != torch.float64, row.ours))


def timings(rows: list[Measurement], *, full: bool) -> None:
    """Print the speed-ups of each family, or all times."""
    if full:
        show(tables(rows))
        return
    dtypes = dict.fromkeys(row.dtype for row in rows)
    columns = [(dtype, direction) for dtype in dtypes for direction in (FORWARD, BACKWARD)]

    def line(name: str, group: list[Measurement]) -> tuple[str, ...]:
        means = [mean_speedup([r for r in group if (r.dtype, r.direction) == c]) for c in columns]
        cells = ["" if mean is None else f"{mean:.2f} x" for mean in means]
        return (name, str(len({row.op for row in group})), *cells)

    lines = [line(name, group) for name, group in by_family(rows).items()]
    slowest = min(rows, key=lambda row: row.speedup or 0.0)
    call = f"{slowest.op} {slowest.dtype} {slowest.direction}"
    notes = [f"slowest beside eager torch: {call}, {slowest.speedup:.2f} x"]
    noisy = sum(row.is_noisy for row in rows)
    if noisy:
        notes.append(f"busy machine: the times of {noisy} of {len(rows)} calls spread widely")
    shape = f"{rows[0].shape[0]} x {rows[0].shape[1]}"
    title = f"Times as fast as eager torch at {shape}, geometric mean of each family of ops"
    headings = ("family", "ops", *(" ".join(column) for column in columns))
    numeric = (False, *(True for _ in headings[1:]))
    table = Table(title, headings, numeric, (*lines, line("all", rows)), tuple(notes))
    show([table])


def explanation(device: torch.device) -> None:
    """Print kernels and memory of a call on rows with a stride, forward and backward."""
    x = torch.randn(4096, 2048, device=device)[:, :1024].requires_grad_()
    weight = torch.ones(1024, device=device, requires_grad=True)
    print(f"\n{torchkiln.explain(torchkiln.rms_norm, x, 1024, weight)}", flush=True)


def training(outcome: Outcome) -> None:
    """Print both losses at a few steps, and the results of the training."""
    ours, plain = (run.losses for run in outcome.runs)
    shown = [0, *(round(outcome.total * k / 4) - 1 for k in range(1, 5))]
    lines = tuple((str(i + 1), f"{ours[i]:.4f}", f"{plain[i]:.4f}") for i in shown)
    notes = [
        f"{run.name}: {outcome.accuracy(run):.1%} of the points are right, {run.seconds:.2f} s"
        for run in outcome.runs
    ]
    notes.append(
        f"largest difference of the two losses in a step: {outcome.difference:.2g}, "
        f"allowed: {TOLERANCE}"
    )
    headings = ("step", *(run.name for run in outcome.runs))
    title = "Training loss of a classifier of spirals"
    show([Table(title, headings, (True, True, True), lines, tuple(notes))])


def verdict(wrong: list[str], picture: Path | None, seconds: float) -> None:
    """Name wrong results, the picture and further commands."""
    if picture is not None:
        print(f"\npicture: {picture.resolve()}")
    for words in wrong:
        print(f"wrong: {words}")
    if not wrong:
        print(f"every result agrees, {seconds:.0f} s in all")
    print("\nnext:")
    width = max(len(command) for command, _ in NEXT)
    for command, words in NEXT:
        print(f"  {command.ljust(width)}  {words}")
