"""All cases."""

from __future__ import annotations

from replace_zoo import layers, nets, norms, units
from replace_zoo.zoo import CASES

__all__ = ["CASES", "layers", "nets", "norms", "units"]
