"""Writes the package that with_exported runs: python export_model.py FILE.pt2.

The package calls the C functions of the operators.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.ops.matmul import matmul
from torchkiln.ops.spmm import spmm_csr

ACTIVATIONS = (
    *("square", "relu", "relu2", "gelu", "gelu_tanh", "quick_gelu"),
    *("silu", "sigmoid", "tanh"),
)


class Model(nn.Module):
    """Calls each operator once, in the order of the list in with_exported.cpp."""

    def forward(
        self,
        x: Tensor,
        matrix: Tensor,
        weight: Tensor,
        bias: Tensor,
        target: Tensor,
        values: Tensor,
        crow: Tensor,
        col: Tensor,
    ) -> tuple[Tensor, ...]:
        """The results of every op, as one tuple."""
        return (
            torchkiln.add(x, bias),
            torchkiln.muladd(x, weight, bias),
            *(getattr(torchkiln, name)(x) for name in ACTIVATIONS),
            torchkiln.bias_act(x, bias, scale=0.5, act="gelu"),
            torchkiln.swiglu(x, x),
            torchkiln.geglu(x, x),
            torchkiln.geglu(x, x, "tanh"),
            torchkiln.dropout_add(x, x, 0.5, training=False),
            torchkiln.bias_dropout_add(x, bias, x, 0.5, training=False),
            torchkiln.sum(x, 0),
            torchkiln.mean(x, 1),
            torchkiln.layer_norm(x, (33,), weight, bias),
            torchkiln.rms_norm(x, (33,), weight),
            *torchkiln.add_layer_norm(x, x, (33,), weight, bias),
            *torchkiln.add_rms_norm(x, x, (33,), weight),
            torchkiln.softmax(x, 1),
            torchkiln.log_softmax(x, 1),
            torchkiln.cross_entropy(x, target),
            spmm_csr(values, x.t().contiguous(), crow=crow, col=col),
            matmul(x, matrix),
            torchkiln.linear(x, matrix, bias, act="relu"),
        )


with torch.no_grad():
    rows = torch.export.Dim("rows", min=2, max=4096)
    row = torch.randn(33)
    places = torch.arange(33)
    program = torch.export.export(
        Model(),
        (
            *(torch.randn(17, 33), torch.randn(33, 33), row, row.clone()),
            *(places[:17], row.clone(), torch.arange(34), places),
        ),
        dynamic_shapes=({0: rows}, None, None, None, {0: rows}, None, None, None),
    )
    torch._inductor.aoti_compile_and_package(
        program, package_path=sys.argv[1], inductor_configs=torchkiln.aoti_options()
    )
