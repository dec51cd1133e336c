"""Pictures of a run: roofline, speed-ups, sweeps, host times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torchkiln.bench.bench_case import BACKWARD
from torchkiln.bench.ceiling import PRODUCT
from torchkiln.bench.peers import EAGER
from torchkiln.bench.row import OURS, Row
from torchkiln.bench.sweep import draw_sweep

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from torchkiln.bench.record import Record

COLOURS = {OURS: "#d1495b", EAGER: "#30638e", "compile": "#edae49", "liger": "#66a182"}
GREY = "#888888"
BAR_INCHES = 0.21


def draw_roofline(rows: Sequence[Row], where: str) -> Figure:
    """Operations a second over operations a byte, below what the device was seen to move and do."""
    groups = by_dtype(rows)
    height = max(5.0, 0.2 * max(len(names(group)) for group in groups.values()) + 1.5)
    figure = new_figure(9.5 * len(groups), height)
    for axes, (dtype, group) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        ops = names(group)
        bandwidth = max(row.bytes / memory_seconds(row) for row in group)
        products = [
            row.operations / row.references[PRODUCT].seconds
            for row in group
            if PRODUCT in row.references
        ]
        marks = "osD^vP*Xph"
        for row in group:
            i = ops.index(label(row, direction=False))
            axes.plot(
                row.operations / row.bytes,
                row.operations / row.ours.seconds,
                linestyle="none",
                marker=marks[i // 10 % len(marks)],
                color=f"C{i % 10}",
                markerfacecolor="none" if row.direction == BACKWARD else f"C{i % 10}",
                markersize=7,
            )
        low, high = span([row.operations / row.bytes for row in group])
        high = max(high, max(products, default=0.0) / bandwidth * 4)
        roof = max(products, default=float("inf"))
        xs = [low * (high / low) ** (k / 200) for k in range(201)]
        axes.plot(xs, [min(x * bandwidth, roof) for x in xs], color=GREY, zorder=0)
        words = f"memory: {bandwidth / 1e9:.4g} GB/s, the best copy of this run"
        if products:
            words += f"; arithmetic: {roof / 1e12:.3g} T/s, the best product"
        axes.set_title(f"{dtype}\n{words}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_xlabel("operations for each byte that has to be moved")
        axes.set_ylabel("operations a second")
        axes.grid(alpha=0.3, which="both")
        for i, name in enumerate(ops):
            axes.plot([], [], marks[i // 10 % len(marks)], color=f"C{i % 10}", label=name)
        axes.plot([], [], "o", color=GREY, label="forward")
        axes.plot([], [], "o", color=GREY, markerfacecolor="none", label="backward")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(f"Roofline\n{where}")
    return figure


def draw_speedups(rows: Sequence[Row], where: str) -> Figure:
    """A bar for each call and peer: how many times as fast as it."""
    groups = by_dtype(rows)
    peers = list(
        dict.fromkeys(n for r in rows for n in r.times if n != OURS and n not in r.remarks)
    )
    most = max(map(len, groups.values()))
    figure = new_figure(8.5 * len(groups), 1.8 + BAR_INCHES * most * (0.6 + 0.5 * len(peers)))
    for axes, (dtype, group) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        thick = 0.8 / len(peers)
        for p, peer in enumerate(peers):
            for i, row in enumerate(group):
                if peer not in row.times or peer in row.remarks:
                    continue
                ratio = row.times[peer].seconds / row.ours.seconds
                at = -i + (len(peers) - 1) * thick / 2 - p * thick
                axes.barh(at, ratio - 1, thick * 0.9, left=1, color=COLOURS.get(peer, f"C{p + 4}"))
                axes.text(max(ratio, 1) * 1.03, at, f"{ratio:.2f}", va="center", fontsize=6.5)
        for p, peer in enumerate(peers):
            axes.bar(0, 0, color=COLOURS.get(peer, f"C{p + 4}"), label=f"than {peer}")
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        ratios = [r.times[p].seconds / r.ours.seconds for r in group for p in peers if p in r.times]
        low, high = min(0.5, min(ratios) / 1.2), max(2.0, *ratios) * 1.3
        axes.set_xlim(low, high)
        ticks = [2.0**k for k in range(-10, 11) if low <= 2.0**k <= high]
        axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks])
        axes.set_xticks([], minor=True)
        shapes = {row.shape for row in group}
        axes.set_yticks(
            [-i for i in range(len(group))],
            [label(row, shape=len(shapes) > 1) for row in group],
            fontsize=8,
        )
        axes.set_ylim(-len(group) + 0.4, 0.6)
        axes.set_title(dtype + ("" if len(shapes) > 1 else f", {shape_of(group[0])}"))
        axes.grid(alpha=0.3, axis="x")
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False)
    figure.suptitle(f"Times as fast\n{where}")
    return figure


def draw_host(rows: Sequence[Row], where: str) -> Figure:
    """How long a call keeps the host, ours and the peers'."""
    groups = by_dtype(rows)
    who = list(dict.fromkeys(name for row in rows for name in row.times))
    most = max(map(len, groups.values()))
    figure = new_figure(8 * len(groups), 1.8 + BAR_INCHES * most * (0.6 + 0.5 * len(who)))
    for axes, (dtype, group) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        thick = 0.8 / len(who)
        for w, name in enumerate(who):
            for i, row in enumerate(group):
                if name not in row.times:
                    continue
                at = -i + (len(who) - 1) * thick / 2 - w * thick
                micros = row.times[name].seconds * 1e6
                axes.barh(at, micros, thick * 0.9, color=COLOURS.get(name, f"C{w + 4}"))
                axes.text(micros, at, f" {micros:.1f}", va="center", fontsize=6.5)
        for w, name in enumerate(who):
            axes.bar(0, 0, color=COLOURS.get(name, f"C{w + 4}"), label=name)
        for style, reference in zip(("-", "--", ":"), group[0].references, strict=False):
            found = [
                row.references[reference].seconds
                for row in group
                if row.direction == group[0].direction
            ]
            axes.axvline(
                sorted(found)[len(found) // 2] * 1e6,
                color="black",
                linestyle=style,
                linewidth=1,
                label=f"{reference}, {group[0].direction}",
            )
        axes.set_yticks([-i for i in range(len(group))], [label(r) for r in group], fontsize=8)
        axes.set_ylim(-len(group) + 0.4, 0.6)
        axes.set_xlim(0, 1.12 * max(t.seconds * 1e6 for r in group for t in r.times.values()))
        axes.set_xlabel("microseconds")
        axes.set_title(f"{dtype}, {shape_of(group[0])}")
        axes.grid(alpha=0.3, axis="x")
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False)
    figure.suptitle(f"Host time of one call\n{where}")
    return figure


def charts(record: Record) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of what there is to draw."""
    where = str(record.environment)
    kinds: tuple[tuple[str, str, Callable[[Sequence[Row], str], Figure]], ...] = (
        ("roofline", "calls", draw_roofline),
        ("speedups", "calls", draw_speedups),
        ("sweep", "sweep", draw_sweep),
        ("small", "small", draw_speedups),
        ("host", "host", draw_host),
    )
    for name, kind, draw in kinds:
        rows = [row for row in record.rows if row.kind == kind]
        if draw is draw_roofline:
            rows = [row for row in rows if row.operations and row.floor]
        elif draw is draw_speedups:
            rows = [row for row in rows if row.best_peer]
        if rows:
            yield name, draw(rows, where)


def write(path: Path, record: Record) -> list[Path]:
    """Draw all charts: into ``path``, or where there are several, beside it with their names."""
    found = list(charts(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [
        path if len(found) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        for name, _ in found
    ]
    for to, (_, figure) in zip(paths, found, strict=True):
        figure.savefig(to, dpi=110)
    return paths


def new_figure(width: float, height: float) -> Figure:
    """An empty one, drawn without a display."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(width, height), layout="constrained")


def by_dtype(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A panel each."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.dtype, []).append(row)
    return found


def names(rows: Sequence[Row]) -> list[str]:
    """Ops with their variants, each once."""
    return list(dict.fromkeys(label(row, direction=False) for row in rows))


def label(row: Row, *, direction: bool = True, shape: bool = False) -> str:
    """What a row is called."""
    words = [row.op, row.variant, row.direction if direction else ""]
    return " ".join(word for word in [*words, shape_of(row) if shape else ""] if word)


def shape_of(row: Row) -> str:
    """Rows and columns."""
    return f"{row.shape[0]} x {row.shape[1]}"


def memory_seconds(row: Row) -> float:
    """What moving as many bytes took."""
    return min(t.seconds for name, t in row.references.items() if name != PRODUCT)


def span(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values, for logarithmic axes."""
    return min(values) / 1.6, max(values) * 1.6
