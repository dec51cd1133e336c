"""torchkiln as a local kernel."""

from torchkiln.hub import layers

__all__ = ["layers"]
