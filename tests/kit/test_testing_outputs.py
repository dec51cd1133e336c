"""The contract's checks detect faults of the second output of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testing_faults import Row, show, title
from torch import Tensor

from torchkiln.testing.specs.norm import ADD_RMS_NORM


def scaled_sum(x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    y, total = ADD_RMS_NORM.op(x, residual, *args, **kwargs)
    return y, total * 1.01


def sum_without_gradient(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    y, total = ADD_RMS_NORM.op(x, *args, **kwargs)
    return y, total.detach() + 0 * x


def sum_that_changes(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    y, total = ADD_RMS_NORM.op(x, *args, **kwargs)
    return y, total * (1 + 1e-7 * torch.rand(total.shape))


def one_of_two(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    y, _ = ADD_RMS_NORM.op(x, *args, **kwargs)
    return y


SECOND_OUTPUT: list[Row] = [
    ("values", scaled_sum, torch.float32, "output 1: .* elements are wrong"),
    ("values", one_of_two, torch.float32, "got 1 outputs, expected 2"),
    ("strides", scaled_sum, torch.float32, "output 1: .* elements are wrong"),
    ("vmap", scaled_sum, torch.float32, "output 1: .* elements are wrong"),
    ("func_jvp", scaled_sum, torch.float32, "output 1: .* elements are wrong"),
    ("func_grad", sum_without_gradient, torch.float32, "gradient of argument 0"),
    ("gradient_values", sum_without_gradient, torch.float32, "gradient of argument 0"),
    ("gradient_strides", sum_without_gradient, torch.float32, "gradient of argument 0"),
    ("gradcheck", sum_without_gradient, torch.float64, "Jacobian mismatch"),
    ("compile_aot_eager", sum_without_gradient, torch.float32, "gradient of argument 0"),
    ("determinism", sum_that_changes, torch.float32, "output 1: not bitwise equal"),
]


@pytest.mark.parametrize("row", SECOND_OUTPUT, ids=title)
def test_a_fault_of_the_second_output_is_found(row: Row) -> None:
    show(row, torch.device("cpu"), ADD_RMS_NORM)
