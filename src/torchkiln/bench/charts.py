"""Pictures of a run: bars, roofline and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torchkiln.bench.bars import (
    DPI,
    GREY,
    by_dtype,
    draw_host,
    draw_share,
    draw_speedups,
    finish,
    new_figure,
)
from torchkiln.bench.case import FORWARD
from torchkiln.bench.result import CALLS, HOST, ROWS, SMALL, SWEEP, Measurement
from torchkiln.bench.roofline import PRODUCT
from torchkiln.bench.sweeps import draw_rows, draw_sweep

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from torchkiln.bench.result import Record


def charts(record: Record) -> Iterator[tuple[str, Figure]]:
    """The name and the picture of each chart, for the kinds of rows in the record."""
    of_kind = {
        kind: [r for r in record.rows if r.kind == kind]
        for kind in (CALLS, SWEEP, ROWS, SMALL, HOST)
    }
    computed = [row for row in of_kind[CALLS] if PRODUCT in row.references]
    found: dict[str, tuple[Callable[[Sequence[Measurement], str], Figure], list[Measurement]]] = {
        "share": (draw_share, [row for row in of_kind[CALLS] if row.share]),
        "speedups": (draw_speedups, [row for row in of_kind[CALLS] if row.best_peer]),
        # Only for matrix products. Memory limits all other ops, which `share` shows.
        "roofline": (draw_roofline, of_kind[CALLS] if computed else []),
        "sweep": (draw_sweep, [row for row in of_kind[SWEEP] if row.share]),
        "rows": (draw_rows, [row for row in of_kind[ROWS] if row.share]),
        "small": (draw_speedups, [row for row in of_kind[SMALL] if row.best_peer]),
        "host": (draw_host, of_kind[HOST]),
    }
    for name, (draw, rows) in found.items():
        if rows:
            yield name, draw(rows, str(record.environment))


def write(path: Path, record: Record) -> list[Path]:
    """Draw all charts: one into ``path``, several into files with the chart's name appended."""
    found = list(charts(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [
        path if len(found) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        for name, _ in found
    ]
    for to, (_, figure) in zip(paths, found, strict=True):
        figure.savefig(to, dpi=DPI)
    return paths


def draw_roofline(rows: Sequence[Measurement], where: str) -> Figure:
    """Operations per second over operations per byte, below the limits of the device."""
    groups = by_dtype([row for row in rows if row.operations and row.ceiling])
    figure = new_figure(4.2)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    named = list(dict.fromkeys(r.op for r in rows if r.operations > r.bytes))
    colours = {op: f"C{i}" for i, op in enumerate(named)}
    for axes, (dtype, group) in zip(panels, groups.items(), strict=True):
        bandwidth = max(row.bytes / memory_seconds(row) for row in group)
        products = [r for r in group if PRODUCT in r.references]
        peak = max((r.operations / r.references[PRODUCT].seconds for r in products), default=None)
        for row in group:
            found = colours.get(row.op, GREY)
            axes.plot(
                row.operations / row.bytes,
                row.operations / row.ours.seconds,
                "o",
                color=found,
                markerfacecolor="none" if row.direction != FORWARD else found,
                markersize=6 if row.op in colours else 4,
            )
        low, *_, high = sorted(row.operations / row.bytes for row in group)
        low, high = low / 2, max(high, (peak or 0.0) / bandwidth) * 4
        xs = [low * (high / low) ** (k / 200) for k in range(201)]
        axes.plot(xs, [min(x * bandwidth, peak or x * bandwidth) for x in xs], GREY, zorder=0)
        limits = f"a copy moves {bandwidth / 1e9:.4g} GB/s"
        if peak:
            limits += f",\na product computes {peak / 1e12:.3g} T/s"
        axes.set_title(f"{dtype}: {limits}", fontsize=9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_xlabel("operations per byte", fontsize=8)
        axes.tick_params(labelsize=7.5)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("operations per second", fontsize=8)
    for op, found in colours.items():
        panels[0].plot([], [], "o", color=found, label=op)
    others = len({row.op for row in rows} - colours.keys())
    panels[0].plot([], [], "o", color=GREY, markersize=4, label=f"{others} memory-bound ops")
    panels[0].plot([], [], "o", color="black", label="forward")
    panels[0].plot([], [], "o", color="black", markerfacecolor="none", label="backward")
    title = "Roofline: dots on the line run at the speed of torch's copy or product"
    finish(figure, panels[0], (title, where), columns=4)
    return figure


def memory_seconds(row: Measurement) -> float:
    """Seconds of the copy, or of the read, of the call's bytes."""
    return min(t.seconds for name, t in row.references.items() if name != PRODUCT)
