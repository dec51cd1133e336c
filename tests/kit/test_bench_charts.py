"""Charts of a benchmark's record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from torchkiln import bench
from torchkiln.bench import bars, charts
from torchkiln.bench.clock import Times
from torchkiln.bench.result import OURS
from torchkiln.testing.environment import environment

pytest.importorskip("matplotlib")

ENVIRONMENT = environment(torch.device("cpu"))


def times(seconds: float) -> Times:
    return Times(seconds, seconds, seconds, 9)


def row(
    op: str, direction: str = "forward", *, product: bool = False, **seconds: float
) -> bench.Measurement:
    """A measurement in which op and copy take 1 second each, and a product 2 seconds."""
    references = {"copy": times(1.0)} | ({"product": times(2.0)} if product else {})
    return bench.Measurement(
        kind="calls",
        op=op,
        variant="",
        dtype="float32",
        shape=(8, 16),
        direction=direction,
        threads=None,
        bytes=1000,
        operations=100_000 if product else 100,
        times={OURS: times(1.0)} | {name: times(value) for name, value in seconds.items()},
        references=references,
    )


ROWS = (
    row("slow", eager=0.5),
    row("fast", eager=594.0, compile=2.0),
    row("fast", "backward", eager=30.0),
    row("middle", eager=2.0, quack=1.5),
)


def record(*rows: bench.Measurement) -> bench.Record:
    return bench.Record(ENVIRONMENT, rows)


def test_bars_are_sorted() -> None:
    found = bars.Bars(ROWS, bars.ratios, bars.RATIOS)
    assert list(found.calls) == ["fast", "middle", "slow"]
    assert found.slots == [2, 2, 1]


def test_bars_of_threads_and_of_one_direction() -> None:
    """Each number of threads has its own bar; a single direction is drawn on the left."""
    rows = [dataclasses.replace(row("add", "backward", eager=2.0), threads=n) for n in (1, 2)]
    figure = bars.draw_speedups(rows, "here")
    assert [axes.get_visible() for axes in figure.axes] == [True, False]
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["add threads=1", "add threads=2"]


def test_speedups() -> None:
    """The picture has a logarithmic axis, a number per bar, the peers' colours and their means."""
    figure = bars.draw_speedups(ROWS, "here")
    left, right = figure.axes
    assert left.get_xscale() == "log"
    assert left.get_xlim()[1] > 594
    assert [text.get_text() for text in left.texts] == [
        *(" 594 x", " 2.00 x", " 2.00 x", " 1.50 x", " 0.50 x")
    ]
    assert [text.get_text() for text in right.texts] == [" 30.0 x"]
    colours = {bars.COLOURS[name] for name in ("eager", "compile", "quack")}
    assert {line.get_color() for line in left.lines} >= colours
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[1] == "compile: geometric mean 2.00 x of 1 calls"
    assert words[0].startswith("eager: geometric mean 11.")


def test_shares_of_a_copy() -> None:
    """Our share is a bar from 0, the share of each peer a dot."""
    figure = bars.draw_share(ROWS, "here")
    left = figure.axes[0]
    assert left.get_xscale() == "linear"
    assert left.get_xlim()[0] == 0
    assert {text.get_text() for text in left.texts} == {" 100 %"}
    dots = [line for line in left.lines if line.get_marker() == "o" and np.size(line.get_xdata())]
    assert len(dots) == 5


def test_titles_fit() -> None:
    """Title and legend lie within the picture, and texts do not overlap."""
    where = "a machine with a name, " * 12
    for draw in (bars.draw_speedups, bars.draw_share):
        figure = draw(ROWS, where)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert all(axes.title.get_window_extent().y1 <= box.y0 for axes in figure.axes)


def test_a_roofline_needs_arithmetic(tmp_path: Path) -> None:
    """The roofline is drawn only if a row has a product; other ops share one memory-bound entry."""
    assert [name for name, _ in charts.charts(record(*ROWS))] == ["share", "speedups"]
    product = row("matmul", eager=1.0, product=True)
    found = dict(charts.charts(record(*ROWS, product)))
    assert list(found) == ["share", "speedups", "roofline"]
    words = [text.get_text() for text in found["roofline"].legends[0].get_texts()]
    assert words[:2] == ["matmul", "3 memory-bound ops"]
    paths = charts.write(tmp_path / "b.png", record(*ROWS, product))
    assert [path.name for path in paths] == ["b-share.png", "b-speedups.png", "b-roofline.png"]
