"""The operator OPNAME for PyTorch, on CPU and CUDA."""

import torchkiln as _torchkiln  # brings the libraries of _C

_torchkiln.require_torch(__file__)

from PACKAGE.OPNAME import OPNAME  # noqa: E402

__all__ = ["OPNAME"]
