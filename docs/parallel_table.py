"""The tables of whole models on several GPUs in docs/distributed.md, from docs/results.

    python docs/parallel_table.py            # prints them
    python docs/parallel_table.py --write    # writes them into the page

The rows are those that docs/parallel_steps.py printed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE, RESULTS = DOCS / "distributed.md", DOCS / "results" / "h200_parallel.jsonl"
BEGIN, END = "<!-- parallel -->\n\n", "\n<!-- /parallel -->"
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

Row = dict[str, Any]


def rows(task: str, **facts: Any) -> list[Row]:
    """The rows of a task with these facts."""
    found = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return [r for r in found if r["task"] == task and facts.items() <= r.items()]


def milliseconds(turns: list[Row]) -> float:
    """The mean of the turns' medians."""
    return statistics.mean(turn["seconds"] for turn in turns) * 1e3


def llama_line(engine: str, scaling: str, processes: int) -> str:
    """A line of the language model: times, their ratio, peaks."""
    facts = {"engine": engine, "scaling": scaling, "processes": processes}
    both = [rows("llama", modules=name, **facts) for name in ("torch", "torchkiln")]
    times = [milliseconds(turns) for turns in both]
    peaks = [max(turn["peak_bytes"] for turn in turns) / 2**30 for turns in both]
    cells = [f"{time:.1f} ms, {peak:.1f} GiB" for time, peak in zip(times, peaks, strict=True)]
    words = (ENGINES[engine], str(processes), scaling if processes > 1 else "", *cells)
    return f"| {' | '.join(words)} | {times[0] / times[1]:.2f} |"


def resnet_line(kind: str) -> str:
    """A line of the ResNet-50: times on two and four GPUs."""
    found = [rows("resnet", processes=n, **{"batch norms": kind}) for n in (2, 4)]
    cells = [
        " and ".join(f"{turn['seconds'] * 1e3:.1f}" for turn in turns) + " ms" for turns in found
    ]
    return f"| {BATCH_NORMS[kind]} | {' | '.join(cells)} |"


def lines() -> Iterator[str]:
    """Both tables."""
    yield "| parallelism | GPUs | scaling | torch | torchkiln | ratio |"
    yield "|---|---|---|---|---|---|"
    yield llama_line("one", "weak", 1)
    for engine in list(ENGINES)[1:]:
        for scaling in ("weak", "strong"):
            for processes in (2, 4):
                yield llama_line(engine, scaling, processes)
    yield ""
    yield "| batch norms | 2 GPUs, both turns | 4 GPUs, both turns |"
    yield "|---|---|---|"
    yield from map(resnet_line, BATCH_NORMS)


def section() -> str:
    """The tables between their markers."""
    return BEGIN + "\n".join(lines()) + "\n" + END


def main(words: list[str]) -> None:
    """Prints the tables, or writes them into the page."""
    if words == ["--write"]:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + section() + rest.partition(END)[2], encoding="utf-8")
    else:
        print(section())


if __name__ == "__main__":
    main(sys.argv[1:])
