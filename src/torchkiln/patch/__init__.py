"""Forwards of torchkiln for the modules of a model: ``replace(model)``, ``fuse(model)``."""

from torchkiln.patch.fusing import fuse
from torchkiln.patch.replacing import replace, replaced
from torchkiln.patch.report import Report, Row

__all__ = ["Report", "Row", "fuse", "replace", "replaced"]
