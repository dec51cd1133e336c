"""Bar charts of a run: % of the ceiling, speed-ups, host times; style of all charts.

Every picture is 8 inches wide, and legible at 800 pixels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, mode
from typing import TYPE_CHECKING, Any

from torchkiln.bench.case import FORWARD
from torchkiln.bench.peers import COMPILE, CUDNN, EAGER, LIGER, QUACK, TORCH, TORCHAO, TRL
from torchkiln.bench.result import OURS, Measurement
from torchkiln.bench.roofline import PRODUCT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 8.0, 150
BAR, GAP = 0.135, 0.07
"""Inches per bar, and inches between groups of bars."""
COLOURS = {
    OURS: "#d1495b",
    EAGER: "#30638e",
    COMPILE: "#edae49",
    LIGER: "#66a182",
    QUACK: "#8d6a9f",
    CUDNN: "#00798c",
    TORCHAO: "#6b4226",
    TRL: "#b56576",
    TORCH: "#3d405b",
}
GREY = "#888888"
TEXT: dict[str, Any] = {"fontsize": 6.5, "verticalalignment": "center_baseline"}

Values = dict[str, float]
"""A figure for each name: the op itself and its peers."""


@dataclass(frozen=True)
class Style:
    """Scale and format of the numbers on a bar chart."""

    unit: str
    decimals: int
    """Decimals of numbers below 10; larger numbers have fewer."""
    origin: float
    """Left end of the bars; 0 gives a linear axis, other numbers a logarithmic one."""
    line: float | None = None
    """Figure that is marked by a line."""
    smallest_first: bool = False
    dots: bool = False
    """Whether peers are dots on our bar instead of separate bars."""

    def words(self, value: float) -> str:
        """A figure as text, with its unit."""
        digits = len(f"{value:.0f}")
        return f"{value:.{max(0, self.decimals + 1 - digits)}f}{self.unit}"

    def slots(self, values: Iterable[Values]) -> int:
        """The number of bars in a group."""
        return 1 if self.dots else max(len(found) for found in values)

    def key(self, values: Iterable[Values]) -> float:
        """Sort key of a group: the geometric mean of the first figures, ours or eager's."""
        mean = geometric_mean(next(iter(found.values())) for found in values)
        return mean if self.smallest_first else -mean


def draw_share(rows: Sequence[Measurement], where: str) -> Figure:
    """A bar for each call: the ceiling divided by our time; dots for the peers."""

    def shares(row: Measurement) -> Values:
        ceiling = row.ceiling or 0.0
        return {n: 100 * ceiling / t.seconds for n, t in row.times.items() if n not in row.remarks}

    product = ", or torch's product" if any(PRODUCT in r.references for r in rows) else ""
    title = f"Speed in % of the ceiling: a copy of as many bytes{product} (larger is better)"
    return draw_bars(rows, shares, (title, where), Style(" %", 0, 0.0, 100.0, dots=True))


RATIOS = Style(" x", 2, 1.0, 1.0)


def ratios(row: Measurement) -> Values:
    """The time of each peer that computes the same result, divided by torchkiln's."""
    times = {n: t for n, t in row.times.items() if n != OURS and n not in row.remarks}
    return {name: found.seconds / row.ours.seconds for name, found in times.items()}


def draw_speedups(rows: Sequence[Measurement], where: str) -> Figure:
    """A bar for each call and peer: the peer's time divided by ours."""
    title = "How many times as fast as each peer (larger is better)"
    return draw_bars(rows, ratios, (title, where), RATIOS)


def draw_host(rows: Sequence[Measurement], where: str) -> Figure:
    """A bar for each call, ours and the peers': microseconds on the host."""

    def micros(row: Measurement) -> Values:
        return {name: times.seconds * 1e6 for name, times in row.times.items()}

    title = "Microseconds that a call on 4 x 64 elements occupies the host (smaller is better)"
    return draw_bars(rows, micros, (title, where), Style(" us", 2, 1.0, smallest_first=True))


def draw_bars(
    rows: Sequence[Measurement],
    values: Callable[[Measurement], Values],
    titles: tuple[str, str],
    style: Style,
) -> Figure:
    """Sorted groups of bars: one row of panels per dtype, one column per direction."""
    lines = [Bars(group, values, style) for group in by_dtype(rows).values()]
    every: dict[str, list[float]] = {}
    for name, value in [item for row in rows for item in values(row).items()]:
        every.setdefault(name, []).append(value)
    heights = [bars.height for bars in lines]
    figure = new_figure(sum(heights) + 0.45 * len(lines) + 1.0 + 0.17 * len(every))
    grid = figure.subplots(
        len(lines), 2, sharex=True, sharey="row", squeeze=False, height_ratios=heights
    )
    for panels, bars in zip(grid, lines, strict=True):
        bars.draw(panels)
    for name, found in every.items():
        words = f"{name}: geometric mean {style.words(geometric_mean(found))}"
        marks = "o" if style.dots and name != OURS else "s"
        grid[0][0].plot([], [], marks, color=colour(name), label=f"{words} of {len(found)} calls")
    scale(grid[0][0], [value for found in every.values() for value in found], style)
    finish(figure, grid[0][0], titles)
    return figure


class Bars:
    """Sorted groups of bars, one group per call, one panel per direction."""

    def __init__(
        self, rows: Sequence[Measurement], values: Callable[[Measurement], Values], style: Style
    ) -> None:
        self.rows = rows
        self.style = style
        found: dict[str, dict[str, Values]] = {}
        for row in rows:
            found.setdefault(label(row, rows), {})[row.direction] = values(row)
        order = sorted(found, key=lambda name: style.key(found[name].values()))
        self.calls = {name: found[name] for name in order}
        self.slots = [style.slots(call.values()) for call in self.calls.values()]
        self.height = sum(BAR * slots + GAP for slots in self.slots)
        """The height of a panel, in inches."""

    def draw(self, panels: Sequence[Axes]) -> None:
        """Draw into two panels that share their y axis; forward on the left."""
        directions = sorted({row.direction for row in self.rows}, key=lambda d: d != FORWARD)
        for axes, direction in zip(panels, directions, strict=False):
            groups = [call.get(direction, {}) for call in self.calls.values()]
            draw_panel(axes, list(zip(self.calls, groups, self.slots, strict=True)), self.style)
            words = f"{self.rows[0].dtype}, {direction}, {usual_shape(self.rows)}"
            axes.set_title(words, fontsize=9)
        for axes in panels[len(directions) :]:
            axes.set_visible(False)


def draw_panel(axes: Axes, groups: Sequence[tuple[str, Values, int]], style: Style) -> None:
    """Draw groups from top to bottom, each with label, figures and number of bar slots."""
    top = 0.0
    middles = []
    strength = 0.6 if style.dots else 1.0
    for _, values, slots in groups:
        middles.append(top - slots * BAR / 2)
        for i, (name, value) in enumerate(values.items()):
            found = colour(name)
            if style.dots and i > 0:
                axes.plot(value, middles[-1], "o", color=found, markersize=4, zorder=4)
                continue
            at = middles[-1] if style.dots else top - (i + 0.5) * BAR
            length = value - style.origin
            axes.barh(at, length, 0.85 * BAR, style.origin, color=found, alpha=strength)
            text = f" {style.words(value)}"
            if style.dots:  # a column of numbers, because dots may lie at the end of the bar
                axes.text(1, at, text, TEXT, transform=axes.get_yaxis_transform())
            else:
                axes.plot(
                    value, at, "|", color=found, markersize=61 * BAR
                )  # visible even for a bar of no length
                axes.text(max(value, style.line or value), at, text, TEXT)
        top -= slots * BAR + GAP
    axes.set_yticks(middles, [name for name, _, _ in groups], fontsize=7.5)
    axes.set_ylim(top + GAP / 2, GAP)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if style.line is not None:
        axes.axvline(style.line, color="black", linewidth=0.8, zorder=1.5)


def scale(axes: Axes, values: Sequence[float], style: Style) -> None:
    """Limits and ticks of the axis of the figures, with space for the numbers."""
    if style.origin == 0.0:
        most = max(*values, style.line or 0.0)
        axes.set_xlim(0, 1.05 * min(most, 1.25 * (style.line or most)))
        return
    low = min(style.origin, *values) / 1.1
    high = max(2 * style.origin, *values)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.2)
    steps = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [step * 10.0**power for power in range(-3, 6) for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high * 1.2]
    axes.set_xticks(ticks, [f"{tick:g}{style.unit}" for tick in ticks])
    axes.set_xticks([], minor=True)


def new_figure(height: float) -> Figure:
    """An empty figure, drawn without a display."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(WIDTH, height), layout="constrained")


def finish(figure: Figure, axes: Axes, titles: tuple[str, str], columns: int = 2) -> None:
    """Add title, wrapped environment, and the legend of ``axes`` above all panels."""
    title, where = titles
    figure.legend(
        *axes.get_legend_handles_labels(),
        title="\n".join([title, *textwrap.wrap(where, 110)]),
        title_fontsize=8.5,
        alignment="left",
        loc="outside upper left",
        ncols=columns,
        fontsize=7.5,
        frameon=False,
    )


def usual_shape(rows: Iterable[Measurement]) -> str:
    """The shape that most rows have."""
    return mode(map(shape_of, rows))


def label(row: Measurement, group: Sequence[Measurement]) -> str:
    """Op and variant, with shape and threads if these differ within the group."""
    shape = "" if shape_of(row) == usual_shape(group) else shape_of(row)
    several = len({r.threads for r in group}) > 1
    threads = f"threads={row.threads}" if several else ""
    return " ".join(word for word in (row.op, row.variant, shape, threads) if word)


def shape_of(row: Measurement) -> str:
    """Rows and columns, as text."""
    return f"{row.shape[0]} x {row.shape[1]}"


def by_dtype(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """The rows, grouped by dtype."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        found.setdefault(row.dtype, []).append(row)
    return found


def colour(name: str) -> str:
    """The colour of a peer in all pictures."""
    return COLOURS.get(name, GREY)
