"""Writes the package that with_exported runs: python export_model.py FILE.pt2."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import torchkiln


class Model(nn.Module):
    """An operator of torchkiln between torch's."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Twice the norm."""
        return torchkiln.rms_norm(x, (33,), weight) * 2


with torch.no_grad():
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(
        Model(), (torch.randn(17, 33), torch.randn(33)), dynamic_shapes=({0: rows}, None)
    )
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
