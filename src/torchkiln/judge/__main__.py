"""``torchkiln judge``: is this kernel right, is it fast, and is it honest?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torchkiln.bench.plan import device_of
from torchkiln.cli.options import output_json, require_json, text_output
from torchkiln.cli.status import Status, refused
from torchkiln.judge.judging import hide_memory, judge, judge_folder
from torchkiln.judge.verdict import SCHEMA, Verdict, fast_p

WHERE = "torchkiln.judge"
RATIOS = (0.0, 1.0, 1.5, 2.0)


def table(verdicts: Sequence[Verdict]) -> str:
    """A row for each candidate, then the scores."""
    width = max((len(one.candidate) for one in verdicts), default=0)
    rows = []
    for one in verdicts:
        gain = f"{one.speedup:.2f} x" if one.speedup else ""
        words = "ACCEPTED" if one.accepted else "REFUSED"
        reason = ", ".join(one.tricks)
        if one.void:
            words, reason = "NOT JUDGED", one.void[0]
        rows.append(f"{one.candidate:<{width}}  {words:<10}  {gain:>8}  {reason}".rstrip())
    scores = ", ".join(f"fast_{p:g} = {fast_p(verdicts, p):.2f}" for p in RATIOS)
    return "\n".join([*rows, scores])


def status_of(verdicts: Iterable[Verdict]) -> Status:
    """The highest of the exit statuses."""
    return Status(max((one.status for one in verdicts), default=Status.WRONG_CALL))


def run(options: argparse.Namespace) -> int:
    """Judge; exit status 0 if right and honest, 1 if not, 2 if the problem cannot be judged."""
    try:
        require_json(WHERE, options.json)
        if (options.folder is None) == (options.candidate is None):
            raise ValueError(f"{WHERE}: got both or none of CANDIDATE and --folder, expected one")
        device = device_of(WHERE, options.device)
        hide_memory()
        chosen = partial(judge, device=device, compiled=not options.no_compile)
        verdicts = []
        with text_output(options.json):
            if options.folder is None:
                op = {"op": options.op, "specs": options.specs}
                verdicts.append(chosen(options.candidate, options.reference, **op))
                print(verdicts[0])
            else:
                verdicts += judge_folder(options.folder, chosen)
                print(table(verdicts))
        found = [one.as_dict() for one in verdicts]
        scores = {f"fast_{p:g}": fast_p(verdicts, p) for p in RATIOS}
        many: dict[str, Any] = {"schema": SCHEMA, "verdicts": found, "scores": scores}
        whole = found[0] if options.folder is None else many
        output_json(WHERE, options.json, json.dumps(whole, indent=1))
    except ValueError as error:
        return refused(error)
    return status_of(verdicts)
