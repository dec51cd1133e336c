"""The operator OPNAME for PyTorch, on CPU and CUDA."""

import torchkiln as _torchkiln  # loads the libraries that _C is linked to

_torchkiln.require_torch(__file__)

from PACKAGE.ops import OPNAME  # noqa: E402

__all__ = ["OPNAME"]
