"""A day's sample has every quick check of every op; twelve days have all cases."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sampling
import torch

from torchkiln import testing

CASES = [
    case
    for device in ("cpu", "cuda:0")
    for case in testing.cases(testing.SPECS, torch.device(device))
]
DAY = 739_900


def test_twelve_days_run_every_case() -> None:
    days = [{str(c) for c in CASES if sampling.in_sample(c, DAY + i)} for i in range(sampling.DAYS)]
    assert set().union(*days) == set(map(str, CASES))


def test_each_day_has_every_check_and_every_quick_check_of_each_op() -> None:
    for day in range(DAY, DAY + sampling.DAYS):
        found = [case for case in CASES if sampling.in_sample(case, day)]
        assert {case.check.name for case in found} == {case.check.name for case in CASES}
        quick = {(case.spec.name, case.check.name) for case in CASES if sampling.period(case) == 1}
        assert quick <= {(case.spec.name, case.check.name) for case in found}


def test_long_checks_run_for_three_or_four_ops_a_day() -> None:
    slow = [
        case
        for case in CASES
        if case.check.slow and case.device.type == "cpu" and case.spec in testing.SPECS
    ]
    counts = [
        sum(sampling.in_sample(case, day) for case in slow if case.check.name == "aot_inductor")
        for day in range(DAY, DAY + sampling.DAYS)
    ]
    assert min(counts) > 0
    assert max(counts) <= 4


def test_forms_and_checks_that_trace_take_a_quarter() -> None:
    quick = [case for case in CASES if sampling.period(case) == sampling.QUARTER]
    names = {(case.spec.name, case.check.name, case.device.type) for case in quick}
    assert names >= {("add", check, "cpu") for check in sampling.TRACING}
    found = [
        {
            (case.spec.name, case.check.name, case.device.type)
            for case in quick
            if sampling.in_sample(case, DAY + i)
        }
        for i in range(sampling.QUARTER)
    ]
    assert sum(map(len, found)) == len(set().union(*found)) == len(names)
    assert max(map(len, found)) < 1.2 * min(map(len, found))


def test_each_op_is_compiled_and_called_without_data_every_day() -> None:
    """These checks run daily for each op; similar ones that trace run for a quarter of the ops."""
    twins = {"checkpointed", "compile_policy", "export", "meta_and_fake"}
    for case in CASES:
        if case.spec in testing.SPECS and case.check.name in twins:
            assert sampling.period(case) == 1


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        ({}, True),
        ({"keyword": "opcheck"}, False),
        ({"keyword": "opcheck", "sample": True}, True),
        ({"full": True}, False),
    ],
)
def test_what_the_sample_is_taken_from(given: dict[str, Any], sampled: bool) -> None:
    """Tests selected by -k all run, unless --sample asks for those of the day."""
    options = {"keyword": "", "sample": False, "full": False, "day": DAY, "shard": None, **given}
    left: list[Any] = []

    def deselected(items: list[Any]) -> None:
        left.extend(items)

    hook = SimpleNamespace(pytest_deselected=deselected)
    config: Any = SimpleNamespace(option=SimpleNamespace(**options), args=["tests"], hook=hook)
    items: list[Any] = [
        SimpleNamespace(
            nodeid=f"test[{case}]",
            callspec=SimpleNamespace(params={"contract_case": case}),
            get_closest_marker=lambda _: None,
        )
        for case in CASES
    ]
    sampling.select(config, items)
    assert len(items) + len(left) == len(CASES)
    assert bool(left) == sampled


def test_a_parameter_that_rotates_has_each_value_in_turn() -> None:
    def item(number: int, letter: str) -> Any:
        mark = SimpleNamespace(args=("letter", 2))
        callspec = SimpleNamespace(params={"number": number, "letter": letter})
        name = f"test[{number}-{letter}]"
        return SimpleNamespace(callspec=callspec, get_closest_marker=lambda _: mark, nodeid=name)

    names = [(number, letter) for number in (7, 5) for letter in "ab"]
    items = [item(*name) for name in names]
    found = list(sampling.places(items))
    seen = [
        [n for n, i, p in zip(names, items, found, strict=True) if sampling.runs_today(i, p, day)]
        for day in (DAY, DAY + 1)
    ]
    assert seen == [[(7, "a"), (5, "b")], [(7, "b"), (5, "a")]]


@pytest.mark.rotates("letter", 2)
@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize("number", range(2))
def test_of_two_parameters(letter: str, number: int) -> None:
    """The cases of this function are counted by the next test."""
    assert letter in "ab"
    assert number < 2


def test_a_day_has_half_of_the_test_before(request: pytest.FixtureRequest) -> None:
    """The sample of this session has two of the function's four cases."""
    options = request.config.option
    if options.full or options.shard or options.keyword or "::" in str(request.config.args):
        pytest.skip("other tests were chosen than those of a day")
    name = test_of_two_parameters.__name__
    found = [item for item in request.session.items if item.name.startswith(name)]
    values = [item.callspec.params for item in found]  # type: ignore[attr-defined]
    assert len(found) == 2
    assert {one["letter"] for one in values} == {"a", "b"}
    assert {one["number"] for one in values} == {0, 1}


@pytest.mark.large
def test_a_large_test_keeps_others_from_the_memory() -> None:
    """Large tests of other workers wait for a file lock until this test has ended."""
    with Path(sampling.__file__).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
