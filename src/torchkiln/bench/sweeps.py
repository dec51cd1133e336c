"""Pictures of sweeps: % of the ceiling over the row length, or over the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchkiln.bench.bars import GREY, by_dtype, colour, finish, new_figure
from torchkiln.bench.case import FORWARD
from torchkiln.bench.result import OURS, Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[int, float]]
"""Lengths, or numbers of rows, and shares of the ceiling."""


def draw_sweep(rows: Sequence[Measurement], where: str) -> Figure:
    """Shares over the row length: a panel for each op, dtype and direction."""
    lengths = sorted({row.shape[1] for row in rows if not is_power_of_two(row.shape[1])})
    title = f"Rows of every length, as many elements in all, {', '.join(by_dtype(rows))}"
    if lengths:
        title += f" (other lengths: {', '.join(map(str, lengths))})"
    return draw_over(rows, lambda row: row.shape[1], ("row length", title), where)


def draw_rows(rows: Sequence[Measurement], where: str) -> Figure:
    """Shares over the number of rows: a panel for each op, dtype and direction."""
    title = f"1 to 1 M rows of {rows[0].shape[1]}, {', '.join(by_dtype(rows))}"
    return draw_over(rows, lambda row: row.shape[0], ("rows", title), where)


def draw_over(
    rows: Sequence[Measurement],
    across: Callable[[Measurement], int],
    words: tuple[str, str],
    where: str,
) -> Figure:
    """A line of panels for each op and dtype: ours, and a point for each peer."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.op, row.dtype), []).append(row)
    columns = 2 if any(row.direction != FORWARD for row in rows) else 1
    figure = new_figure(1.45 * len(groups) + 1.5)
    grid = figure.subplots(len(groups), columns, sharex=True, sharey=True, squeeze=False)
    several = len(by_dtype(rows)) > 1
    most = 100.0
    for line, ((op, dtype), group) in zip(grid, groups.items(), strict=True):
        directions = sorted({row.direction for row in group}, key=lambda name: name != FORWARD)
        for axes in line[len(directions) :]:
            axes.set_visible(False)
        for axes, direction in zip(line, directions, strict=False):
            found = shares(group, direction, across)
            draw_panel(axes, found)
            most = max(most, *(100 * share for _, share in found.get(OURS, ())))
            name = f"{op} {dtype}" if several else op
            axes.set_title(f"{name} {direction}", fontsize=9)
            axes.tick_params(labelsize=7.5, labelbottom=True)
    first = grid[0][0]
    first.set_ylim(0, 1.05 * min(most, 130.0))
    first.set_xscale("log", base=2)
    least, longest = (end(map(across, rows)) for end in (min, max))
    ticks = [4**k for k in range(11) if least <= 4**k <= longest]
    first.set_xticks(ticks, [short(n) for n in ticks])
    figure.supxlabel(words[0], fontsize=8)
    figure.supylabel("speed in % of the ceiling", fontsize=8)
    panels = [axes for line in grid for axes in line]
    complete = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    finish(figure, complete, (words[1], where), columns=3)
    return figure


def draw_panel(axes: Axes, found: dict[str, Points]) -> None:
    """Draw torchkiln as a line for powers of two and diamonds for other numbers; peers as dots."""
    for name, points in found.items():
        if name == OURS:
            continue
        xs, ys = [x for x, _ in points], [100 * share for _, share in points]
        axes.plot(xs, ys, "o", color=colour(name), markersize=3, alpha=0.8, label=name)
    # Numbers that are no powers of two are far apart, so no line connects them.
    for name, style, marker, wanted in (
        (OURS, "-", "o", True),
        (f"{OURS}, no powers of two", "none", "D", False),
    ):
        chosen = [point for point in found.get(OURS, ()) if is_power_of_two(point[0]) == wanted]
        if chosen:
            axes.plot(
                [x for x, _ in chosen],
                [100 * share for _, share in chosen],
                color=colour(OURS),
                linestyle=style,
                marker=marker,
                markersize=3.5,
                markerfacecolor=colour(OURS) if wanted else "none",
                linewidth=1.2,
                label=name,
            )
    axes.axhline(100, color=GREY, linewidth=0.8)
    axes.grid(alpha=0.25)


def shares(
    rows: Sequence[Measurement], direction: str, across: Callable[[Measurement], int]
) -> dict[str, Points]:
    """The points of torchkiln and of each peer that computes the same, in one direction."""
    found: dict[str, Points] = {}
    for row in sorted(rows, key=across):
        if row.direction != direction or row.ceiling is None:
            continue
        for name, times in row.times.items():
            if name not in row.remarks:
                found.setdefault(name, []).append((across(row), row.ceiling / times.seconds))
    return found


def short(count: int) -> str:
    """A number in powers of two, such as ``4 K`` for 4096."""
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if count >= factor:
            return f"{count // factor} {unit}"
    return str(count)


def is_power_of_two(count: int) -> bool:
    """Whether a number is a power of two."""
    return count & (count - 1) == 0
