"""Every check of every op's contract, one test each."""

from __future__ import annotations

import pytest

from torchkiln import testing


@pytest.mark.contract(testing.SPECS)
def test_contract(contract_case: testing.Case) -> None:
    contract_case.run()
