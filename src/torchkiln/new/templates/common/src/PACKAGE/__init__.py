"""The operator OPNAME for PyTorch, on CPU and CUDA."""

import torchkiln as _torchkiln  # noqa: F401  checks torch, and brings the libraries of _C

from PACKAGE.OPNAME import OPNAME

__all__ = ["OPNAME"]
