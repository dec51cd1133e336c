"""Models compiled by AOTInductor call the C functions of ops."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

import torchkiln


class EveryKind(nn.Module):
    """Calls with lists, strings, dtypes and None as arguments, and with several results or none."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        """Results of all calls."""
        residual = x * 2
        changed = x + 1
        torchkiln.add_rms_norm_(changed, residual, (64,), weight)
        written = torch.empty_like(x)
        torchkiln.layer_norm(x, (64,), weight, None, 1e-3, out=written)
        heads, angles = changed.view(-1, 4, 16), weight.view(8, 8)[:4]
        return (
            *torchkiln.add_layer_norm(x, residual, (64,), weight, bias, offset=1.0),
            changed,
            residual,
            written,
            torchkiln.sum(x),
            torchkiln.sum(x, (0, 1), keepdim=True),
            torchkiln.mean(x, -1, dtype=torch.float64),
            torchkiln.softmax(x, 1, scale=0.5, dtype=torch.float64),
            torchkiln.bias_act(x, bias, scale=0.5, act="gelu"),
            torchkiln.rms_norm(x, (64,), round="input"),
            torchkiln.rope(heads, None, angles.cos(), angles.sin())[0],
            torchkiln.relu(x[:, ::2]),
        )


def test_c_functions_give_the_same_results(tmp_path: Path) -> None:
    x, weight, bias = torch.randn(8, 64), torch.randn(64), torch.randn(64)
    model = EveryKind()
    with torch.no_grad():
        rows = torch.export.Dim("rows", min=2, max=4096)
        program = torch.export.export(
            model, (x, weight, bias), dynamic_shapes=({0: rows}, None, None)
        )
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs=torchkiln.aoti_options(),
        )
        package = torch._inductor.aoti_load_package(path)
        for inputs in ((x, weight, bias), (torch.randn(33, 64), bias, weight)):
            for found, expected in zip(package(*inputs), model(*inputs), strict=True):
                torch.testing.assert_close(found, expected)
    (code,) = (
        archive.read(name).decode()
        for archive in (zipfile.ZipFile(path),)
        for name in archive.namelist()
        if name.endswith("wrapper.cpp")
    )
    assert "aoti_torch_cpu_add_layer_norm(" in code
    assert "aoti_torch_proxy_executor_call_function(" not in code


def test_every_op_without_gradients_has_a_c_function() -> None:
    """The ops without one are parts of backwards and of training, in-place forms, and a query."""
    options = torchkiln.aoti_options()
    found = {op.name() for op in options["aot_inductor.custom_ops_to_c_shims"]}
    all_ops = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("torchkiln::")
    }
    without = {name.partition("::")[2] for name in all_ops - found}
    in_place = {f"{name}_" for name in ("relu", "sigmoid", "silu", "square", "tanh")}
    parts = {"_linear_cross_entropy_forward", "_sync_bn_backward_sums", "_pixel_conv_gains"}
    parts |= {"_bn_act_pool", "_bn_act_pool_forward", "_sync_bn_act", "_changes"}
    assert {name for name in without if not name.endswith("_backward")} == in_place | parts
