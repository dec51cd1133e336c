"""The picture: what was learned, both loss curves, and the speeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from torchkiln.bench.peers import EAGER
from torchkiln.bench.table import duration
from torchkiln.demo.train import CLASSES, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from torchkiln.bench import Row

OURS, PLAIN = "#d1495b", "#30638e"
ARMS = ListedColormap(["#d1495b", "#30638e", "#edae49"])


@torch.no_grad()
def regions(axes: Axes, outcome: Outcome) -> None:
    """The fused model's class at every point of the square, and the data."""
    run = outcome.runs[0]
    line = torch.linspace(-1.25, 1.25, 300, device=outcome.points.device)
    y, x = torch.meshgrid(line, line, indexing="ij")
    classes = run.model(torch.stack([x, y], dim=-1).reshape(-1, 2)).argmax(1).reshape(x.shape)
    span = (-1.25, 1.25, -1.25, 1.25)
    scale: dict[str, Any] = {"cmap": ARMS, "vmin": 0, "vmax": CLASSES - 1}
    axes.imshow(classes.cpu().numpy(), origin="lower", extent=span, alpha=0.3, **scale)
    points, labels = outcome.points[:900].cpu().numpy(), outcome.labels[:900].cpu().numpy()
    axes.scatter(points[:, 0], points[:, 1], c=labels, s=5, **scale)
    axes.set_title(f"what torchkiln's model learned ({outcome.accuracy(run):.1%} right)")
    axes.set_xticks([])
    axes.set_yticks([])


def curves(axes: Axes, outcome: Outcome) -> None:
    """Two curves that should look like one."""
    styles: tuple[dict[str, Any], ...] = (
        {"color": OURS, "linewidth": 3.5, "alpha": 0.6},
        {"color": PLAIN, "linewidth": 1.0},
    )
    for run, style in zip(outcome.runs, styles, strict=True):
        axes.plot(run.losses, label=f"{run.name}, {run.seconds:.2f} s", **style)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(f"training loss (largest difference {outcome.difference:.1g})")
    axes.grid(alpha=0.3)
    axes.legend()


def speeds(axes: Axes, rows: list[Row]) -> None:
    """One bar for each row: how many times as fast as eager torch."""
    ratios = [row.speedup or 0.0 for row in rows]
    places = np.arange(len(rows))[::-1]
    axes.barh(places, ratios, color=[OURS if r >= 1 else "#888888" for r in ratios], height=0.7)
    axes.axvline(1.0, color=PLAIN, linewidth=1.5)
    for place, row, ratio in zip(places, rows, ratios, strict=True):
        ours, eager = duration(row.ours.seconds), duration(row.times[EAGER].seconds)
        words = f"{ratio:.2f} x   {ours}, eager {eager}"
        axes.text(max(ratio, 1.0) + 0.04, place, words, va="center", fontsize=8)
    axes.set_yticks(places, [f"{row.op} {row.direction}" for row in rows], fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlim(0, max(1.0, *ratios) * 1.75)
    axes.set_xlabel("times as fast as eager torch (line: equal)")
    axes.set_title(f"speed at {rows[0].shape[0]} x {rows[0].shape[1]} in {rows[0].dtype}")


def draw(path: Path, device: torch.device, timings: list[Row], outcome: Outcome) -> None:
    """Write the picture, with the speeds of one dtype."""
    rows = [row for row in timings if row.dtype == timings[0].dtype]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with mpl.rc_context({"font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(17, max(5.5, 0.3 * len(rows) + 1.5)), layout="constrained")
        panels = figure.subplots(1, 3, width_ratios=[1, 1.1, 1.5])
        regions(panels[0], outcome)
        curves(panels[1], outcome)
        speeds(panels[2], rows)
        figure.suptitle(f"torchkiln on {where}, torch {torch.__version__}")
        figure.savefig(path, dpi=110)
