"""Forwards of torchkiln for the modules of a model: ``torchkiln.replace(model)``."""

from torchkiln.patch.replacing import replace, replaced
from torchkiln.patch.report import Report, Row

__all__ = ["Report", "Row", "replace", "replaced"]
