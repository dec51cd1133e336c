"""Names of the ops by family, without torch: for ``--help``, and for the doctor."""

from __future__ import annotations

import ast
from pathlib import Path

ALIASES = {"spmm": "spmm_csr"}
"""Functions without a spec of their own: ``spmm`` calls ``spmm_csr`` with the parts of a matrix."""

QUANTISING = ("quantize", "quantize_both", "quantize_weight", "transpose_quantized", "dequantize")
"""Functions between floating point and E4M3; tests/ops/test_quantize.py compares their bits."""

PRODUCERS = (
    *("layer_norm_fp8", "rms_norm_fp8", "add_layer_norm_fp8", "add_rms_norm_fp8"),
    *("swiglu_fp8", "geglu_fp8", "gated_linear_fp8"),
)
"""Ops with a result in E4M3; tests/ops/test_fp8_norms.py and test_fp8_gates.py compare them with
the op of the plain result and :data:`QUANTISING`."""

OTHER_FUNCTIONS = {"addcmul", "conv_bn_act", "csr_transpose", *QUANTISING, *PRODUCERS, *ALIASES}
"""Public functions that are not ops with a spec."""

UNLISTED = {"gated": ("geglu_tanh",), "matmul": ("matmul",), "spmm": ("spmm_csr",)}
"""Ops by family that exist only in torch.ops and C++; public functions call them."""


def families(file: Path) -> dict[str, tuple[str, ...]]:
    """The ops that the package imports, by module of ``torchkiln.ops``, without in-place ops."""
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchkiln.ops."):
            family = str(node.module).removeprefix("torchkiln.ops.")
            names = [n.name for n in node.names if n.name.islower() and not n.name.endswith("_")]
            names += UNLISTED.get(family, ())
            found[family] = tuple(name for name in names if name not in OTHER_FUNCTIONS)
    return {family: ops for family, ops in found.items() if ops}


FAMILIES = families(Path(__file__).parents[1] / "__init__.py")
"""Ops by family. A test compares them with the specs of :mod:`torchkiln.testing`."""

OPS = tuple(name for ops in FAMILIES.values() for name in ops)
