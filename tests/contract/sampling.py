"""The part of the contract that one run of the suite covers; docs/contract.md has the rule.

A day's sample has every quick check of the ops. Slow and large checks run for one op in twelve, the
longest checks that trace for one op in four, in one dtype. Forms, such as an in-place op, have a
quarter of their quick checks. Checks whose code differs little between dtypes run in float32 and
one other. Of the values of a parameter that ``pytest.mark.rotates`` names, one in ``count`` runs.
Days rotate: twelve successive days run every case. ``--full`` runs all cases, ``--shard=I/N`` each
N-th test from the I-th on.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from torchkiln import testing
from torchkiln.testing.contract import CHECKS

DAYS = 12
QUARTER = 4
"""Period in days of quick checks of forms, and of checks that trace."""
TRACING = ("compile_aot_eager", "no_recompilation_storm", "opcheck", "opcheck_helpers")
"""Similar daily checks: checkpointed compiles each op, meta_and_fake calls it without data."""
IN_ONE_DTYPE = ("compile_aot_eager", "opcheck", "opcheck_helpers")
IN_SOME_DTYPES = ("gradient_strides",)
IN_SOME_DTYPES_ON_CPU = ("determinism", "gradient_strides", "meta_and_fake", "strides")
"""CPU kernels are one template for all dtypes; values and gradients are checked in every dtype."""
FORMS = tuple(form for spec in testing.SPECS for form in spec.forms)
ROTATES = "rotates(name, count): one in `count` values of a parameter runs a day"
REASONS = 12
"""Number of lines in the summary of skips."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options --full, --sample, --day and --shard."""
    add = parser.addoption
    add("--full", action="store_true", help="run every case of the contract")
    add("--sample", action="store_true", help="of the tests that -k selects, run the day's sample")
    add("--day", type=int, help="the day whose sample is run (default: today's number)")
    add("--shard", metavar="I/N", help="run each N-th test from the I-th on")


def choose_day(config: pytest.Config) -> None:
    """Set the day once, before xdist copies the options to its workers."""
    if config.option.day is None:
        config.option.day = dt.datetime.now(dt.UTC).date().toordinal()


def header(config: pytest.Config) -> str:
    """The line of pytest's header that says how to repeat the run."""
    if config.option.full:
        return "contract: every case"
    return f"contract: the sample of day {config.option.day} (--day), --full runs every case"


def period(case: testing.Case) -> int:
    """Number of days in which a case runs once."""
    if case.check.slow or case.check.large:
        return DAYS
    is_form = case.spec not in testing.SPECS
    return QUARTER if is_form or case.check.name in TRACING else 1


def in_sample(case: testing.Case, day: int) -> bool:
    """Whether a case belongs to the sample of a day."""
    specs = testing.SPECS if case.spec in testing.SPECS else FORMS
    # Large checks rotate among the ops that have a large sample.
    op = [s for s in specs if s.large or not case.check.large].index(case.spec)
    days = period(case)
    if (op + list(CHECKS).index(case.check.name) + day) % days:
        return False
    turn = op + day // days
    if days < DAYS and case.check.name in IN_ONE_DTYPE:
        dtypes = [dtype for dtype in case.check.dtypes if dtype in case.spec.dtypes]
        return case.dtype == dtypes[turn % len(dtypes)]
    some = IN_SOME_DTYPES_ON_CPU if case.device.type == "cpu" else IN_SOME_DTYPES
    if case.check.name in some and case.dtype != torch.float32:
        others = [dtype for dtype in case.check.dtypes if dtype != torch.float32]
        return case.dtype == others[turn % len(others)]
    return True


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests outside of the sample or shard; tests named on the command line all run."""
    named = any("::" in argument for argument in config.args)
    named |= bool(config.option.keyword) and not config.option.sample
    kept = items
    if not (config.option.full or named):
        day = config.option.day
        found = zip(kept, places(kept), strict=True)
        kept = [item for item, place in found if runs_today(item, place, day)]
    if config.option.shard:
        first, count = map(int, config.option.shard.split("/"))
        kept = kept[first - 1 :: count]
    if len(kept) < len(items):
        left = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = kept


def places(items: Sequence[pytest.Item]) -> Iterator[dict[str, int]]:
    """For each test, the index of each parameter's value among its values in the function.

    pytest's own indices count combinations of several parameters.
    """
    orders: dict[tuple[str, str], dict[int, int]] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        place = {}
        for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
            order = orders.setdefault((function, name), {})
            place[name] = order.setdefault(id(value), len(order))
        yield place


def runs_today(item: pytest.Item, place: Mapping[str, int], day: int) -> bool:
    """Whether a test is in the sample of a day; a test without a rule always is."""
    mark = item.get_closest_marker("rotates")
    if mark and place:
        name, count = mark.args
        others = sum(index for key, index in place.items() if key != name)
        return place[name] % count == (others + day) % count
    case = getattr(getattr(item, "callspec", None), "params", {}).get("contract_case")
    return case is None or case.spec not in (*testing.SPECS, *FORMS) or in_sample(case, day)


def skips(reporter: pytest.TerminalReporter) -> list[str]:
    """The skipped tests by reason, the most frequent first."""
    counts: Counter[str] = Counter()
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith("not for "):
            reason = "a check that the spec of the op excludes, with its reason there"
        counts[reason] += 1
    lines = [f"{count:6} skipped: {reason}" for reason, count in counts.most_common(REASONS)]
    if len(counts) > REASONS:
        rest = sum(count for _, count in counts.most_common()[REASONS:])
        lines.append(f"{rest:6} skipped for {len(counts) - REASONS} other reasons (-rs lists them)")
    return lines
