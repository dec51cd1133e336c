"""Parts for packages with ops of their own, such as those that ``torchkiln new`` writes."""

from torchkiln._loader import require_torch
from torchkiln.ops.eager import eager

__all__ = ["eager", "require_torch"]
