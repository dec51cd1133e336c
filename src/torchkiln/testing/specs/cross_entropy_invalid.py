"""Calls that cross-entropy has to refuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchkiln.testing.spec import Invalid
from torchkiln.testing.specs.activation import FLOATING, SPARSE

if TYPE_CHECKING:
    from collections.abc import Iterator


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal."""
    prefix = r"torchkiln\.cross_entropy: "
    x = torch.ones(2, 4, device=device)
    target = torch.tensor([1, 3], device=device)

    def case(
        title: str,
        message: str,
        logits: object,
        target: object = target,
        error: type[Exception] = RuntimeError,
        **kwargs: Any,
    ) -> Invalid:
        return Invalid(title, (logits, target), error, prefix + message, kwargs)

    nothing = r"got NoneType, expected a torch\.Tensor"
    yield case("logits None", "logits: " + nothing, None, error=TypeError)
    yield case("target None", "target: " + nothing, x, None, error=TypeError)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        said = str(dtype).removeprefix("torch.")
        yield case(f"{said} logits", f"logits: got dtype {said}, {FLOATING}", x.to(dtype))
    yield case(
        "0-dim logits",
        r"logits: got a 0-dimensional tensor, expected \[classes\], \[rows, classes\] or "
        r"\[rows, classes, \.\.\.\]",
        x[0, 0],
    )
    yield case("no classes", r"logits: got shape \[2, 0\], expected at least 1 class", x[:, :0])
    for dtype in (torch.int32, torch.uint8, torch.float64, torch.bfloat16):
        said = str(dtype).removeprefix("torch.")
        yield case(
            f"{said} target",
            f"target: got dtype {said}, expected int64, of classes, or float32, of probabilities, "
            "the dtype of logits",
            x,
            target.to(dtype),
        )
    for shape in ((3,), (2, 1), (), (2, 4)):
        said = ", ".join(map(str, shape))
        yield case(
            f"target of shape {said}",
            rf"target: got shape \[{said}\], expected \[2\] for logits of shape \[2, 4\]: a class "
            "for each row",
            x,
            torch.zeros(shape, dtype=torch.int64, device=device),
        )
    yield case(
        "target of images",
        r"target: got shape \[2, 4\], expected \[2, 3\] for logits of shape \[2, 4, 3\]: a class "
        "for each row",
        torch.ones(2, 4, 3, device=device),
        torch.zeros(2, 4, dtype=torch.int64, device=device),
    )
    yield case(
        "probabilities of another shape",
        r"target: got shape \[2, 3\], expected \[2, 4\], the shape of logits, for probabilities",
        x,
        x[:, :3],
    )
    yield case(
        "ignored among probabilities",
        "ignore_index: got 1 beside probabilities, expected a negative number: no row has a class "
        "that could be ignored; leave it out",
        x,
        x,
        error=ValueError,
        ignore_index=1,
    )
    for value in (4, -1, -100, 2**40):
        yield case(
            f"class {value}",
            f"target: got {value}, expected one of 4 classes, 0 to 3, or ignore_index, -7",
            x,
            torch.tensor([-7, value], device=device),
            error=IndexError,
            ignore_index=-7,
            check_target=True,
        )
    yield case(
        "unknown reduction",
        "reduction: got 'max', expected one of none, mean, sum",
        x,
        error=ValueError,
        reduction="max",
    )
    for smoothing in (-0.1, 1.5, math.nan):
        yield case(
            f"label smoothing {smoothing}",
            f"label_smoothing: got {smoothing}, expected a number between 0 and 1",
            x,
            error=ValueError,
            label_smoothing=smoothing,
        )
    yield case("loss of int64", f"dtype: got int64, {FLOATING}", x, dtype=torch.int64)
    for weight in (x, x[0, :3], x[0, 0]):
        said = ", ".join(map(str, weight.shape))
        yield case(
            f"weight of shape {said}",
            rf"weight: got shape \[{said}\], expected \[4\], the classes of logits",
            x,
            weight=weight,
        )
    yield case(
        "float64 weight",
        "weight: got dtype float64, expected float32, the dtype of logits",
        x,
        weight=x[0].double(),
    )
    yield case(
        "float16 weight beside bfloat16",
        "weight: got dtype float16, expected bfloat16, the dtype of logits, or float32",
        x.bfloat16(),
        weight=x[0].half(),
    )
    yield case("sparse logits", "logits: " + SPARSE, x.to_sparse())
    yield case("sparse target", "target: " + SPARSE, x, target.to_sparse())
    for kind in ("meta", *(["cpu"] if device.type != "cpu" else [])):
        wrong = f"got device {kind}, expected {x.device}, the device of logits"
        yield case(f"target on {kind}", "target: " + wrong, x, target.to(kind))
        yield case(f"weight on {kind}", "weight: " + wrong, x, weight=x[0].to(kind))
