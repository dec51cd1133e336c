"""What the demo prints."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import torchkiln
from torchkiln.bench import Row, default_device, processor, tables
from torchkiln.bench.terminal import show
from torchkiln.demo.train import TOLERANCE, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torchkiln.demo.accuracy import Errors

console = Console(width=None if Console().is_terminal else 110)


def name(dtype: torch.dtype) -> str:
    """A dtype without its prefix."""
    return str(dtype).removeprefix("torch.")


def environment() -> torch.device:
    """Print where this runs; return the device that is used."""
    info = torchkiln.build_info()
    kernels = info["cuda"]
    device = default_device()
    table = Table(title="Environment", show_header=False, title_justify="left")
    table.add_row("torchkiln", torchkiln.__version__)
    table.add_row("built with", f"torch {info['torch']}, {info['compiler']}")
    architectures = ", ".join(info["cuda_architectures"])
    table.add_row("CUDA kernels", f"CUDA {kernels} for {architectures}" if kernels else "none")
    table.add_row("torch", f"{torch.__version__}, Python {platform.python_version()}")
    table.add_row("processor", f"{processor()}, {torch.get_num_threads()} threads")
    if device.type == "cuda":
        table.add_row("GPU", torch.cuda.get_device_name(device))
    table.add_row("device of this run", str(device))
    console.print(table)
    return device


def errors(rows: list[Errors]) -> None:
    """Errors, ours and torch's."""
    table = Table(
        title="Largest error against float64, in rounding steps of the dtype", title_justify="left"
    )
    for heading in ("op", "dtype", "direction", "samples", "torchkiln", "eager torch", "verdict"):
        number = heading in {"samples", "torchkiln", "eager torch"}
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        verdict = "[red]wrong" if row.complaint else "[green]ok"
        figures = (str(row.samples), f"{row.ours:.2f}", f"{row.torch:.2f}")
        table.add_row(row.op, name(row.dtype), row.what, *figures, verdict)
    console.print(table)


def timings(rows: list[Row]) -> None:
    """Times, ours and torch's."""
    show(tables(rows))


def explanation(device: torch.device) -> None:
    """What one call does, forward and backward: no copy, though its rows lie apart."""
    x = torch.randn(4096, 2048, device=device)[:, :1024].requires_grad_()
    weight = torch.ones(1024, device=device, requires_grad=True)
    console.print(torchkiln.explain(torchkiln.rms_norm, x, 1024, weight))


def bar(*columns: TextColumn) -> Progress:
    """A progress bar that leaves nothing behind."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *columns,
        console=console,
        transient=True,
    )


def with_progress(title: str, rows: Iterable[Row]) -> list[Row]:
    """Gather ``rows`` and name the one at hand."""
    found = []
    with bar() as progress:
        task = progress.add_task(title, total=None)
        for row in rows:
            found.append(row)
            words = f"{title} {row.op} {row.dtype} {row.direction}"
            progress.update(task, advance=1, description=words)
    return found


def training(steps: Iterator[Outcome]) -> Outcome:
    """Follow the training; return how it ended."""
    losses = TextColumn("loss {task.fields[ours]:.4f} and {task.fields[torch]:.4f}")
    with bar(losses) as progress:
        task = progress.add_task("training both", total=None, ours=0.0, torch=0.0)
        for outcome in steps:
            ours, plain = (run.losses[-1] for run in outcome.runs)
            progress.update(task, total=outcome.total, advance=1, ours=ours, torch=plain)
    table = Table(title=f"Training, {outcome.total} steps side by side", title_justify="left")
    for heading in ("model", "first loss", "last loss", "accuracy", "time"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for run in outcome.runs:
        ends = (f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}")
        table.add_row(run.name, *ends, f"{outcome.accuracy(run):.1%}", f"{run.seconds:.2f} s")
    console.print(table)
    console.print(
        f"largest difference of the two loss curves {outcome.difference:.2g}, "
        f"allowed {TOLERANCE}, at first loss {outcome.runs[0].losses[0]:.2g}"
    )
    return outcome


def verdict(path: Path, rows: list[Errors], outcome: Outcome) -> int:
    """Say what is wrong, if anything; the exit status."""
    console.print(f"picture: {path.resolve()}", soft_wrap=True)
    wrong = [row.complaint for row in rows if row.complaint]
    for words in wrong:
        console.print(f"[red]wrong:[/] {words}", soft_wrap=True)
    if not outcome.agree:
        console.print("[red]wrong:[/] the two trainings disagree, or did not learn")
    if wrong or not outcome.agree:
        return 1
    console.print("[green]every result agrees")
    return 0
