"""What products refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchkiln.testing.spec import Invalid
from torchkiln.testing.specs.activation import FLOATING, FORMULAS, SPARSE

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING = r"got NoneType, expected a torch\.Tensor"
FLAT = "got a 0-dimensional tensor, expected at least 1 dimension"


def matmul_invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal of matmul."""
    prefix = r"torchkiln\.matmul: "
    a = torch.ones(2, 4, device=device, requires_grad=True)
    b = torch.ones(4, 3, device=device, requires_grad=True)

    def case(name: str, a: object, b: object, message: str) -> Invalid:
        return Invalid(name, (a, b), RuntimeError, prefix + message)

    yield Invalid("a None", (None, b), TypeError, prefix + "a: " + NOTHING)
    yield Invalid("b None", (a, None), TypeError, prefix + "b: " + NOTHING)
    yield case("0-dim a", a[0, 0], b, "a: " + FLAT + r"; multiply with \*")
    yield case("0-dim b", a, b[0, 0], "b: " + FLAT + r"; multiply with \*")
    yield case(
        "inner sizes",
        a,
        a,
        r"b: got shape \[2, 4\], expected 4 in dimension -2, the last size of a",
    )
    yield case(
        "inner size of a vector",
        a,
        b[0],
        r"b: got shape \[3\], expected 4 in dimension -1, the last size of a",
    )
    yield case(
        "batches",
        a.expand(2, 2, 4),
        b.expand(3, 4, 3),
        r"b: got shape \[3, 4, 3\], expected leading sizes that broadcast with a of shape "
        r"\[2, 2, 4\]",
    )
    yield case(
        "mixed dtypes", a, b.double(), "b: got dtype float64, expected float32, the dtype of a"
    )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        yield case(f"{name} a", a.detach().to(dtype), b, f"a: got dtype {name}, {FLOATING}")
    yield case("sparse a", a.detach().to_sparse(), b, "a: " + SPARSE)
    yield case("sparse b", a, b.detach().to_sparse(), "b: " + SPARSE)
    yield case(
        "meta b",
        a,
        b.detach().to("meta"),
        f"b: got device meta, expected {a.device}, the device of a",
    )
    if device.type != "cpu":
        yield case(
            "b on the CPU",
            a,
            b.detach().cpu(),
            f"b: got device cpu, expected {a.device}, the device of a",
        )


def linear_invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal of linear."""
    prefix = r"torchkiln\.linear: "
    x = torch.ones(2, 4, device=device, requires_grad=True)
    weight = torch.ones(3, 4, device=device, requires_grad=True)
    bias = torch.ones(3, device=device)

    def case(name: str, args: tuple[object, ...], message: str) -> Invalid:
        return Invalid(name, args, RuntimeError, prefix + message)

    yield Invalid("x None", (None, weight), TypeError, prefix + "x: " + NOTHING)
    yield Invalid("weight None", (x, None), TypeError, prefix + "weight: " + NOTHING)
    yield Invalid(
        "unknown activation",
        (x, weight, bias, "swish"),
        ValueError,
        prefix + f"act: got 'swish', expected one of {', '.join(FORMULAS)}",
    )
    yield case("0-dim x", (x[0, 0], weight), "x: " + FLAT)
    yield case(
        "1-D weight", (x, weight[0]), r"weight: got 1 dimensions \(shape \[4\]\), expected 2"
    )
    yield case(
        "transposed weight",
        (x, weight.T),
        r"weight: got shape \[4, 3\], expected 4 as the second size, the last size of x",
    )
    yield case(
        "bias too short",
        (x, weight, bias[:2]),
        r"bias: got shape \[2\], expected \[3\], the first size of weight",
    )
    yield case(
        "residual of another shape",
        (x, weight, bias, "none", 1.0, x),
        r"residual: got shape \[2, 4\], expected \[2, 3\], the shape of the output",
    )
    other = "got dtype float64, expected float32, the dtype of x"
    yield case("float64 weight", (x, weight.double()), "weight: " + other)
    yield case("float64 bias", (x, weight, bias.double()), "bias: " + other)
    yield case(
        "float64 residual",
        (x, weight, bias, "none", 1.0, torch.ones(2, 3, dtype=torch.float64, device=device)),
        "residual: " + other,
    )
    yield case(
        "bfloat16 bias beside float16",
        (x.half(), weight.half(), bias.bfloat16()),
        "bias: got dtype bfloat16, expected float16, the dtype of x, or float32",
    )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        yield case(f"{name} x", (x.detach().to(dtype), weight), f"x: got dtype {name}, {FLOATING}")
    yield case("sparse x", (x.detach().to_sparse(), weight), "x: " + SPARSE)
    yield case("sparse weight", (x, weight.detach().to_sparse()), "weight: " + SPARSE)
    yield case(
        "meta weight",
        (x, weight.detach().to("meta")),
        f"weight: got device meta, expected {x.device}, the device of x",
    )
    if device.type != "cpu":
        yield case(
            "bias on the CPU",
            (x, weight, bias.cpu()),
            f"bias: got device cpu, expected {x.device}, the device of x",
        )
