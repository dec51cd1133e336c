"""The picture: the classes that the model predicts, both loss curves, and the speeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from torchkiln.bench.bars import COLOURS, DPI, RATIOS, WIDTH, Bars, ratios, scale
from torchkiln.bench.peers import EAGER
from torchkiln.bench.result import OURS
from torchkiln.demo.train import CLASSES, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from torchkiln.bench import Measurement

ARMS = ListedColormap(["#d1495b", "#30638e", "#edae49"])


@torch.no_grad()
def regions(axes: Axes, outcome: Outcome) -> None:
    """Draw the class that torchkiln's model predicts for each point of the square, and the data."""
    run = outcome.runs[0]
    line = torch.linspace(-1.25, 1.25, 300, device=outcome.points.device)
    y, x = torch.meshgrid(line, line, indexing="ij")
    classes = run.model(torch.stack([x, y], dim=-1).reshape(-1, 2)).argmax(1).reshape(x.shape)
    span = (-1.25, 1.25, -1.25, 1.25)
    shades: dict[str, Any] = {"cmap": ARMS, "vmin": 0, "vmax": CLASSES - 1}
    axes.imshow(classes.cpu().numpy(), origin="lower", extent=span, alpha=0.3, **shades)
    points, labels = outcome.points[:900].cpu().numpy(), outcome.labels[:900].cpu().numpy()
    axes.scatter(points[:, 0], points[:, 1], c=labels, s=3, **shades)
    axes.set_title(f"torchkiln's model, {outcome.accuracy(run):.1%} right", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])


def curves(axes: Axes, outcome: Outcome) -> None:
    """Draw both loss curves: torchkiln's as a wide line below that of eager torch."""
    styles: tuple[dict[str, Any], ...] = (
        {"color": COLOURS[OURS], "linewidth": 3, "alpha": 0.6},
        {"color": COLOURS[EAGER], "linewidth": 0.8},
    )
    for run, style in zip(outcome.runs, styles, strict=True):
        axes.plot(run.losses, label=f"{run.name}, {run.seconds:.2f} s", **style)
    axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=8)
    axes.set_title(f"training loss, largest difference {outcome.difference:.1g}", fontsize=9)
    axes.tick_params(labelsize=7.5)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def draw(path: Path, device: torch.device, rows: list[Measurement], outcome: Outcome) -> None:
    """Write the picture, with the speeds of the first dtype."""
    chosen = [row for row in rows if row.dtype == rows[0].dtype]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bars = Bars(chosen, ratios, RATIOS)
    height = 3.4
    figure = Figure(figsize=(WIDTH, height + bars.height + 1.0), layout="constrained")
    parts = figure.add_gridspec(2, 1, height_ratios=[height, bars.height + 0.7])
    upper, lower = figure.add_subfigure(parts[0]), figure.add_subfigure(parts[1])
    panels = upper.subplots(1, 2)
    regions(panels[0], outcome)
    curves(panels[1], outcome)
    panels = lower.subplots(1, 2, sharex=True, sharey=True)
    bars.draw(panels)
    scale(panels[0], [value for row in chosen for value in ratios(row).values()], RATIOS)
    lower.supxlabel("times as fast as eager torch", fontsize=8)
    figure.suptitle(f"torchkiln on {where}, torch {torch.__version__}", fontsize=10)
    figure.savefig(path, dpi=DPI)
