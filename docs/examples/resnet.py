"""Trains a small ResNet twice from the same weights: as it is, and after ``torchkiln.fuse``.

The pictures are synthetic: stripes with noise, whose direction and width are the class. Both models
take the same batches in turns, so that their losses and times can be compared. Usage:

    python resnet.py --steps 40 --picture resnet.png
    python resnet.py --bottleneck --width 64 --blocks 3 4 6 3 --image 224 --batch 256 --bfloat16

The second call is ResNet-50 in the size that is common on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import statistics
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln

DIRECTIONS, WIDTHS = 4, 2
CLASSES = DIRECTIONS * WIDTHS
WARM_UP = 3
"""Steps that are not timed."""


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps height and width, divided by the stride."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Block(nn.Module):
    """Two convolutions, or three if ``bottleneck``, and the shortcut around them."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        sizes = [(width, 1, 1), (width, 3, stride)] if bottleneck else [(width, 3, stride)]
        layers: list[nn.Module] = []
        channels = inputs
        for each, size, step in sizes:
            layers += [conv(channels, each, size, step), nn.BatchNorm2d(each), nn.ReLU()]
            channels = each
        self.layers = nn.Sequential(*layers)
        self.last = conv(channels, outputs, 1 if bottleneck else 3)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``relu(norm(last(layers(x))) + shortcut(x))``."""
        out = self.norm(self.last(self.layers(x)))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Stages of blocks, each with half the pixels and twice the channels of the one before."""

    def __init__(self, width: int, blocks: list[int], *, bottleneck: bool, stem: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, width, 7 if stem > 1 else 3, stem), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)] if stem > 1 else []
        channels = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                each = width * 2**stage
                stages.append(Block(channels, each, stride, bottleneck=bottleneck))
                channels = 4 * each if bottleneck else each
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures [batch, 3, height, width] to logits [batch, CLASSES]."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def pictures(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stripes in noise, and the class: their direction and their width."""
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = classes % DIRECTIONS * (math.pi / DIRECTIONS)
    waves = 3.0 + 3.0 * (classes // DIRECTIONS)
    line = torch.linspace(0, 1, size)
    y, x = torch.meshgrid(line, line, indexing="ij")
    angle, waves = angle[:, None, None], waves[:, None, None]
    shift = torch.rand(count, 1, 1, generator=generator)
    along = x * angle.cos() + y * angle.sin()
    stripes = torch.sin(2 * math.pi * (waves * along + shift))
    noise = torch.randn(count, 3, size, size, generator=generator)
    return stripes[:, None] + noise, classes


@dataclass
class Run:
    """A model, its losses and the seconds of each step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    predicting: float = 0.0
    """Seconds of a batch in eval mode."""
    right: float = 0.0
    """Part of new pictures whose class it finds."""

    @property
    def per_step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds[WARM_UP:] or self.seconds)


def now(device: torch.device) -> float:
    """The time when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def precision(device: torch.device, *, bfloat16: bool) -> contextlib.AbstractContextManager[object]:
    """Autocast to bfloat16, or nothing."""
    if not bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def step(run: Run, x: Tensor, classes: Tensor, *, bfloat16: bool) -> None:
    """One step of training."""
    start = now(x.device)
    with precision(x.device, bfloat16=bfloat16):
        loss = F.cross_entropy(run.model(x).float(), classes)
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    run.seconds.append(now(x.device) - start)
    run.losses.append(loss.item())


@torch.no_grad()
def predict(run: Run, x: Tensor, classes: Tensor, *, bfloat16: bool) -> None:
    """The part of right classes in eval mode, and its time."""
    run.model.eval()
    times = []
    for _ in range(WARM_UP + 5):
        start = now(x.device)
        with precision(x.device, bfloat16=bfloat16):
            logits = run.model(x)
        times.append(now(x.device) - start)
    run.predicting = statistics.median(times[WARM_UP:])
    run.right = float((logits.argmax(1) == classes).float().mean())


def difference(eager: Run, fused: Run) -> float:
    """The largest difference of the losses."""
    return max(abs(a - b) for a, b in zip(eager.losses, fused.losses, strict=True))


def draw(path: str, runs: dict[str, Run], x: Tensor, title: str) -> None:
    """Writes a picture of some inputs, both loss curves and the times."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    inputs, curves, times = figure.subplots(1, 3, width_ratios=[1, 1.6, 1.2])
    shown = x[:9].float().mean(1).cpu()
    rows = [torch.cat(list(row), dim=1) for row in shown.split(3)]
    inputs.imshow(torch.cat(rows).numpy(), cmap="gray")
    inputs.set(xticks=[], yticks=[], title="pictures of eight classes")
    colours = {"torchkiln.fuse": "#30638e", "eager": "#d1495b"}
    for name, colour in colours.items():
        wide = name != "eager"
        curves.plot(
            runs[name].losses,
            label=name,
            color=colour,
            linewidth=4 if wide else 1,
            alpha=0.5 if wide else 1,
        )
    apart = difference(runs["eager"], runs["torchkiln.fuse"])
    curves.set(xlabel="step", title=f"training loss, at most {apart:.1g} apart")
    curves.legend()
    for i, (name, colour) in enumerate(colours.items()):
        values = [1e3 * runs[name].per_step, 1e3 * runs[name].predicting]
        bars = times.bar([i * 0.4, 1.2 + i * 0.4], values, 0.38, color=colour)
        times.bar_label(bars, fmt="%.1f", fontsize=8)
    times.set_xticks([0.2, 1.4], ["step of training", "batch in eval mode"])
    times.set_title("milliseconds")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def options(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="pictures of a step")
    parser.add_argument("--image", type=int, default=32, help="height and width of the pictures")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 1, 1], help="of each stage")
    parser.add_argument("--bottleneck", action="store_true", help="three convolutions per block")
    parser.add_argument("--bfloat16", action="store_true", help="under autocast")
    parser.add_argument("--rate", type=float, default=0.05, help="of learning")
    parser.add_argument("--compile", action="store_true", help="torch.compile for both models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", metavar="PATH", help="write loss curves and times; *.png")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[str, Run]:
    """Trains both models, prints their losses and times, and compares them."""
    given = options(words)
    device = torch.device(given.device)
    torch.manual_seed(0)
    stem = 2 if given.image >= 128 else 1
    eager: Any = ResNet(given.width, given.blocks, bottleneck=given.bottleneck, stem=stem)
    eager = eager.to(device).to(memory_format=torch.channels_last)
    fused = copy.deepcopy(eager)
    report = torchkiln.fuse(fused)
    runs = {}
    for name, model in (("eager", eager), ("torchkiln.fuse", fused)):
        optimizer = torch.optim.SGD(model.parameters(), lr=given.rate, momentum=0.9)
        if given.compile:
            model.compile()
        runs[name] = Run(model, optimizer)
    parameters = sum(p.numel() for p in eager.parameters())
    title = (
        f"{parameters:,} parameters, {given.batch} pictures of {given.image} x {given.image} "
        f"per step on {device}, torch {torch.__version__}"
    )
    print(title)
    print(f"fused: {len(report.changed)} of {len(report.rows)} batch norms")

    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor]:
        x, classes = pictures(given.batch, given.image, generator)
        x = x.to(device, memory_format=torch.channels_last)
        return x, classes.to(device)

    for _ in range(given.steps):
        x, classes = batch()
        for run in runs.values():
            step(run, x, classes, bfloat16=given.bfloat16)
    x, classes = batch()
    for run in runs.values():
        predict(run, x, classes, bfloat16=given.bfloat16)

    for name, run in runs.items():
        print(
            f"{name:14} loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {run.right:4.0%} right, "
            f"{1e3 * run.per_step:.1f} ms per step ({given.batch / run.per_step:,.0f} pictures/s), "
            f"{1e3 * run.predicting:.1f} ms per batch in eval mode"
        )
    ours, theirs = runs["torchkiln.fuse"], runs["eager"]
    print(
        f"a step takes {theirs.per_step / ours.per_step:.2f} times as long in eager, "
        f"a batch in eval mode {theirs.predicting / ours.predicting:.2f} times"
    )
    apart = difference(theirs, ours)
    allowed = 0.2 if given.bfloat16 else 0.1  # rounding differences grow from step to step
    print(f"the losses differ by at most {apart:.2g}")
    assert apart < allowed, f"losses: got a difference of {apart:.3g}, expected less than {allowed}"
    if given.picture and find_spec("matplotlib") is None:
        print("picture: left out, there is no module matplotlib; pip install matplotlib")
    elif given.picture:
        draw(given.picture, runs, x, title)
        print(f"picture: {given.picture}")
    return runs


if __name__ == "__main__":
    main()
