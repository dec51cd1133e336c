"""How calls reach an op: signatures, tensor subclasses, modes, and errors of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import torchkiln
from torchkiln import _C
from torchkiln.ops.gated import geglu_tanh
from torchkiln.ops.matmul import matmul

OPS = [name for name in torchkiln.__all__ if hasattr(_C, name)]
COMPOSED = {
    "geglu",  # calls one of two ops
    *("dequantize", "linear_fp8", "transpose_quantized"),  # pass tensors of a named tuple
}
"""Python functions whose arguments differ from those of the ops that they call."""
BESIDE = {
    "add": ["alpha"],
    "cross_entropy": ["return_z_loss", "return_accuracy"],
    "linear_cross_entropy": ["return_z_loss", "return_accuracy"],
    "gated_mlp": ["precision"],
    "gelu": ["approximate"],
    "mlp": ["precision"],
    "qkv_norm_rope": ["cache"],
    "relu": ["inplace"],
    "layer_norm": ["out"],
    "rms_norm": ["out"],
    "silu": ["inplace"],
    "swiglu": ["out"],
}
"""Arguments of Python functions that are not in the op's schema."""


class Seen(TorchFunctionMode):
    """Records the names of called functions."""

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
    given = inspect.signature(getattr(torchkiln, name)).parameters.values()
    parameters = [p for p in given if p.name not in BESIDE.get(name, ())]
    assert len(given) - len(parameters) == len(BESIDE.get(name, ()))
    assert [p.name for p in parameters] == [a.name for a in schema.arguments]
    by_keyword = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    in_schema = [a.name for a in schema.arguments if a.kwarg_only]
    if name in ("linear", "linear_cross_entropy"):  # DTensor needs positional tensors
        tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        assert not tensors & {*in_schema}
        assert {*in_schema} < {*by_keyword}
    else:
        assert by_keyword == in_schema


def test_an_op_is_introspected_as_written() -> None:
    function = torchkiln.rms_norm
    assert function.__module__ == "torchkiln"
    assert function.__qualname__ == "rms_norm"
    assert "offset: float = 0.0" in inspect.getsource(function)
    with pytest.raises(TypeError, match=r"dropout_add\(\) missing 1 required positional argument"):
        torchkiln.dropout_add(torch.ones(2))  # type: ignore[call-arg]


X = torch.linspace(-2, 3, 20).reshape(4, 5)
ROW = torch.linspace(0, 1, 5)
CLASSES = torch.tensor([0, 4, 2, 2])
OF_TORCH: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    (torchkiln.add, torch.add, {"input": X, "other": ROW}),
    (torchkiln.add, torch.add, {"input": X, "other": ROW, "alpha": 0.5}),
    (torchkiln.add, torch.add, {"input": X, "other": 2.5}),
    (torchkiln.addcmul, torch.addcmul, {"input": X, "tensor1": ROW, "tensor2": X, "value": 0.5}),
    (torchkiln.addcmul, torch.addcmul, {"input": X, "tensor1": ROW, "tensor2": X}),
    (torchkiln.square, torch.square, {"input": X}),
    (torchkiln.relu, F.relu, {"input": X}),
    (torchkiln.gelu, F.gelu, {"input": X, "approximate": "tanh"}),
    (torchkiln.silu, F.silu, {"input": X}),
    (torchkiln.sigmoid, torch.sigmoid, {"input": X}),
    (torchkiln.tanh, torch.tanh, {"input": X}),
    (torchkiln.sum, torch.sum, {"input": X, "dim": 1}),
    (torchkiln.sum, torch.sum, {"input": X > 0, "dim": (0, 1), "keepdim": True}),
    (torchkiln.mean, torch.mean, {"input": X, "dim": 0}),
    (torchkiln.mean, torch.mean, {"input": X, "axis": (0, 1)}),
    (torchkiln.softmax, F.softmax, {"input": X, "dim": 1}),
    (torchkiln.log_softmax, F.log_softmax, {"input": X, "dim": 1}),
    (torchkiln.layer_norm, F.layer_norm, {"input": X, "normalized_shape": (5,), "weight": ROW}),
    (torchkiln.rms_norm, F.rms_norm, {"input": X, "normalized_shape": (5,), "weight": ROW}),
    (torchkiln.cross_entropy, F.cross_entropy, {"input": X, "target": CLASSES}),
    (torchkiln.linear, F.linear, {"input": X, "weight": X, "bias": ROW[:4]}),
    (matmul, torch.matmul, {"input": X, "other": X.t()}),
]


@pytest.mark.parametrize(("op", "torchs", "arguments"), OF_TORCH)
def test_the_keywords_of_torch_are_accepted(
    op: Callable[..., Any], torchs: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """Torch's keywords give torch's result, eager and in a graph without a compiler backend."""
    expected = torchs(**arguments)
    torch.compiler.reset()
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        found = call(**arguments)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_an_argument_under_both_names() -> None:
    with pytest.raises(TypeError, match=r"relu: input: got a value beside x, expected one"):
        torchkiln.relu(X, input=X)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"matmul: other: got a value beside b, expected one"):
        matmul(X, X.t(), other=X)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("sum", (X, 0, False, torch.float32)),
        ("softmax", (X, 1, 2.0)),
        ("softmax", (X, 1, None, 2.0)),
        ("add", (X, X, 2)),
        ("bias_act", (X, ROW, 2.0)),
        ("bias_act", (X, ROW, 2.0, "gelu")),
        ("linear", (X, X, None, "gelu")),
    ],
)
def test_one_argument_by_position_too_many(op: str, args: tuple[Any, ...]) -> None:
    """Arguments after the last positional one must be passed by keyword."""
    words = rf"torchkiln\.{op}: got more than \d pos.* expected at most \d; pass options by keyword"
    with pytest.raises(TypeError, match=words):
        getattr(torchkiln, op)(*args)


def test_an_argument_that_is_left_out() -> None:
    """A missing argument is None, and raises the error of a wrong type."""
    with pytest.raises(TypeError, match=r"rms_norm: normalized_shape: got NoneType, expected an"):
        torchkiln.rms_norm(X)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"relu: x: got NoneType, expected a torch.Tensor"):
        torchkiln.relu()  # type: ignore[call-arg]


@pytest.mark.parametrize("op", [torchkiln.relu, torchkiln.silu])
def test_inplace_as_in_torch(op: Callable[..., Any]) -> None:
    expected = op(X)
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        x = X.clone()
        found = call(x, inplace=True)
        assert found.data_ptr() == x.data_ptr()
        torch.testing.assert_close(x, expected)
    leaf = X.clone().requires_grad_()  # compiled, F.silu in place has no backward either
    op(leaf * 1, True).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.func.grad(lambda x: op(x).sum())(X))


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("layer_norm", lambda x: torchkiln.layer_norm(x, 4)),
        ("rms_norm", lambda x: torchkiln.rms_norm(x, (4,), offset=1.0)),
        ("muladd", lambda x: torchkiln.muladd(x, 2, 0.5)),
        ("add", lambda x: torchkiln.add(x, 0.5)),
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
    (torchkiln.geglu, (ONES, INTEGERS)),
    (geglu_tanh, (INTEGERS, INTEGERS)),
    (torchkiln.sum, (ONES.to(torch.complex64),)),
    (torchkiln.mean, (INTEGERS,)),
    (torchkiln.mean, (ONES > 0,)),
    (torchkiln.mean, (ONES.to(torch.complex64),)),
    (torchkiln.relu, (INTEGERS,)),
    (torchkiln.relu_, (INTEGERS,)),
    (torchkiln.gelu, (INTEGERS,)),
    (torchkiln.square, (ONES.to(torch.complex64),)),
    (matmul, (INTEGERS, INTEGERS.T)),
    (matmul, (ONES, ONES.T.double())),
    (torchkiln.add, (INTEGERS, INTEGERS)),
    (torchkiln.add, (INTEGERS, 2)),
    (torchkiln.muladd, (INTEGERS, 2, True)),
    (torchkiln.muladd, (ONES, 2.0, ONES.to(torch.complex64))),
]


@pytest.mark.parametrize(("op", "args"), REFUSED)
def test_compiled_calls_refuse_what_eager_ones_refuse(
    op: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The message is that of eager calls, though ATen's ops would accept the arguments."""
    with pytest.raises(RuntimeError) as eager:
        op(*args)
    torch.compiler.reset()
    with pytest.raises(RuntimeError) as compiled:
        torch.compile(op, fullgraph=True, backend="eager")(*args)
    assert str(eager.value).split("\n")[0] in str(compiled.value)
    with pytest.raises(RuntimeError) as broken:
        torch.compile(op, backend="eager")(*args)
    assert str(broken.value) == str(eager.value)
