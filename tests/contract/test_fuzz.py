"""Calls drawn by hypothesis: the same few in each run of the suite, many new ones in a fuzz run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchkiln import testing
from torchkiln.testing.fuzz import Layout, Plan, check_call, plans
from torchkiln.testing.specs.pointwise import ADD

FIXED = 25
CPU = torch.device("cpu")


def fuzz(spec: testing.OpSpec, device: torch.device, count: int, *, fixed: bool) -> None:
    """Try ``count`` drawn calls; with ``fixed`` they are the same in each run."""

    @settings(
        max_examples=count,
        derandomize=fixed,
        phases=[Phase.generate, *([] if fixed else [Phase.shrink])],
        database=None,
        deadline=None,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(spec))
    def any_call(plan: Plan) -> None:
        check_call(spec, plan, device)

    any_call()


@pytest.mark.parametrize("spec", testing.SPECS, ids=lambda spec: spec.name)
def test_any_call(spec: testing.OpSpec, pytestconfig: pytest.Config) -> None:
    device = torch.device(pytestconfig.getoption("--fuzz-device"))
    count = pytestconfig.getoption("--fuzz-cases")
    fuzz(spec, device, count, fixed=count == FIXED)


def wrong_where_rows_are_unaligned(a: Tensor, b: Tensor) -> Tensor:
    out = torch.add(a, b)
    return out + 1 if a.dim() == 2 and a.storage_offset() % 4 == 3 else out


def test_a_rare_fault_is_found() -> None:
    spec = dataclasses.replace(ADD, op=wrong_where_rows_are_unaligned)
    with pytest.raises(AssertionError, match="add: fuzz: sample 'Plan"):
        fuzz(spec, CPU, FIXED * 4, fixed=True)


@given(
    layout=st.builds(
        Layout,
        order=st.integers(-3, 3),
        gaps=st.tuples(st.integers(0, 2), st.integers(0, 5)),
        offset=st.integers(0, 17),
        expanded=st.none(),
    ),
    shape=st.lists(st.integers(0, 5), max_size=4),
)
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_layouts_keep_the_values(layout: Layout, shape: list[int]) -> None:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    placed = layout.place(values)
    assert torch.equal(placed.tensor, values)
    assert int(placed.buffer.isfinite().sum()) == values.numel()
