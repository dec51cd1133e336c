"""Models of torchvision and timm before and after ``torchkiln.replace(model, example=batch)``.

    python docs/zoo_times.py --within 500 --out zoo.jsonl
    python docs/zoo_times.py --part 0/4 --out zoo.jsonl    # on the first of four GPUs
    python docs/zoo_times.py --summary zoo.jsonl

Each cell is a model, a dtype, a batch and a mode: inference without gradients, the forward of
training, or forward and backward. Parameters are random. Both forms of a model take turns in one
process; a time is the median, and the longer one of host and device. ``gain`` is the median of the
quotients of adjacent times. Cells are drawn in a fixed random order, so that a part of them is a
sample. Cells that --out has are left out.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.bench.clock import in_turns
from torchkiln.patch.trial import seconds
from torchkiln.testing.environment import environment

SECONDS = 1.0
"""Seconds of measurement per cell."""
SHORTEST = 5e-3
"""Seconds of calls in a row that are one measurement."""
CLASSES = 10


class Recurrent(nn.Module):
    """A loop over time: two products, a layer norm and tanh in each step."""

    def __init__(self, size: int = 512, steps: int = 32) -> None:
        super().__init__()
        self.size, self.steps = size, steps
        self.given, self.state = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, steps, size]."""
        state = x.new_zeros(len(x), self.size)
        for part in self.given(x).unbind(1):
            state = torch.tanh(self.norm(part + self.state(state)))
        out: Tensor = self.head(state)
        return out


@dataclass(frozen=True)
class Entry:
    """A model of a library, and the height of its images."""

    library: str
    name: str
    height: int = 224

    def build(self) -> nn.Module:
        """The model with random parameters."""
        torch.manual_seed(0)
        if not self.library:
            return Recurrent()
        if self.library == "timm":
            model: nn.Module = importlib.import_module("timm").create_model(self.name)
        else:
            model = getattr(importlib.import_module("torchvision.models"), self.name)(weights=None)
        return model

    def batch(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Random images, or sequences of the loop."""
        shape = (count, 3, self.height, self.height) if self.library else (count, 32, 512)
        return torch.randn(shape, dtype=dtype, device=device)


ZOO = (
    *(Entry("torchvision", f"efficientnet_b{k}", h) for k, h in enumerate((224, 240, 288))),
    *(Entry("timm", f"efficientnet_b{k}", h) for k, h in enumerate((224, 240, 288))),
    Entry("timm", "mobilenetv1_100"),
    *(Entry("torchvision", name) for name in ("mobilenet_v2", "mobilenet_v3_large")),
    *(Entry("timm", name) for name in ("mobilenetv2_100", "mobilenetv3_large_100")),
    *(Entry("torchvision", f"resnet{depth}") for depth in (18, 50, 101)),
    *(Entry("torchvision", name) for name in ("shufflenet_v2_x1_0", "densenet121")),
    Entry("torchvision", "regnet_y_800mf"),
    *(Entry("torchvision", name) for name in ("swin_v2_t", "vit_b_16", "convnext_tiny")),
    Entry("timm", "swinv2_tiny_window8_256", 256),
    *(Entry("timm", name) for name in ("vit_base_patch16_224", "convnext_tiny")),
    Entry("timm", "mixer_b16_224"),
    Entry("", "recurrent"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCHES = (1, 8, 128)
MODES = ("inference", "forward", "step")

Cell = tuple[Entry, str, int, str]
Row = dict[str, Any]


def cells(part: int, parts: int) -> list[Cell]:
    """The cells of one of several GPUs, in random order."""
    every = list(product(ZOO, DTYPES, BATCHES, MODES))
    random.Random(0).shuffle(every)
    return every[part::parts]


def facts(cell: Cell) -> Row:
    """What a line says about its cell."""
    entry, dtype, batch, mode = cell
    name = f"{entry.library} {entry.name}".strip()
    return {"model": name, "dtype": dtype, "batch": batch, "mode": mode}


def call_of(model: nn.Module, batch: Tensor, mode: str) -> Any:
    """What is timed."""

    def step() -> None:
        model(batch).float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step if mode == "step" else partial(model, batch)


def is_left(row: torchkiln.patch.Replacement) -> bool:
    """Whether a trial, or the proof of channels_last, has left a module as it was."""
    return not row.changed and (row.seconds_now is not None or row.kind == "channels_last")


def measured(cell: Cell, device: torch.device) -> Row:
    """Seconds of both forms, and what replace did."""
    entry, dtype, batch, mode = cell
    was = entry.build().to(device, DTYPES[dtype]).train(mode != "inference")
    now = copy.deepcopy(was)
    x = entry.batch(batch, DTYPES[dtype], device)
    with torch.set_grad_enabled(mode != "inference"):
        start = time.perf_counter()
        report = torchkiln.replace(now, example=x)
        spent = time.perf_counter() - start
        calls = {"was": call_of(was, x, mode), "now": call_of(now, x, mode)}
        for call in calls.values():
            call()
        count = max(1, int(SHORTEST / seconds(device, calls["was"])))
        clock = partial(seconds, device, count=count)
        found = in_turns(clock, calls, SECONDS)
    left = Counter(row.reason for row in report.rows if is_left(row))
    return {
        **facts(cell),
        "was": median(found["was"]),
        "now": median(found["now"]),
        "gain": median(a / b for a, b in zip(found["was"], found["now"], strict=True)),
        "rounds": len(found["now"]),
        "replaced": dict(Counter(row.now for row in report.changed)),
        "left": dict(left),
        "replace_seconds": round(spent, 2),
    }


def lines(given: argparse.Namespace, done: Sequence[Row]) -> Iterator[Row]:
    """Measures cells until the time is over."""
    torch.set_float32_matmul_precision("high")
    end = time.monotonic() + given.within
    machine = {**asdict(environment(given.device))}
    machine["commit"] = given.commit or machine["commit"]
    names = [json.dumps({k: row[k] for k in ("model", "dtype", "batch", "mode")}) for row in done]
    part, parts = map(int, given.part.split("/"))
    for cell in cells(part, parts):
        if json.dumps(facts(cell)) in names or given.only not in facts(cell)["model"]:
            continue
        if time.monotonic() > end:
            return
        try:
            row = measured(cell, given.device)
        except Exception as error:
            words = str(error).strip().split("\n")[0]
            row = {**facts(cell), "skipped": f"{type(error).__name__}: {words}"}
        yield {**row, "environment": machine}


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Geometric means by mode and batch, and the cells that became slower, worst first."""
    timed = [row for row in rows if "was" in row]
    yield "| mode | batch | cells | times as fast, geometric mean | below 0.99 |"
    yield "|---|---:|---:|---:|---:|"
    for mode, batch in (*product(MODES, BATCHES), ("all", 0)):
        gains = [
            row["gain"]
            for row in timed
            if mode == "all" or (row["mode"], row["batch"]) == (mode, batch)
        ]
        if gains:
            mean = math.exp(sum(map(math.log, gains)) / len(gains))
            below = sum(gain < 0.99 for gain in gains)
            yield f"| {mode} | {batch or ''} | {len(gains)} | {mean:.2f} | {below} |"
    yield ""
    for row in sorted(timed, key=lambda row: row["gain"])[:20]:
        name = f"{row['model']}, {row['dtype']}, {row['batch']}, {row['mode']}"
        ms = f"{row['was'] * 1e3:.3g} -> {row['now'] * 1e3:.3g} ms"
        yield f"{row['gain']:.3f}  {name}  {ms}  {row['replaced']} {row['left']}"
    for row in rows:
        if "skipped" in row:
            yield f"skipped: {row['model']}, {row['dtype']}, {row['batch']}: {row['skipped']}"


def read(path: Path | None) -> list[Row]:
    """The lines of a file, if there is one."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path and path.exists() else []


def main(words: list[str]) -> None:
    """Prints lines, and appends them to a file; or the summary of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, type=torch.device)
    parser.add_argument("--within", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the cells")
    parser.add_argument("--only", default="", help="a part of the name of a model")
    parser.add_argument("--commit", default="", help="needed outside of a checkout")
    parser.add_argument("--out", type=Path, help="a file for the lines")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="only print its summary")
    given = parser.parse_args(words)
    if given.summary:
        print("\n".join(summary(read(given.summary))))
        return
    for row in lines(given, read(given.out)):
        print(json.dumps(row), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
