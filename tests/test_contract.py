"""Every clause of every op's contract, one item each."""

from __future__ import annotations

import pytest
import torch

from torchkiln import testing


def marks(case: testing.Case) -> list[pytest.MarkDecorator]:
    """What the case needs."""
    wanted = {
        "cuda": case.device.type == "cuda",
        "slow": case.check.slow,
        "large": case.check.large,
    }
    return [getattr(pytest.mark, name) for name, needed in wanted.items() if needed]


ITEMS = [
    pytest.param(case, id=str(case), marks=marks(case))
    for device in (torch.device("cpu"), torch.device("cuda:0"))
    for case in testing.cases(testing.SPECS, device)
]


@pytest.mark.parametrize("case", ITEMS)
def test_contract(case: testing.Case) -> None:
    try:
        case.run()
    except testing.UnavailableError as reason:
        pytest.skip(str(reason))
