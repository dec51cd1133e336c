"""Calls for the type checker only: mypy accepts those on pages, and refuses wrong values.

mypy also reports a comment that ignores an error where there is none.
"""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.typing import Activation, Gate, Kind, Reduction, Rounding, Saved

ACT: Activation = "gelu"
GATE: Gate = "silu"
ROUND: Rounding = "input"
SAVE: Saved = "none"
REDUCTION: Reduction = "sum"
KINDS: list[Kind] = ["norm", "glu"]


def accepted(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, model: nn.Module) -> None:
    """Calls as on the pages, which mypy accepts."""
    y: Tensor = torchkiln.rms_norm(x, (8,), weight, offset=1.0, round=ROUND)
    y = torchkiln.linear(y, weight, bias, act=ACT, scale=0.5, residual=x)
    y = torchkiln.bias_act(y, bias, scale=2.0, act="silu")
    y = torchkiln.mlp(y, weight, weight, act="relu2", save=SAVE)
    y = torchkiln.gated_mlp(y, weight, weight, act=GATE)
    loss: Tensor = torchkiln.cross_entropy(y, target, reduction=REDUCTION)
    output = torchkiln.linear_cross_entropy(y, weight, target, return_z_loss=True)
    loss, z_loss = output.loss, output.z_loss
    assert z_loss is not None
    layer = torchkiln.nn.Linear(8, 8, True, "cpu", torch.float32, act="gelu")
    loss = layer(input=loss)
    torchkiln.nn.TransformerEncoderLayer(64, 8, batch_first=True)
    assert_type(torchkiln.jit.elementwise("double(x) = x + x")(x), Tensor)
    assert_type(torchkiln.build_info()["cuda_architectures"], list[str])
    assert_type(torchkiln.bench.compare(torch.relu, torchkiln.relu, x), torchkiln.bench.Comparison)
    for row in torchkiln.bench.run("add", direction="forward").rows:
        assert_type(row, torchkiln.bench.Measurement)
    report = torchkiln.replace(model, only=KINDS, skip=["head"])
    ratio: float | None = report["norm"].error_ratio
    names: list[str] = list(report)
    with torchkiln.replaced(report.model, only="norm", exact=True) as inner:
        print(inner, ratio, names, torchkiln.jit.elementwise, torchkiln.hub.mapping)


def refused(x: Tensor, weight: Tensor, target: Tensor, model: nn.Module) -> None:
    """Calls with one wrong value or name each, which mypy refuses."""
    torchkiln.rms_norm(x, (8,), round="onec")  # type: ignore[arg-type]
    torchkiln.linear(x, weight, act="gellu")  # type: ignore[arg-type]
    torchkiln.linear(x, weight, None, "gelu")  # type: ignore[call-arg]
    torchkiln.mlp(x, weight, weight, save="all")  # type: ignore[arg-type]
    torchkiln.gated_mlp(x, weight, weight, act="tanh")  # type: ignore[arg-type]
    torchkiln.cross_entropy(x, target, reduction="average")  # type: ignore[call-overload]
    torchkiln.nn.BatchNormAct2d(8, act="gellu")  # type: ignore[arg-type]
    torchkiln.nn.TransformerEncoderLayer(64, 8, banana=1)  # type: ignore[call-arg]
    torchkiln.bench.run("add", direction="step")  # type: ignore[arg-type]
    torchkiln.replace(model, only=["nrm"])  # type: ignore[list-item]
    with torchkiln.replaced(model, dryrun=True):  # type: ignore[call-arg]
        pass
