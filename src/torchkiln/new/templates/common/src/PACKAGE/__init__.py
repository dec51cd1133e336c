"""The operator OPNAME for PyTorch, on CPU and CUDA."""

from torchkiln import extend as _extend  # loads the libraries that _C is linked to

_extend.require_torch(__file__)

from PACKAGE.ops import OPNAME  # noqa: E402

__all__ = ["OPNAME"]
