"""The route of a call: signatures, tensor subclasses, modes, and errors of the arguments' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import torchkiln
from torchkiln import _C

OPS = [name for name in torchkiln.__all__ if hasattr(_C, name)]
COMPOSED = {"geglu", "gelu"}  # Python functions that choose between two ops


class Seen(TorchFunctionMode):
    """The names of the functions that were called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in OPS if name not in COMPOSED])
def test_an_op_has_the_arguments_of_its_schema(name: str) -> None:
    schema = getattr(torch.ops.torchkiln, name).default._schema
    parameters = inspect.signature(getattr(torchkiln, name)).parameters.values()
    assert [p.name for p in parameters] == [a.name for a in schema.arguments]
    keyword_only = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
    assert keyword_only == [a.kwarg_only for a in schema.arguments]


def test_an_op_is_introspected_as_written() -> None:
    function = torchkiln.rms_norm
    assert function.__module__ == "torchkiln.ops.norm"
    assert function.__qualname__ == "rms_norm"
    assert "offset: float = 0.0" in inspect.getsource(function)
    with pytest.raises(TypeError, match=r"rms_norm\(\) missing 1 required positional argument"):
        function(torch.ones(2))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("layer_norm", lambda x: torchkiln.layer_norm(x, 4)),
        ("rms_norm", lambda x: torchkiln.rms_norm(x, (4,), offset=1.0)),
        ("muladd", lambda x: torchkiln.muladd(x, 2, 0.5)),
        ("sum", lambda x: torchkiln.sum(x, 0, keepdim=True)),
        ("softmax", lambda x: torchkiln.softmax(x, -1, causal=True)),
        ("gelu", torchkiln.gelu),
    ],
)
def test_a_mode_sees_the_op(op: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, 4)
    with Seen() as seen:
        result = call(x)
    assert f"torchkiln.{op}.default" in seen.names
    torch.testing.assert_close(result, call(x), rtol=0, atol=0)


def test_errors_of_an_argument_itself_are_raised_as_they_are() -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError("of the argument")

        def __float__(self) -> float:
            raise ZeroDivisionError("of the argument")

    x, broken = torch.ones(2, 2), Broken()
    calls: list[Callable[[], Any]] = [
        lambda: torchkiln.softmax(x, broken),  # type: ignore[arg-type]
        lambda: torchkiln.sum(x, (0, broken)),  # type: ignore[arg-type]
        lambda: torchkiln.layer_norm(x, broken),  # type: ignore[arg-type]
        lambda: torchkiln.rms_norm(x, 2, eps=broken),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ZeroDivisionError, match="of the argument"):
            call()


def test_an_entry_counts_its_arguments() -> None:
    with pytest.raises(
        TypeError, match=r"torchkiln\.add: got 1 arguments, expected 2: add\(a, b\)"
    ):
        _C.add(torch.ones(2))


ONES = torch.ones(2, 4)
INTEGERS = torch.ones(2, 4, dtype=torch.int64)
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (torchkiln.swiglu, (ONES, ONES[:, :1])),
    (torchkiln.geglu, (ONES, ONES.double())),
    (torchkiln.geglu_tanh, (INTEGERS, INTEGERS)),
    (torchkiln.sum, (ONES.to(torch.complex64),)),
    (torchkiln.mean, (INTEGERS,)),
    (torchkiln.mean, (ONES.to(torch.complex64),)),
    (torchkiln.relu, (INTEGERS,)),
    (torchkiln.relu_, (INTEGERS,)),
    (torchkiln.gelu, (INTEGERS,)),
    (torchkiln.square, (ONES.to(torch.complex64),)),
    (torchkiln.matmul, (INTEGERS, INTEGERS.T)),
    (torchkiln.matmul, (ONES, ONES.T.double())),
    (torchkiln.add, (INTEGERS, INTEGERS)),
    (torchkiln.muladd, (INTEGERS, 2, True)),
    (torchkiln.muladd, (ONES, 2.0, ONES.to(torch.complex64))),
]


@pytest.mark.parametrize(("op", "args"), REFUSED)
def test_compiled_calls_refuse_what_eager_ones_refuse(
    op: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """With the same message, though ATen's ops would take the arguments."""
    with pytest.raises(RuntimeError) as eager:
        op(*args)
    torch.compiler.reset()
    with pytest.raises(RuntimeError) as compiled:
        torch.compile(op, fullgraph=True, backend="eager")(*args)
    assert str(eager.value).split("\n")[0] in str(compiled.value)
    with pytest.raises(RuntimeError) as broken:
        torch.compile(op, backend="eager")(*args)
    assert str(broken.value) == str(eager.value)
