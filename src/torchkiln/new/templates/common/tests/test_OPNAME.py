"""The contract of the op. -k strides selects one check, -m "not slow" leaves out slow ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torchkiln.testing import Case, Plan, check_call, plans

from PACKAGE.spec import SPEC


@pytest.mark.contract([SPEC])
def test_contract(contract_case: Case) -> None:
    contract_case.run()


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(plans(SPEC))
def test_any_call(plan: Plan) -> None:
    check_call(SPEC, plan, torch.device("cpu"))
