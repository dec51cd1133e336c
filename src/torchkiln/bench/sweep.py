"""Rows of a sweep: the same number of elements in rows of every length, and their picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchkiln.bench.bench_case import BACKWARD
from torchkiln.bench.row import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Powers of two; hidden sizes and vocabularies of language models that are none.
LENGTHS = (
    *(256, 512, 1024, 2048, 3584, 4096, 5120, 8192, 12288, 16384, 32768),
    *(50257, 65536, 131072, 151936),
)


def sweep_shapes(elements: int) -> list[tuple[int, int]]:
    """Rows and columns of about as many elements, for each row length."""
    return [(max(1, round(elements / length)), length) for length in LENGTHS]


def lines(rows: Iterable[Row]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Row lengths and shares of the floor, for each op and direction."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.share is not None:
            found.setdefault((row.op, row.direction), []).append((row.shape[1], row.share))
    return {name: sorted(points) for name, points in found.items()}


def panel(axes: Axes, rows: list[Row]) -> None:
    """One dtype: a colour for each op, dashes for backward."""
    ops = list(dict.fromkeys(row.op for row in rows))
    for (op, direction), points in lines(rows).items():
        axes.plot(
            [length for length, _ in points],
            [100 * share for _, share in points],
            color=f"C{ops.index(op) % 10}",
            linestyle="--" if direction == BACKWARD else "-",
            marker="o",
            markersize=3,
            label=f"{op} {direction}",
        )
    axes.axhline(100, color="#888888", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS], rotation=60, fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("row length")
    axes.set_title(rows[0].dtype)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_sweep(rows: Sequence[Row], where: str) -> Figure:
    """The picture of a sweep, with a panel for each dtype."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    by_dtype: dict[str, list[Row]] = {}
    for row in rows:
        by_dtype.setdefault(row.dtype, []).append(row)
    figure = Figure(figsize=(10 * len(by_dtype), 6), layout="constrained")
    panels = figure.subplots(1, len(by_dtype), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, by_dtype.values(), strict=True):
        panel(axes, group)
    panels[0].set_ylim(
        0, max(105.0, panels[0].get_ylim()[1])
    )  # of all, now that their lines are there
    panels[0].set_ylabel("% of the speed at which a copy moves as many bytes")
    figure.suptitle(f"Row lengths\n{where}")
    return figure
