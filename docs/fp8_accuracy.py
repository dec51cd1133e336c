"""Trains the transformer of docs/examples in float32, bfloat16 and FP8, and compares the results.

    python docs/fp8_accuracy.py --out fp8_accuracy.json --picture fp8_accuracy.png

The runs of a seed have the same first parameters and batches. Parameters are float32. bfloat16 is
torch.autocast; FP8 is the same with blocks of precision="fp8", whose head stays in bfloat16. The
final loss is that of batches that no run has trained on, in the precision of the run. Gradients are
compared at parameters of the float32 run: in each precision, of the same batch. --tiny is for a
test on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from examples.transformer import Model, batch
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.bench.bars import COLOURS, DPI, WIDTH
from torchkiln.bench.clock import synchronize
from torchkiln.bench.peers import COMPILE, EAGER
from torchkiln.bench.result import OURS
from torchkiln.testing.environment import environment

PRECISIONS = ("float32", "bfloat16", "fp8")
SHADES = dict(zip(PRECISIONS, (COLOURS[COMPILE], COLOURS[EAGER], COLOURS[OURS]), strict=True))
STEPS, SEEDS, LOOKS = 2000, 3, 4
"""Steps, first parameters, and parts of the float32 run after which gradients are compared."""
HELD_OUT = 50
"""Batches of the final loss."""
RATE = 4e-3
SMOOTHED = 25
"""Steps of a point in the picture."""

Batches = Sequence[tuple[Tensor, Tensor]]
State = dict[str, Tensor]
Marks = list[tuple[int, State]]
"""Parameters after a number of steps."""
Row = dict[str, Any]


def model_of(precision: str, state: State, device: torch.device) -> Model:
    """A model with these parameters."""
    model = Model(True, "fp8" if precision == "fp8" else None).to(device)
    model.load_state_dict(state)
    return model


def copied(model: Model) -> State:
    """The parameters."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def drawn(seed: int, count: int, device: torch.device) -> Batches:
    """Batches of characters."""
    generator = torch.Generator().manual_seed(seed)
    return [batch(generator, device) for _ in range(count)]


def loss_of(model: Model, precision: str, given: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch, in float32."""
    tokens, following = given
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision != "float32"):
        logits = model(tokens)
    return torchkiln.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def train(model: Model, precision: str, batches: Batches) -> tuple[Row, Marks]:
    """Trains with AdamW, whose rate falls to 0; returns the losses, and parameters on the way."""
    steps, device = len(batches), batches[0][0].device
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    marks, losses = [(0, copied(model))], []
    synchronize(device)
    begin = time.perf_counter()
    for step, given in enumerate(batches, 1):
        loss = loss_of(model, precision, given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.detach())
        if step % (steps // LOOKS) == 0:
            marks.append((step, copied(model)))
    synchronize(device)
    seconds = time.perf_counter() - begin
    return {"losses": torch.stack(losses).tolist(), "seconds": seconds}, marks


@torch.no_grad()
def final(model: Model, precision: str, batches: Batches) -> float:
    """The mean loss of batches."""
    return torch.stack([loss_of(model, precision, given) for given in batches]).mean().item()


def gradients(precision: str, state: State, given: tuple[Tensor, Tensor]) -> State:
    """The gradients of the parameters in float64."""
    model = model_of(precision, state, given[0].device)
    loss_of(model, precision, given).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def cosines(state: State, given: tuple[Tensor, Tensor]) -> dict[str, Row]:
    """The cosines between the gradients in half precision or FP8 and those in float32."""
    truth, *others = (gradients(precision, state, given) for precision in PRECISIONS)
    return {
        precision: {
            name: F.cosine_similarity(found[name].flatten(), exact.flatten(), 0).item()
            for name, exact in truth.items()
        }
        for precision, found in zip(PRECISIONS[1:], others, strict=True)
    }


def measured(steps: int, seeds: int, device: torch.device) -> Row:
    """The trainings of all seeds and precisions."""
    held_out = drawn(1000, min(HELD_OUT, steps), device)
    runs: list[Row] = []
    looks: list[Row] = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        start, batches = copied(Model(True)), drawn(seed, steps, device)
        for precision in PRECISIONS:
            model = model_of(precision, start, device)
            run, marks = train(model, precision, batches)
            loss = final(model, precision, held_out)
            runs.append({"precision": precision, "seed": seed, "final": loss, **run})
            print(f"seed {seed}, {precision}: loss {loss:.4f}, {run['seconds']:.1f} s", flush=True)
            if precision == "float32":
                for step, state in marks:
                    looks.append({"seed": seed, "step": step} | cosines(state, held_out[0]))
    return {"steps": steps, "seeds": seeds, "runs": runs, "gradients": looks}


def lowest(looks: Sequence[Row], precision: str) -> dict[str, float]:
    """The lowest cosine of each parameter."""
    found = [look[precision] for look in looks]
    return {name: min(one[name] for one in found) for name in found[0]}


def summary(found: Row) -> Row:
    """The mean final losses, that of FP8 beside that of bfloat16, and the lowest cosines."""
    losses = {
        precision: statistics.mean(r["final"] for r in found["runs"] if r["precision"] == precision)
        for precision in PRECISIONS
    }
    least = {p: lowest(found["gradients"], p) for p in PRECISIONS[1:]}
    return {
        "final": losses,
        "fp8_by_bfloat16": losses["fp8"] / losses["bfloat16"],
        "lowest_cosine": {p: min((c, name) for name, c in of.items()) for p, of in least.items()},
    }


def smooth(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Steps, and the means of the losses before them."""
    size = min(SMOOTHED, len(losses) // 2)
    ends = range(size, len(losses) + 1, size)
    return list(ends), [statistics.mean(losses[end - size : end]) for end in ends]


def draw(found: Row, path: Path) -> None:
    """Draws the losses of all runs, and how far the gradient of each weight turns at most."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an optional package

    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    curves, layers = figure.subplots(1, 2)
    for run in found["runs"]:
        label = run["precision"] if run["seed"] == 0 else None
        style: dict[str, Any] = {"color": SHADES[run["precision"]], "linewidth": 1, "alpha": 0.8}
        curves.plot(*smooth(run["losses"]), label=label, **style)
    curves.set_title(f"training loss, seeds: {found['seeds']}", fontsize=9)
    curves.set_xlabel("step", fontsize=8)
    curves.legend(fontsize=8)
    for precision in PRECISIONS[1:]:
        turned = {n: 1 - c for n, c in lowest(found["gradients"], precision).items()}
        names = [name for name in turned if not name.endswith("norm.weight")]
        layers.plot(
            [max(turned[name], 1e-9) for name in names],
            [name.removesuffix(".weight") for name in names],
            "o",
            color=SHADES[precision],
            markersize=4,
        )
    layers.set_xscale("log")
    layers.invert_yaxis()
    layers.set_title("1 - cosine with the gradient in float32, the largest", fontsize=9)
    for axes in (curves, layers):
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=DPI)


def main(words: Sequence[str] | None = None) -> Row:
    """Trains, prints a summary, and writes the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="", help="cuda, if there is one")
    parser.add_argument("--commit", default="", help="needed outside of a checkout")
    parser.add_argument("--tiny", action="store_true", help="few steps, for a test")
    parser.add_argument("--out", type=Path, help="a file for the results, JSON")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(words)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = measured(LOOKS if given.tiny else STEPS, 1 if given.tiny else SEEDS, device)
    facts = asdict(environment(device))
    facts["commit"] = given.commit or facts["commit"]
    found = {"environment": facts, "summary": summary(found), **found}
    print(json.dumps(found["summary"], indent=1))
    if given.out:
        given.out.write_text(json.dumps(found), encoding="utf-8")
    if given.picture:
        draw(found, given.picture)
    return found


if __name__ == "__main__":
    main()
