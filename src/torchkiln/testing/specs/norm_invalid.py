"""What the norms refuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchkiln.testing.spec import Invalid
from torchkiln.testing.specs.activation import FLOATING, SPARSE

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING = r"got NoneType, expected a torch\.Tensor"
Case = tuple[str, dict[str, Any], type[Exception], str]
"""Title, the arguments that differ from a good call, error and message."""


def invalid(
    name: str, device: torch.device, *, centered: bool, residual: bool
) -> Iterator[Invalid]:
    """Every refusal of one of the four."""
    x = torch.ones(2, 3, 4, device=device)
    good: dict[str, Any] = {"x": x}
    if residual:
        good["residual"] = x
    good["normalized_shape"] = (4,)
    good["weight"] = torch.ones(4, device=device)
    if centered:
        good["bias"] = torch.ones(4, device=device)
    good["eps"] = 1e-5
    cases = [*of_x(x, residual=residual), *of_shape(), *of_numbers(centered=centered)]
    cases += of_parameter("weight", x)
    if centered:
        cases += of_parameter("bias", x)
        words = "bias: got dtype float32, expected bfloat16, the dtype of weight"
        half = {"x": x.bfloat16(), "weight": good["weight"].bfloat16()}
        half |= {"residual": x.bfloat16()} if residual else {}
        cases.append(("weight and bias of two dtypes", half, RuntimeError, words))
    if residual:
        cases += of_residual(x)
    for title, changes, error, message in cases:
        call = good | changes
        offset = {"offset": call.pop("offset")} if "offset" in call else {}
        yield Invalid(title, tuple(call.values()), error, rf"torchkiln\.{name}: {message}", offset)


def of_x(x: torch.Tensor, *, residual: bool) -> Iterator[Case]:
    """Kinds of tensors that there are no kernels for."""
    yield "x None", {"x": None}, TypeError, f"x: {NOTHING}"
    yield "sparse x", {"x": x.to_sparse()}, RuntimeError, f"x: {SPARSE}"
    for dtype in (torch.int64, torch.bool, torch.complex64):
        kind = str(dtype).removeprefix("torch.")
        call = {"x": x.to(dtype)} | ({"residual": x.to(dtype)} if residual else {})
        yield f"{kind} x", call, RuntimeError, f"x: got dtype {kind}, {FLOATING}"


def of_shape() -> Iterator[Case]:
    """Shapes that are not the last sizes of x, and what is no shape."""
    name = "normalized_shape"
    for shape, message in (
        ((), "got [], expected at least 1 dimension"),
        ((3,), "got [3], expected [4], the last dimension of x"),
        ((1,), "got [1], expected [4], the last dimension of x"),
        ((2, 4), "got [2, 4], expected [3, 4], the last 2 dimensions of x"),
        ((-1,), "got [-1], expected [4], the last dimension of x"),
        (
            (1, 2, 3, 4),
            "got [1, 2, 3, 4], expected the last sizes of x, which has shape [2, 3, 4]",
        ),
    ):
        words = message.replace("[", r"\[").replace("]", r"\]")
        yield f"{name} {shape}", {name: shape}, RuntimeError, f"{name}: {words}"
    for value, kind in ((None, "NoneType"), ("4", "str"), ((4.0,), "float"), ([None], "NoneType")):
        words = f"{name}: got {kind}, expected an int or a sequence of ints"
        yield f"{name} {value!r}", {name: value}, TypeError, words


def of_numbers(*, centered: bool) -> Iterator[Case]:
    """Eps and offset."""
    for eps, shown in ((0.0, "0"), (-1e-5, "-1e-05"), (math.nan, "nan"), (-math.inf, "-inf")):
        words = f"eps: got {shown}, expected a number greater than 0"
        yield f"eps {shown}", {"eps": eps}, ValueError, words
    wrong: list[tuple[str, object, str]] = [
        ("eps", "1e-5", "str"),
        ("eps", torch.ones(()), "Tensor"),
    ]
    if centered:
        wrong.append(("eps", None, "NoneType"))
    else:
        wrong += [("offset", None, "NoneType"), ("offset", torch.ones(()), "Tensor")]
    for name, value, kind in wrong:
        words = f"{name}: got {kind}, expected a number"
        yield f"{name} {kind}", {name: value}, TypeError, words


def of_parameter(name: str, x: torch.Tensor) -> Iterator[Case]:
    """Weights and biases that do not fit."""
    good = torch.ones(4, device=x.device)
    shape = rf"{name}: got shape \[{{}}\], expected \[4\], the normalized_shape"
    dtype = f"{name}: got dtype {{}}, expected {{}}, the dtype of x"
    for title, value, message in (
        (f"{name} too short", good[:3], shape.format(3)),
        (f"{name} of length 1", good[:1], shape.format(1)),
        (f"2-D {name}", good.expand(1, 4), shape.format("1, 4")),
        (f"0-dim {name}", good[0], shape.format("")),
        (f"float64 {name}", good.double(), dtype.format("float64", "float32")),
        (f"half {name} beside float32", good.half(), dtype.format("float16", "float32")),
        (f"integer {name}", good.long(), dtype.format("int64", "float32")),
        (f"sparse {name}", good.to_sparse(), f"{name}: {SPARSE}"),
        *((f"{name} on {d}", good.to(d), elsewhere(name, d, x)) for d in away(x)),
    ):
        yield title, {name: value}, RuntimeError, message


def of_residual(x: torch.Tensor) -> Iterator[Case]:
    """Residuals that do not fit."""
    yield "residual None", {"residual": None}, TypeError, f"residual: {NOTHING}"
    for other in (x[:1], x[0], x[..., :1]):
        shape = ", ".join(map(str, other.shape))
        words = rf"residual: got shape \[{shape}\], expected \[2, 3, 4\], the shape of x"
        yield f"residual of shape {shape}", {"residual": other}, RuntimeError, words
    words = "residual: got dtype float16, expected float32, the dtype of x"
    yield "half residual", {"residual": x.half()}, RuntimeError, words
    yield "sparse residual", {"residual": x.to_sparse()}, RuntimeError, f"residual: {SPARSE}"
    for d in away(x):
        yield f"residual on {d}", {"residual": x.to(d)}, RuntimeError, elsewhere("residual", d, x)


def away(x: torch.Tensor) -> list[torch.device]:
    """Devices that x is not on."""
    return [torch.device("meta")] + ([torch.device("cpu")] if x.device.type != "cpu" else [])


def elsewhere(name: str, device: torch.device, x: torch.Tensor) -> str:
    """The message about a tensor on another device."""
    return f"{name}: got device {device}, expected {x.device}, the device of x"
