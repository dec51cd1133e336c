"""Dtypes of results under autocast on CUDA: with fake tensors, and on a GPU if there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchkiln

PAGE = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
SHAPE = 2, 4, 8

CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer_norm": lambda ops, x: ops.layer_norm(x, (8,)),
    "rms_norm": lambda ops, x: ops.rms_norm(x, (8,)),
    "group_norm": lambda ops, x: ops.group_norm(x, 2),
    "softmax": lambda ops, x: ops.softmax(x, -1),
    "log_softmax": lambda ops, x: ops.log_softmax(x, -1),
    "gelu": lambda ops, x: ops.gelu(x),
    "relu": lambda ops, x: ops.relu(x),
    "silu": lambda ops, x: ops.silu(x),
    "sigmoid": lambda ops, x: ops.sigmoid(x),
    "tanh": lambda ops, x: ops.tanh(x),
}


@contextmanager
def fake_autocast() -> Iterator[None]:
    """Autocast to bfloat16 on CUDA without a GPU, where ``torch.autocast`` would disable itself."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.cuda)])
def autocast(request: pytest.FixtureRequest) -> AbstractContextManager[Any]:
    """Autocast with fake tensors, and on a GPU."""
    if request.param == "fake":
        return fake_autocast()
    return torch.autocast("cuda", torch.bfloat16)


def listed() -> set[str]:
    """The ops in the row on CUDA's autocast in docs/differences.md."""
    (row,) = re.findall(r"^\| (.*) under autocast on CUDA \|", PAGE.read_text(), re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


def test_dtypes_that_differ_are_listed(autocast: AbstractContextManager[Any]) -> None:
    differ = set()
    with autocast:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.empty(SHAPE, dtype=dtype, device="cuda")
            differ |= {
                name for name, call in CALLS.items() if call(F, x).dtype != call(torchkiln, x).dtype
            }
    late = set() if torch.__version__.startswith("2.11.") else {"rms_norm"}
    assert differ == listed() - {"rms_norm"} | late


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(8),
        lambda: nn.RMSNorm(8),
        lambda: nn.Softmax(-1),
        lambda: nn.LogSoftmax(-1),
        nn.GELU,
    ],
)
def test_replaced_modules_keep_the_dtype(
    make: Callable[[], nn.Module], dtype: torch.dtype, autocast: AbstractContextManager[Any]
) -> None:
    module, twin = make(), make()
    assert torchkiln.replace(module).changed
    with autocast:
        x = torch.empty(SHAPE, dtype=dtype, device="cuda")
        for one in (module, twin):
            for name, parameter in one.named_parameters():
                setattr(one, name, nn.Parameter(x.new_empty(parameter.shape), requires_grad=False))
        assert module(x).dtype == twin(x).dtype
