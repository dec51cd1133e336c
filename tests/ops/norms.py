"""Specs, names and dtypes that the tests of norms share."""

from __future__ import annotations

import pytest

from torchkiln.testing.specs import FAMILIES

SPECS = FAMILIES["norm"]


def name(value: object) -> str:
    return str(getattr(value, "__name__", getattr(value, "name", value))).removeprefix("torch.")


every_op = pytest.mark.parametrize("spec", SPECS, ids=name)
