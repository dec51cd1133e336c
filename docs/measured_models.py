"""Tables of whole models for README.md and docs/, from the rows in docs/results.

The rows are those that docs/parallel_steps.py and docs/model_times.py printed. docs/figures.py
writes the tables into the pages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from learn_drawings import BLUE, GREY, Drawing

RESULTS = Path(__file__).parent / "results"
ENGINES = {"one": "none", "ddp": "DDP", "fsdp": "FSDP2"} | {
    "tp": "tensor, sequence and loss parallel",
    "fsdp+tp": "FSDP2 x 2 of tensor parallel",
}
BATCH_NORMS = {
    "torch": "torch's `SyncBatchNorm`",
    "torchkiln": "converted by `SyncBatchNormAct`",
    "fuse": "`SyncBatchNorm` and `torchkiln.fuse`",
    "local": "local batch norms",
}

PARALLEL, BY_MODULES, FP8 = "h200_parallel.jsonl", "h200_modules.jsonl", "h200_fp8.jsonl"
STEPS, ZOO = "h200_models.jsonl", "h200_zoo.jsonl"
BACKEND = '`torch.compile(backend="torchkiln")`'
FORMS = {
    "eager": "eager",
    "compile": "`torch.compile`",
    "replace": "`replace`",
    "replace+compile": "`replace`, then `torch.compile`",
    "backend": BACKEND,
}
LLAMA = FORMS | {
    "head": "`replace(head=True)`",
    "head recompute": "`replace(head=True, recompute=True)`",
    "fp8": '`replace(precision="fp8")`',
    "fp8 head": '`replace(precision="fp8", head="fp8")`',
    "library": "`torch.compile` with the mask that transformers makes then",
}
"""Titles of the columns of docs/model_times.py."""
COLUMNS = {
    ("llama", "eager"): "eager, bfloat16",
    ("llama", "compile"): "`torch.compile`, bfloat16",
    ("llama", "replace"): "`replace(model)`",
    ("llama", "fp8"): '`replace(model, precision="fp8")`',
    ("llama", "fp8 head"): '`replace(model, precision="fp8", head="fp8")`',
    ("llama", "fp8 fused head"): '`replace(model, precision="fp8", head=True)`',
    ("llama", "torchao tensorwise"): "torchao's FP8 (tensorwise), `torch.compile`",
    ("llama", "torchao rowwise"): "torchao's FP8 (rowwise), `torch.compile`",
    ("blocks", "eager"): "`nn.TransformerBlock`, eager, bfloat16",
    ("blocks", "fp8"): '`nn.TransformerBlock(precision="fp8")`, eager',
    ("blocks", "fp8 head"): "the same, and the head in FP8",
}
"""Models and columns of docs/model_times.py."""
SHORT = [
    key
    for key in COLUMNS
    if key[0] == "llama" and key[1] not in ("fp8 fused head", "torchao rowwise")
]
"""Those of README.md."""
MODULES = {
    "torch": "torch",
    "torchkiln": "torchkiln",
    "blocks": "`nn.TransformerBlock`",
    "fp8": '`replace(model, precision="fp8")`',
}

Row = dict[str, Any]
Column = tuple[str, str]


def rows(file: str, **facts: Any) -> list[Row]:
    """The rows of a file with these facts."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    return [r for r in map(json.loads, text.splitlines()) if facts.items() <= r.items()]


def milliseconds(turns: list[Row]) -> float:
    """The mean of the turns' medians."""
    return statistics.mean(turn["seconds"] for turn in turns) * 1e3


def llama_line(engine: str, scaling: str, processes: int) -> str:
    """A line of the language model: times, their ratio, peaks."""
    facts = {"engine": engine, "scaling": scaling, "processes": processes}
    both = [rows(PARALLEL, task="llama", modules=name, **facts) for name in ("torch", "torchkiln")]
    times = [milliseconds(turns) for turns in both]
    peaks = [max(turn["peak_bytes"] for turn in turns) / 2**30 for turns in both]
    cells = [f"{time:.1f} ms, {peak:.1f} GiB" for time, peak in zip(times, peaks, strict=True)]
    words = (ENGINES[engine], str(processes), scaling if processes > 1 else "", *cells)
    return f"| {' | '.join(words)} | {times[0] / times[1]:.2f} |"


def resnet_line(kind: str) -> str:
    """A line of the ResNet-50: times on two and four GPUs."""
    facts: Row = {"task": "resnet", "batch norms": kind}
    two, four = (rows(PARALLEL, processes=n, **facts) for n in (2, 4))
    kinds = two, *([t for t in four if t["graph"] is graph] for graph in (False, True))
    cells = [" and ".join(f"{t['seconds'] * 1e3:.1f}" for t in turns) + " ms" for turns in kinds]
    layer = rows(PARALLEL, task="layer", **{"batch norms": kind})
    host = [min(t[f"{way}_seconds"] for t in layer) * 1e6 for way in ("forward", "backward")]
    cells.append(" + ".join(f"{microseconds:.0f}" for microseconds in host) + " us")
    return f"| {BATCH_NORMS[kind]} | {' | '.join(cells)} |"


def engines() -> Iterator[str]:
    """The language model on several GPUs."""
    yield "| parallelism | GPUs | scaling | torch | torchkiln | ratio |"
    yield "|---|---|---|---|---|---|"
    yield llama_line("one", "weak", 1)
    for engine in list(ENGINES)[1:]:
        for scaling in ("weak", "strong"):
            for processes in (2, 4):
                yield llama_line(engine, scaling, processes)


def batch_norms() -> Iterator[str]:
    """The ResNet-50 on several GPUs."""
    yield "| batch norms | 2 GPUs, both turns | 4 GPUs | 4 GPUs, CUDA graph | host, a layer |"
    yield "|---|---|---|---|---|"
    yield from map(resnet_line, BATCH_NORMS)


def modules() -> Iterator[str]:
    """The language model on several GPUs by its modules."""
    yield "| run | parallelism | GPUs | modules | step | peak memory |"
    yield "|---|---|---|---|---:|---:|"
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows(BY_MODULES):
        commit, count = row["environment"]["commit"][:7], str(row["processes"])
        key = commit, ENGINES[row["engine"]], count, MODULES[row["modules"]]
        groups.setdefault(key, []).append(row)
    for words, turns in groups.items():
        peak = max(turn["peak_bytes"] for turn in turns) / 2**30
        yield f"| {' | '.join(words)} | {milliseconds(turns):.1f} ms | {peak:.1f} GiB |"


def steps(columns: Iterable[Column]) -> Iterator[tuple[str, Row, str, str]]:
    """Titles and rows of training steps in bfloat16 and in FP8, with step time and peak memory."""
    for model, column in columns:
        (row,) = rows(FP8, model=model, column=column)
        time, peak = f"{row['seconds'] * 1e3:.1f} ms", f"{row['peak_bytes'] / 2**30:.1f} GiB"
        yield COLUMNS[model, column], row, time, peak


def fp8(columns: Iterable[Column]) -> Iterator[str]:
    """A table of these steps."""
    yield "| | step | peak memory | start-up |"
    yield "|---|---:|---:|---:|"
    for title, row, time, peak in steps(columns):
        yield f"| {title} | {time} | {peak} | {row['start_seconds']:.1f} s |"


def picture() -> str:
    """The steps of the Llama as bars, an SVG for README.md."""
    found = list(steps(SHORT))
    drawing = Drawing("Training steps of 4 layers of Llama 3 8B on one H200", 28 * len(found) + 24)
    longest = max(row["seconds"] for _, row, _, _ in found)
    for index, (title, row, time, peak) in enumerate(found):
        y = 16 + 28 * index
        color = BLUE if "replace" in title else GREY
        drawing.words((294, y + 14), title.replace("`", ""), "end")
        drawing.rectangles([(304, y)], color, round(200 * row["seconds"] / longest), 20)
        drawing.words((514, y + 14), f"{time}, {peak}")
    return drawing.svg()


def median_and_peak(row: Row) -> str:
    """The cell of a step."""
    return f"{row['seconds'] * 1e3:.1f} ms, {row['peak_bytes'] / 2**30:.1f} GiB"


def llama() -> Iterator[str]:
    """The steps of the language model in one run, with start-up."""
    yield "| | median, ms | shortest, ms | peak, GiB | start-up, s |"
    yield "|---|---:|---:|---:|---:|"
    for column, title in LLAMA.items():
        is_library = column == "library"
        attention = "library" if is_library else "causal"
        name = "compile" if is_library else column
        for row in rows(STEPS, model="llama", column=name, attention=attention):
            times = [f"{row[name] * 1e3:.1f}" for name in ("seconds", "least")]
            cells = (*times, f"{row['peak_bytes'] / 2**30:.1f}", f"{row['start_seconds']:.1f}")
            yield f"| {title} | {' | '.join(cells)} |"


def models() -> Iterator[str]:
    """The steps of all models, by what replaces or compiles them.

    Models whose attention `replace` leaves alone have the lines of their library's attention.
    """
    yield f"| model, commit | {' | '.join(FORMS.values())} |"
    yield f"|---{'|---' * len(FORMS)}|"
    found = [row for row in rows(STEPS) if row["column"] in FORMS]
    for model in dict.fromkeys(row["model"] for row in found):
        lines = [row for row in found if row["model"] == model]
        routed = [row for row in lines if row["attention"] == "causal"]
        own = {row["column"]: row for row in routed or lines}
        (commit,) = {row["environment"]["commit"][:7] for row in own.values()}
        cells = [median_and_peak(own[name]) if name in own else "" for name in FORMS]
        yield f"| {own['eager']['title']}, {commit} | {' | '.join(cells)} |"


def zoo() -> Iterator[str]:
    """Models of images: how many times as fast ``replace(model, example=batch)`` makes them."""
    yield "| mode | batch | cells | times as fast, geometric mean | least | most |"
    yield "|---|---:|---:|---:|---:|---:|"
    gains: dict[tuple[str, str], list[float]] = {}
    for row in sorted(rows(ZOO), key=lambda row: (row["mode"], row["batch"])):
        for key in ((row["mode"], str(row["batch"])), ("all", "")):
            gains.setdefault(key, []).append(row["gain"])
    for (mode, batch), found in sorted(gains.items(), key=lambda one: one[0][0] == "all"):
        cells = (len(found), *map("{:.2f}".format, (statistics.geometric_mean(found), min(found))))
        yield f"| {mode} | {batch} | {' | '.join(map(str, cells))} | {max(found):.2f} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "engines": engines,
    "batch_norms": batch_norms,
    "modules": modules,
    "fp8": lambda: fp8(COLUMNS),
    "llama": lambda: fp8(SHORT),
    "steps": llama,
    "models": models,
    "zoo": zoo,
}


def table(name: str) -> str:
    """A table by its name in the page."""
    return "\n".join(TABLES[name]()) + "\n"
