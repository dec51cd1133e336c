"""The measurements of docs/model_times.py, each in a process of its own."""

from __future__ import annotations

import gc
import importlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from timed_models import MODELS, Blocks, loss_of
from torch import Tensor, nn

import torchkiln
from torchkiln.bench.clock import synchronize
from torchkiln.patch import Report
from torchkiln.patch.fp8 import STEP, heads_of

STEPS, WARM = 12, 2
LENGTHS, SHORTEST, LONGEST = 60, 64, 4096
LEAST_STAGE = 0.5
"""Seconds from which a stage of torch.compile is in a line."""

OPTIONS: dict[str, dict[str, Any]] = {
    "replace": {},
    "replace+compile": {},
    "head": {"head": True},
    "head recompute": {"head": True, "recompute": True},
    "fp8": {"precision": "fp8"},
    "fp8 head": {"precision": "fp8", "head": "fp8"},
    "fp8 fused head": {"precision": "fp8", "head": True},
}
"""The arguments of replace by column."""
RECIPES = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}
"""The recipes of torchao's training in FP8, under torch.compile, by column."""

Row = dict[str, Any]
Step = Callable[[], Tensor]


class Skip(Exception):  # noqa: N818  not an error
    """A line that is not measured, and why."""


def route_attention(model: nn.Module) -> None:
    """Keeps causal attention causal under torch.compile; Skip for a model without it."""
    report = torchkiln.replace(model, only=["attention"])
    if not report.changed:
        raise Skip(why_library(report))


def why_library(report: Report) -> str:
    """The reason why attention is not routed."""
    reasons = {row.reason for row in report.rows if row.kind == "attention" and row.reason}
    return f"attention is the library's: {', '.join(reasons) or 'it makes no masks'}"


def in_fp8(report: Report) -> int:
    """The number of layers in FP8; Skip without any, with the most frequent reason."""
    count = sum("fp8" in found.now for found in report.changed)
    if not count:
        reasons = Counter(found.reason for found in report.rows if "FP8" in found.reason)
        raise Skip(next((reason for reason, _ in reasons.most_common(1)), "no linear layers"))
    return count


def to_torchao(model: nn.Module, recipe: str) -> int:
    """Puts linear layers of torch into torchao's FP8, except heads; returns their number."""
    if isinstance(model, Blocks):
        raise Skip("the feed-forward layers of the blocks do not call their projections")
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise Skip("torchao is not installed") from error
    heads = heads_of(model)

    def gains(layer: nn.Module, _: str) -> bool:
        sizes = layer.get_parameter("weight").shape
        return layer not in heads and not any(size % STEP for size in sizes)

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, module_filter_fn=gains, config=config)
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


def prepared(model: nn.Module, row: Row) -> tuple[Callable[..., Any], dict[str, int]]:
    """What a step calls, and how many modules of each kind are replaced."""
    column, is_causal = row["column"], row["attention"] == "causal"
    counts: dict[str, int] = {}
    is_own = isinstance(model, Blocks)
    if column in OPTIONS and not (is_own and "precision" in OPTIONS[column]):
        report = torchkiln.replace(model, **OPTIONS[column], skip=[] if is_causal else "attention")
        counts = dict(Counter(found.kind for found in report.changed))
        if is_causal and "attention" not in counts:
            raise Skip(why_library(report))
        if OPTIONS[column].get("head") is True and "head" not in counts:
            raise Skip("no head is replaced")
        if "precision" in OPTIONS[column]:
            counts["fp8"] = in_fp8(report)
    elif column in RECIPES:
        counts["torchao"] = to_torchao(model, RECIPES[column])
    if is_causal and column not in OPTIONS and not is_own:
        route_attention(model)
    if column in RECIPES:
        return torch.compile(model), counts
    if column == "backend":
        return torch.compile(model, backend="torchkiln"), counts
    if "compile" in column:
        dynamic = True if column.endswith("dynamic") and "mark" not in column else None
        return torch.compile(model, dynamic=dynamic), counts
    return model, counts


def step_of(call: Callable[..., Any], model: nn.Module, given: dict[str, Tensor]) -> Step:
    """Forward and backward."""

    def step() -> Tensor:
        loss = loss_of(call(**given))
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seconds_of(step: Step, device: torch.device) -> float:
    """The time of a step: of the GPU where there is one."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


def reset_peak(device: torch.device) -> None:
    """Begins a new measurement of the most allocated memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """The most allocated bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def made(row: Row, device: torch.device) -> nn.Module:
    """The model of a row, on the device."""
    model = MODELS[row["model"]].build(device, tiny=row["tiny"], column=row["column"])
    synchronize(device)
    return model


def compiling() -> dict[str, float]:
    """The seconds of the stages of torch.compile; one stage contains others."""
    from torch._dynamo.utils import compilation_time_metrics  # noqa: PLC0415  after torch.compile

    total = {name: round(sum(found), 2) for name, found in compilation_time_metrics.items()}
    return {name: seconds for name, seconds in total.items() if seconds >= LEAST_STAGE}


def measure_model(row: Row, device: torch.device) -> Iterator[Row]:
    """Step time, memory and start-up of a whole model."""
    model = made(row, device)
    given = MODELS[row["model"]].inputs(device, tiny=row["tiny"])
    begin = time.perf_counter()
    call, counts = prepared(model, row)
    step = step_of(call, model, given)
    loss = step().item()
    for _ in range(WARM - 1):
        step()
    synchronize(device)
    start = time.perf_counter() - begin
    reset_peak(device)
    times = sorted(seconds_of(step, device) for _ in range(STEPS))
    yield {
        "seconds": statistics.median(times),
        "least": times[0],
        "most": times[-1],
        "steps": STEPS,
        "peak_bytes": peak(device),
        "start_seconds": start,
        "loss": loss,
        "replaced": counts,
        "compiling": compiling(),
    }


def measure_lengths(row: Row, device: torch.device) -> Iterator[Row]:
    """The seconds of each of the batches, beginning with replace and torch.compile."""
    model = made(row, device)
    drawn = random.Random(0)
    most = 32 if row["tiny"] else LONGEST
    least = min(SHORTEST, most // 2)
    count = 4 if row["tiny"] else LENGTHS
    lengths = [drawn.randint(least, most) for _ in range(count)]
    reset_peak(device)
    begin = time.perf_counter()
    call, counts = prepared(model, row)
    marks = [time.perf_counter() - begin]
    for length in lengths:
        given = MODELS[row["model"]].inputs(device, tiny=row["tiny"], batch=1, length=length)
        if "mark" in row["column"]:
            for x in given.values():
                torch._dynamo.mark_dynamic(x, 1)
        step_of(call, model, given)()
        synchronize(device)
        marks.append(time.perf_counter() - begin)
    from torch._dynamo.utils import counters  # noqa: PLC0415  after torch.compile

    yield {
        "seconds": marks[-1],
        "lengths": lengths,
        "finished": marks,
        "replaced": counts,
        "peak_bytes": peak(device),
        "graphs": counters["stats"]["unique_graphs"],
    }


class Loss(nn.Module):
    """A model as a function of tensors, as ``make_graphed_callables`` requires."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *given: Tensor) -> Tensor:
        """The loss."""
        return loss_of(self.model(**dict(zip(self.names, given, strict=True))))


def gradients(call: nn.Module, given: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the parameters, as copies."""
    call(*given).backward()
    found = [p.grad.clone() for p in call.parameters() if p.grad is not None]
    call.zero_grad(set_to_none=True)
    return found


def graphed(model: nn.Module, given: dict[str, Tensor]) -> tuple[nn.Module, float]:
    """Forward and backward as CUDA graphs, and the error of the gradients of another batch."""
    call, batch = Loss(model, tuple(given)), tuple(given.values())
    other = tuple(x.flip(-1) for x in batch)
    expected = gradients(call, other)
    made_call: Any = torch.cuda.make_graphed_callables(call, batch)
    pairs = zip(gradients(made_call, other), expected, strict=True)
    return made_call, max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs)


def times_in_turns(steps: dict[str, Step], device: torch.device) -> dict[str, Row]:
    """Host and wall seconds of steps; the shortest, because interruptions only add to them."""
    found: dict[str, Row] = {name: {"host": 1e9, "wall": 1e9} for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            for kind, count in (("host", 1), ("wall", 10)):
                synchronize(device)
                begin = time.perf_counter()
                for _ in range(count):
                    step()
                if kind == "wall":
                    synchronize(device)
                seconds = (time.perf_counter() - begin) / count
                found[name][kind] = min(found[name][kind], seconds)
    return found


def measure_small(row: Row, device: torch.device) -> Iterator[Row]:
    """Host and wall times of steps whose bound is the host."""
    given = MODELS[row["model"]].inputs(device, tiny=row["tiny"], batch=row["batch"])
    steps: dict[str, Step] = {}
    notes: Row = {}
    model = made(row, device)
    begin = time.perf_counter()
    if row["column"] == "graphs":
        if device.type != "cuda":
            raise Skip("CUDA graphs need a GPU")
        torchkiln.replace(model)
        call, notes["error"] = graphed(model, given)
        graph = partial(call, *given.values())
        steps["replace+graphs"] = step_of(lambda: {"loss": graph()}, model, {})
    elif row["column"] == "reduce-overhead":
        with suppress(Skip):  # a model without masks
            route_attention(model)
        compiled = torch.compile(model, mode="reduce-overhead")
        steps["reduce-overhead"] = step_of(compiled, model, given)
    else:
        replaced = made(row, device)
        torchkiln.replace(replaced)
        steps = {"eager": step_of(model, model, given)}
        steps["replace"] = step_of(replaced, replaced, given)
    losses = [step().item() for step in [*steps.values()] * WARM]
    synchronize(device)
    notes["start_seconds"] = time.perf_counter() - begin
    for (name, times), loss in zip(times_in_turns(steps, device).items(), losses, strict=False):
        yield {"column": name, "loss": loss, **notes, **times}


MEASURES = {"models": measure_model, "lengths": measure_lengths, "small": measure_small}
