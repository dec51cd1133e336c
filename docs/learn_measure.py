"""Checks every step of docs/learn against float64 on a GPU, then measures all of them in one run.

A topic's steps and its ceiling take turns: a copy that moves as many bytes, or torch.mm.
`--json docs/learn/results.json` is what `nox -s figures` writes into the pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from learn_steps import SOLUTIONS, TOPICS, Step, Topic, require_right
from torch import Tensor

from torchkiln.bench.clock import Times, device_clock, in_turns
from torchkiln.bench.report import duration
from torchkiln.cli.options import json_lines
from torchkiln.testing.environment import environment

SECONDS = 3.0
"""Time for a topic, after five measurements of each call."""
ROUNDS = 50


def check(device: str) -> tuple[int, dict[str, str]]:
    """The number of right results; by file and idea, the reasons why steps are not measured."""
    count, reasons = 0, {}
    for topic in (*TOPICS, *SOLUTIONS):
        for step in topic.steps:
            sizes = (*topic.sizes, *step.sizes, *((topic.large,) if topic.large else ()))
            try:
                for size in sizes:
                    for dtype in topic.dtypes[:1] if size == topic.large else topic.dtypes:
                        require_right(topic, step, size, dtype, device)
                        count += 1
            except (AssertionError, RuntimeError) as error:
                reasons[key(step)] = str(error).splitlines()[0]
    return count, reasons


def key(step: Step) -> str:
    """A name of a step that no other has."""
    return f"{step.file} {step.idea}".strip()


def ceiling(topic: Topic, inputs: tuple[Any, ...], device: str) -> tuple[str, Callable[[], object]]:
    """The name of a topic's ceiling, and a call of it."""
    if topic.moved is None:
        return "torch.mm", partial(torch.mm, inputs[0], inputs[1].T)
    half = topic.moved(topic.large) // 2
    source, target = (torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2))
    return "copy", partial(Tensor.copy_, target, source)


def measure(topic: Topic, wrong: Collection[str], device: str) -> list[dict[str, Any]]:
    """The times of a topic without its wrong steps, those of the ceiling first."""
    inputs = topic.inputs(topic.large, topic.dtypes[0], device)
    name, best = ceiling(topic, inputs, device)
    steps = [step for step in topic.steps if key(step) not in wrong]
    calls = {name: best} | {step.idea: partial(step.run, *inputs) for step in steps}
    found = in_turns(device_clock(torch.device(device)), calls, SECONDS, ROUNDS)
    return [
        {"topic": topic.name, "call": call, **dataclasses.asdict(Times.of(values))}
        for call, values in found.items()
    ]


def main() -> int:
    """Checks, measures, prints and writes; 1 if a step is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to a file")
    parser.add_argument("--check", action="store_true", help="check only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("learn_measure: got no GPU, expected one of compute capability 9.0")
    torch.manual_seed(0)
    begin = time.perf_counter()
    with torch.no_grad():
        count, wrong = check("cuda")
        print(f"{count} results are right, {time.perf_counter() - begin:.0f} s")
        for name, reason in wrong.items():
            print(f"not measured: {name}: {reason}", file=sys.stderr)
        if options.check:
            return bool(wrong)
        topics = [measure(topic, wrong, "cuda") for topic in TOPICS]
    here = environment(torch.device("cuda"))
    machine = str(dataclasses.replace(here, commit=None))
    for best, *steps in topics:
        print(f"{best['topic']}: {best['call']} {duration(best['seconds'])}")
        for step in steps:
            share = best["seconds"] / step["seconds"]
            print(f"  {duration(step['seconds']):>10} {share:7.1%}  {step['call']}")
    print(f"{time.perf_counter() - begin:.0f} s, {machine}")
    if options.json:
        found = {"machine": machine, "commit": here.commit, "rows": list(itertools.chain(*topics))}
        options.json.write_text(json_lines(found), encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
