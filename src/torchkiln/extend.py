"""Functions for packages that define ops, such as the packages that ``torchkiln new`` writes."""

from torchkiln._deprecated import Renamed
from torchkiln._loader import require_torch
from torchkiln.ops.eager import eager

__all__ = ["Renamed", "eager", "require_torch"]
