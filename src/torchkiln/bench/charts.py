"""Pictures of a run: bars, roofline and row lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torchkiln.bench.bars import (
    COLOURS,
    DPI,
    GREY,
    by_dtype,
    draw_host,
    draw_share,
    draw_speedups,
    finish,
    new_figure,
)
from torchkiln.bench.case import BACKWARD, FORWARD, STEP
from torchkiln.bench.result import CALLS, HOST, OURS, SMALL, SWEEP, Row
from torchkiln.bench.roofline import PRODUCT

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchkiln.bench.result import Record

HEADINGS = {
    "share": "Share of the speed of a copy",
    "speedups": "Speed-ups of large calls",
    "roofline": "Roofline",
    "sweep": "Row lengths",
    "small": "Speed-ups of small calls",
    "host": "Host time",
}
DIRECTIONS = {FORWARD: COLOURS[OURS], BACKWARD: "#4a2c40", STEP: "#4a2c40"}


def charts(record: Record) -> Iterator[tuple[str, Figure]]:
    """The name and the picture of each chart, for the kinds of rows in the record."""
    of_kind = {
        kind: [r for r in record.rows if r.kind == kind] for kind in (CALLS, SWEEP, SMALL, HOST)
    }
    computed = [row for row in of_kind[CALLS] if PRODUCT in row.references]
    found: dict[str, tuple[Callable[[Sequence[Row], str], Figure], list[Row]]] = {
        "share": (draw_share, [row for row in of_kind[CALLS] if row.share]),
        "speedups": (draw_speedups, [row for row in of_kind[CALLS] if row.best_peer]),
        # Only with a matrix product: all other ops lie on the slope, which `share` shows, too.
        "roofline": (draw_roofline, of_kind[CALLS] if computed else []),
        "sweep": (draw_sweep, [row for row in of_kind[SWEEP] if row.share]),
        "small": (draw_speedups, [row for row in of_kind[SMALL] if row.best_peer]),
        "host": (draw_host, of_kind[HOST]),
    }
    for name, (draw, rows) in found.items():
        if rows:
            yield name, draw(rows, str(record.environment))


def write(path: Path, record: Record) -> list[Path]:
    """Draw all charts: into ``path``, or if there are several, beside it with their names."""
    found = list(charts(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [
        path if len(found) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        for name, _ in found
    ]
    for to, (_, figure) in zip(paths, found, strict=True):
        figure.savefig(to, dpi=DPI)
    return paths


def draw_roofline(rows: Sequence[Row], where: str) -> Figure:
    """Operations per second over operations per byte, below the limits of the device."""
    groups = by_dtype([row for row in rows if row.operations and row.floor])
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


def draw_sweep(rows: Sequence[Row], where: str) -> Figure:
    """A panel for each op and dtype: the share of a copy's speed over the row length."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.dtype), []).append(row)
    lines = -(-len(groups) // 2)
    figure = new_figure(1.45 * lines + 1.3)
    grid = figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
    panels = [axes for line in grid for axes in line]
    several = len(by_dtype(rows)) > 1
    for axes, ((op, dtype), group) in zip(panels, groups.items(), strict=False):
        for direction, points in shares_by_length(group).items():
            draw_lengths(axes, direction, points)
        axes.axhline(100, color=GREY, linewidth=0.8)
        axes.set_title(f"{op} {dtype}" if several else op, fontsize=9)
        axes.grid(alpha=0.25)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    first = panels[0]
    first.set_ylim(0, max(105.0, first.get_ylim()[1]))
    first.set_xscale("log", base=2)
    ticks = [4**k for k in range(4, 9)]
    first.set_xticks(ticks, [str(n) if n < 1024 else f"{n // 1024} K" for n in ticks])
    for axes in panels:
        axes.tick_params(labelsize=7.5, labelbottom=True)
    figure.supxlabel("row length", fontsize=8)
    product = " or product" if any(PRODUCT in row.references for row in rows) else ""
    figure.supylabel(f"speed in % of a copy{product} of as much work", fontsize=8)
    lengths = sorted({row.shape[1] for row in rows if not is_power_of_two(row.shape[1])})
    title = f"Rows of every length, as many elements in all, {', '.join(by_dtype(rows))}"
    if lengths:
        title += f" (other lengths: {', '.join(map(str, lengths))})"
    complete = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    finish(figure, complete, (title, where))
    return figure


def draw_lengths(axes: Axes, direction: str, points: Sequence[tuple[int, float]]) -> None:
    """Powers of two as a line; other lengths as diamonds, because nothing lies between them."""
    found = DIRECTIONS[direction]
    for name, marker, style, chosen in (
        ("powers of two", "o", "-", [p for p in points if is_power_of_two(p[0])]),
        ("other lengths", "D", "none", [p for p in points if not is_power_of_two(p[0])]),
    ):
        axes.plot(
            [length for length, _ in chosen],
            [100 * share for _, share in chosen],
            color=found,
            linestyle=style,
            marker=marker,
            markersize=3.5 if style == "-" else 4.5,
            markerfacecolor=found if style == "-" else "none",
            linewidth=1.2,
            label=f"{direction}, {name}",
        )


def is_power_of_two(count: int) -> bool:
    """Whether a length is round."""
    return count & (count - 1) == 0


def shares_by_length(rows: Iterable[Row]) -> dict[str, list[tuple[int, float]]]:
    """Row lengths and shares of the floor, for each direction."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.share is not None:
            found.setdefault(row.direction, []).append((row.shape[1], row.share))
    return {name: sorted(points) for name, points in found.items()}


def memory_seconds(row: Row) -> float:
    """Seconds of the copy or read of as many bytes."""
    return min(t.seconds for name, t in row.references.items() if name != PRODUCT)
