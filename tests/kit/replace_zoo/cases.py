"""Imports every file of cases, so that ``CASES`` is complete."""

from __future__ import annotations

from replace_zoo import layers, nets, norms, units, wide
from replace_zoo.zoo import CASES

__all__ = ["CASES", "layers", "nets", "norms", "units", "wide"]
