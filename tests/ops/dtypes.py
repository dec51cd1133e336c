"""The dtypes that tests of ops share."""

from __future__ import annotations

import pytest
import torch

from torchkiln.testing.sample import FLOATING

__all__ = ["FLOATING", "HALF", "every_dtype", "name"]

HALF = (torch.float16, torch.bfloat16)


def name(value: object) -> str:
    """A short name of a parameter, for test ids."""
    return str(value).removeprefix("torch.")


every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=name)
