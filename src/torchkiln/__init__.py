"""Fused operators for PyTorch on CPU and CUDA."""

from __future__ import annotations

import importlib
from copy import deepcopy
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from torchkiln import _loader

_package = _loader.find_package(__path__)
_record = _loader.check(_package)
_folder = _loader.module_folder(_package, _record)
__path__.append(str(_folder))  # the folder that contains _C

import torch as _torch  # noqa: E402, F401  loads the libraries that _C is linked to

_loader.load(_package, _folder)

from torchkiln import nn  # noqa: E402
from torchkiln.aoti import aoti_options  # noqa: E402
from torchkiln.ops import _flops, _messages, _on_import, _over_logits, _sharding  # noqa: E402
from torchkiln.ops.activation import (  # noqa: E402
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    relu2,
    relu_,
    sigmoid,
    sigmoid_,
    silu,
    silu_,
    square,
    square_,
    tanh,
    tanh_,
)
from torchkiln.ops.batch_norm import bn_act  # noqa: E402
from torchkiln.ops.bias_act import bias_act  # noqa: E402
from torchkiln.ops.convolution import conv_bn_act  # noqa: E402
from torchkiln.ops.cross_entropy import (  # noqa: E402
    CrossEntropyOutput,
    cross_entropy,
    linear_cross_entropy,
    linear_kl,
    linear_logprob,
    logprob,
)
from torchkiln.ops.dropout import bias_dropout_add, dropout_add  # noqa: E402
from torchkiln.ops.gated import geglu, swiglu  # noqa: E402
from torchkiln.ops.gated_norm import gated_rms_norm  # noqa: E402
from torchkiln.ops.group_norm import group_norm  # noqa: E402
from torchkiln.ops.matmul import gated_mlp, linear, mlp  # noqa: E402
from torchkiln.ops.norm import (  # noqa: E402
    add_layer_norm,
    add_layer_norm_,
    add_layer_norm_fp8,
    add_rms_norm,
    add_rms_norm_,
    add_rms_norm_fp8,
    layer_norm,
    layer_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from torchkiln.ops.pointwise import add, addcmul, muladd  # noqa: E402
from torchkiln.ops.quantize import (  # noqa: E402
    Quantized,
    QuantizedWeight,
    dequantize,
    gated_linear_fp8,
    geglu_fp8,
    linear_fp8,
    quantize,
    quantize_both,
    quantize_weight,
    swiglu_fp8,
    transpose_quantized,
)
from torchkiln.ops.reduction import mean, sum  # noqa: E402
from torchkiln.ops.rope import qkv_norm_rope, rope  # noqa: E402
from torchkiln.ops.softmax import log_softmax, softmax  # noqa: E402
from torchkiln.ops.spmm import csr_transpose, spmm  # noqa: E402
from torchkiln.patch import fuse, replace, replaced  # noqa: E402
from torchkiln.trace import explain  # noqa: E402

_on_import.when_imported(_flops.MODULE, _flops.register_flops)
_on_import.when_imported(_sharding.MODULE, _sharding.register_rules)
_on_import.when_imported(_messages.MODULE, _messages.shorten_messages)
_on_import.when_imported(_over_logits.CACHE, _over_logits.key_by_donations)
_on_import.when_imported(_over_logits.LOWERINGS, _over_logits.lower_backward)

__version__: str = _record["version"]

cmake_prefix_path = str(_package / "share" / "cmake")
"""Folder of the CMake package, for ``-DCMAKE_PREFIX_PATH=``."""


def build_info() -> BuildInfo:
    """Returns the versions of the build: torch, CUDA, GPU architectures, compiler and others."""
    return cast("BuildInfo", deepcopy(_record))


def include_path() -> str:
    """Returns the folder of the headers, as ``torch.utils.cpp_extension.include_paths`` does."""
    return str(_package / "include")


if TYPE_CHECKING:
    from torchkiln import bench as bench
    from torchkiln import distributed as distributed
    from torchkiln import extend as extend
    from torchkiln import hub as hub
    from torchkiln import jit as jit
    from torchkiln import judge as judge
    from torchkiln import patch as patch
    from torchkiln import profile as profile
    from torchkiln import testing as testing
    from torchkiln import trace as trace
    from torchkiln import typing as typing
    from torchkiln.typing import BuildInfo

SUBMODULES = frozenset(
    {
        "bench",
        "distributed",
        "extend",
        "hub",
        "jit",
        "judge",
        "patch",
        "profile",
        "testing",
        "trace",
        "typing",
    }
)
"""Public submodules, imported at their first use. Other submodules may change at any time."""


def __getattr__(name: str) -> Any:
    if name not in SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"torchkiln.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *SUBMODULES})


__all__ = [
    "CrossEntropyOutput",
    "Quantized",
    "QuantizedWeight",
    "__version__",
    "add",
    "add_layer_norm",
    "add_layer_norm_",
    "add_layer_norm_fp8",
    "add_rms_norm",
    "add_rms_norm_",
    "add_rms_norm_fp8",
    "addcmul",
    "aoti_options",
    "bias_act",
    "bias_dropout_add",
    "bn_act",
    "build_info",
    "cmake_prefix_path",
    "conv_bn_act",
    "cross_entropy",
    "csr_transpose",
    "dequantize",
    "dropout_add",
    "explain",
    "fuse",
    "gated_linear_fp8",
    "gated_mlp",
    "gated_rms_norm",
    "geglu",
    "geglu_fp8",
    "gelu",
    "gelu_tanh",
    "group_norm",
    "include_path",
    "layer_norm",
    "layer_norm_fp8",
    "linear",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_kl",
    "linear_logprob",
    "log_softmax",
    "logprob",
    "mean",
    "mlp",
    "muladd",
    "nn",
    "qkv_norm_rope",
    "quantize",
    "quantize_both",
    "quantize_weight",
    "quick_gelu",
    "relu",
    "relu2",
    "relu_",
    "replace",
    "replaced",
    "rms_norm",
    "rms_norm_fp8",
    "rope",
    "sigmoid",
    "sigmoid_",
    "silu",
    "silu_",
    "softmax",
    "spmm",
    "square",
    "square_",
    "sum",
    "swiglu",
    "swiglu_fp8",
    "tanh",
    "tanh_",
    "transpose_quantized",
]

for _name in __all__:
    _public = globals()[_name]
    if isinstance(_public, FunctionType | type):
        # the path that pickles store, for example of a model's activation
        _public.__module__ = __name__
