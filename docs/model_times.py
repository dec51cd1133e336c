"""Training steps of whole models: times, memory and start-up, as lines of JSON.

    python docs/model_times.py models --rows llama,qwen3,gpt2 --within 470 --out models.jsonl
    python docs/model_times.py lengths    # 60 batches of random lengths, with the start-up
    python docs/model_times.py small      # host times of small batches, and CUDA graphs

Each line is measured in a process of its own, without a cache of compiled code; the next processes
import torch and transformers meanwhile. The column `attention` says whose masks the model has:
`library` those of transformers, `causal` those of `attn_implementation="torchkiln"`, which keep
causal attention causal under torch.compile. The columns `fp8` are replace(precision="fp8"), and own
blocks in FP8 in the row `blocks`; those of torchao have its FP8 in all linear layers but the head,
and torch.compile. Start-up is replace, torch.compile and two steps. With several GPUs, all lines of
one model are measured on the same GPU. --tiny is for a test on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

COLUMNS: dict[str, tuple[str, ...]] = {
    "models": (
        *("eager", "compile", "replace", "replace+compile", "head", "head recompute", "backend"),
        *("fp8", "fp8 head", "fp8 fused head", "torchao tensorwise", "torchao rowwise"),
    ),
    "lengths": ("eager", "replace", "compile", "compile dynamic", "compile mark_dynamic"),
    "small": ("host", "graphs", "reduce-overhead"),
}
"""The columns of each measurement."""
DEFAULT_ROWS = {
    "models": "llama,qwen3,gpt2,bert,vit,gemma3,olmo2,t5,whisper,swinv2,convnext,blocks",
    "lengths": "llama2layers",
    "small": "gpt2small,vits",
}
ATTENTION = ("causal", "library")
BATCHES = (1, 4)
AHEAD = 2
"""Processes that import while another one measures."""

Row = dict[str, Any]


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    """The lines to measure: those with causal attention of all models come first."""
    models, columns = given.rows.split(","), given.columns.split(",")
    variants: Sequence[Row]
    if given.task == "models":
        variants = [{"attention": name} for name in given.attention.split(",")]
    elif given.task == "lengths":
        variants = [{"attention": "causal"}]
    else:
        variants = [{"attention": "causal", "batch": batch} for batch in BATCHES]
    for variant, model, column in itertools.product(variants, models, columns):
        yield {"task": given.task, "model": model, "column": column, **variant}


def worker(row: Row) -> None:
    """Imports, waits for a line on stdin, measures and prints lines."""
    transformers = importlib.import_module("transformers")
    torch = importlib.import_module("torch")
    steps = importlib.import_module("timed_steps")
    testing = importlib.import_module("torchkiln.testing.environment")
    model = importlib.import_module("timed_models").MODELS[row["model"]]
    model.model_class()
    if not sys.stdin.readline():
        return
    torch.set_float32_matmul_precision("high")
    device = torch.device(row["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    facts = {**asdict(testing.environment(device)), "transformers": transformers.__version__}
    facts["commit"] = row.pop("commit") or facts["commit"]
    row["title"] = model.title
    try:
        for found in steps.MEASURES[row["task"]](row, device):
            print(json.dumps({**row, **found, "environment": facts}), flush=True)
    except Exception as error:
        words = str(error).strip().split("\n")[0]
        reason = words if isinstance(error, steps.Skip) else f"{type(error).__name__}: {words}"
        print(json.dumps({**row, "skipped": reason, "environment": facts}), flush=True)


def start(row: Row, gpu: int | None, folder: Path) -> subprocess.Popen[str]:
    """The process of a line, with caches of its own."""
    cache = tempfile.mkdtemp(dir=folder)
    places = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    if gpu is not None:
        places["CUDA_VISIBLE_DEVICES"] = str(gpu)
    return subprocess.Popen(
        [sys.executable, __file__, "worker", json.dumps(row)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **places},
    )


def outcome(row: Row, process: subprocess.Popen[str], seconds: float) -> list[Row]:
    """The lines that a process prints, or one with the reason why there is none."""
    if seconds <= 0:
        return [{**row, "skipped": "no time was left"}]
    try:
        text, _ = process.communicate("go\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        return [{**row, "skipped": "not done in the time that was left"}]
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return found or [{**row, "skipped": f"the process ended with {process.returncode}"}]


def measured(rows: Sequence[Row], gpu: int | None, end: float, folder: Path) -> Iterator[Row]:
    """The lines, one after the other, until ``end``."""
    waiting: deque[tuple[Row, subprocess.Popen[str]]] = deque()
    same: dict[str, str] = {}
    left = deque(rows)
    while left or waiting:
        while left and len(waiting) <= AHEAD:
            waiting.append((left[0], start(left.popleft(), gpu, folder)))
        row, process = waiting.popleft()
        try:
            if row["attention"] == "causal" and row["model"] in same:
                found = [{**row, "skipped": same[row["model"]]}]
            else:
                found = outcome(row, process, end - time.monotonic())
        finally:
            process.kill()
            process.wait()
        reason = str(found[0].get("skipped", ""))
        if reason.startswith("attention is the library's"):
            same[row["model"]] = reason
        yield from found


def main(words: list[str]) -> None:
    """Prints the lines, and appends them to a file."""
    if words[:1] == ["worker"]:
        worker(json.loads(words[1]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=COLUMNS)
    parser.add_argument("--rows", help="names of models, separated by commas")
    parser.add_argument("--columns", help="names of columns, separated by commas")
    parser.add_argument("--attention", default=",".join(ATTENTION))
    parser.add_argument("--within", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--gpus", type=int, default=0, help="one model on each at a time")
    parser.add_argument("--device", default="", help="cuda, if there is one")
    parser.add_argument("--commit", default="", help="needed outside of a checkout")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test")
    parser.add_argument("--out", type=Path, help="a file for the lines")
    given = parser.parse_args(words)
    given.rows = given.rows or DEFAULT_ROWS[given.task]
    given.columns = given.columns or ",".join(COLUMNS[given.task])
    end = time.monotonic() + given.within
    rows = [
        {**row, "tiny": given.tiny, "device": given.device, "commit": given.commit}
        for row in rows_of(given)
    ]
    models = list(dict.fromkeys(row["model"] for row in rows))
    lock = threading.Lock()

    def run(gpu: int, folder: Path) -> None:
        own = [row for row in rows if models.index(row["model"]) % max(given.gpus, 1) == gpu]
        for row in measured(own, gpu if given.gpus else None, end, folder):
            line = json.dumps(row)
            with lock:
                print(line, flush=True)
                if given.out:
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(f"{line}\n")

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(max(given.gpus, 1)) as pool,
    ):
        list(pool.map(run, range(max(given.gpus, 1)), itertools.repeat(Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1:])
