"""Helpers of tests that give faulty ops to the checks of the contract."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchkiln import testing
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.specs.pointwise import ADD

Op = Callable[..., Any]
# Check, faulty op, dtype, and the expected message.
Row = tuple[str, Op, torch.dtype, str]


def title(row: Row) -> str:
    return f"{row[0]}-{row[3]}"


def show(row: Row, device: torch.device, good: testing.OpSpec = ADD) -> None:
    """Assert that the check fails for the faulty op, with the expected message."""
    name, op, dtype, words = row
    case = testing.Case(dataclasses.replace(good, op=op), CHECKS[name], device, dtype)
    with pytest.raises(Exception, match=re.compile(words, re.DOTALL)) as caught:
        case.run()
    assert not isinstance(caught.value, testing.UnavailableError)
