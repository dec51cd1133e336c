"""Forwards of torchkiln for the modules of a model: ``replace(model)``, ``fuse(model)``."""

from torchkiln.patch.attention import _restore_attention as _restore_attention
from torchkiln.patch.fusing import fuse
from torchkiln.patch.plan import _restore as _restore
from torchkiln.patch.replacing import replace, replaced
from torchkiln.patch.report import Replacement, Report

__all__ = ["Replacement", "Report", "fuse", "replace", "replaced"]
