"""Operators for PyTorch, each one pass over memory, on CPU and CUDA."""

from __future__ import annotations

from typing import Any

from torchkiln import _loader

_package = _loader.find_package(__path__)
_record = _loader.check(_package)

import torch as _torch  # noqa: E402, F401  brings the libraries that _C is linked to

from torchkiln import nn  # noqa: E402
from torchkiln.bias_act import scale_bias_relu  # noqa: E402
from torchkiln.pointwise import add  # noqa: E402
from torchkiln.reduction import mean, sum  # noqa: E402

__version__: str = _record["version"]

cmake_prefix_path = str(_package / "share" / "cmake")
"""Where CMake finds the package: -DCMAKE_PREFIX_PATH=$(python -c "import torchkiln; ...")."""


def build_info() -> dict[str, Any]:
    """What this build was compiled with and for: torch, CUDA, GPU architectures, compiler, ..."""
    return dict(_record)


__all__ = [
    "__version__",
    "add",
    "build_info",
    "cmake_prefix_path",
    "mean",
    "nn",
    "scale_bias_relu",
    "sum",
]
