"""The contract of cross-entropy of logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.ops._traced import name_of
from torchkiln.testing.data import normal
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec

# Shapes of the logits, with the classes in dimension 1, or in dimension 0 for a single row.
SHAPES: Mapping[str, tuple[int, ...]] = (
    {"one row": (7,), "one class": (5, 1), "prime": (7, 13)}
    | {"vector less one": (9, 127), "vector": (9, 128), "vector and one": (9, 129)}
    | {"power of two and one": (5, 1025)}
    | {"many rows": (4099, 3), "images": (2, 5, 3, 7)}
    | {"long rows": (3, 17001), "very long row": (1, 140001)}
)

# Options, one at a time at a few shapes. tests/ops/test_cross_entropy.py combines them.
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 2},
    "z-loss": {"z_loss": 0.01, "reduction": "none"},
    "weighted": {"weight": True},
    "all": {"weight": True, "ignore_index": 2, "label_smoothing": 0.3, "z_loss": 0.02},
    "checked": {"check_target": True, "reduction": "sum"},
}


def classes(logits: Tensor, ignored: int | None = None) -> Tensor:
    """A class for each row. Every row except the first may be ignored."""
    dim = 0 if logits.dim() == 1 else 1
    shape = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    rows = torch.arange(math.prod(shape), device=logits.device)
    target = (rows * 7919 + 1) % logits.shape[dim]
    if ignored is not None:
        target[1::3] = ignored
    return target.reshape(shape)


def probabilities(logits: Tensor) -> Tensor:
    """Random target probabilities for each row."""
    dim = 0 if logits.dim() == 1 else 1
    other = normal("target", logits.shape, logits.device, torch.float64)
    return torch.softmax(other, dim).to(logits.dtype)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, then with each option, for classes and for probabilities."""

    def logits(*shape: int) -> Tensor:
        return 2 * normal("logits", shape, device, dtype)

    x = logits(6, 10)
    yield Sample("typical", (x, classes(x, -100)))
    for name, shape in SHAPES.items():
        x = logits(*shape)
        yield Sample(name, (x, classes(x)), {"reduction": "sum" if x.numel() > 4096 else "mean"})
    for reduction in ("sum", "none"):
        x = logits(0, 5)
        yield Sample(f"no rows, {reduction}", (x, classes(x)), {"reduction": reduction})
    for shape in ((4, 5), (2, 6, 3, 5)):
        x = logits(*shape)
        for name, options in OPTIONS.items():
            given = dict(options)
            if "weight" in given:
                given["weight"] = normal("weight", shape[1:2], device, dtype).abs() + 0.1
            target = classes(x, given.get("ignore_index"))
            yield Sample(f"{name}, {x.dim()} dimensions", (x, target), given)
            if "ignore_index" not in given and "check_target" not in given:
                full = f"probabilities, {name}, {x.dim()} dimensions"
                yield Sample(full, (x, probabilities(x)), given)
    for shape in ((7,), (9, 129), (2, 5, 3, 7)):
        x = logits(*shape)
        yield Sample(f"probabilities of {shape}", (x, probabilities(x)))
    if dtype in (torch.float16, torch.bfloat16):
        x = logits(7, 33)
        weight = normal("weight", (33,), device).abs() + 0.1
        yield Sample("float32 weight", (x, classes(x, -100)), {"weight": weight})
    x = logits(9, 21)
    for out in dict.fromkeys((dtype, torch.float32, torch.float16, torch.bfloat16)):
        yield Sample(f"to {out}", (x, classes(x)), {"loss_dtype": out})
        yield Sample(
            f"to {out}, none", (x, probabilities(x)), {"loss_dtype": out, "reduction": "none"}
        )
    # Enough elements that opcheck skips the sample: it would report NaN as a difference.
    yield Sample("all ignored", (x, torch.full_like(classes(x), -100)), {"label_smoothing": 0.1})


def reference(logits: Tensor, target: Tensor, *, z_loss: float = 0.0, **kwargs: Any) -> Tensor:
    """Torch's loss and the z-loss, in the dtype of the logits."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("loss_dtype", "check_target")}
    if "weight" in kwargs:
        kwargs["weight"] = kwargs["weight"].to(logits.dtype)
    loss = F.cross_entropy(logits, target, **kwargs)
    if z_loss == 0:
        return loss
    squares = row_weights(logits, target, **kwargs) * log_sum_exp(logits).square()
    return loss + z_loss * reduced(squares, logits, target, **kwargs)


def composite(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """The reference in the dtype of the call's argument ``loss_dtype``."""
    return reference(logits, target, **kwargs).to(kwargs.get("loss_dtype") or logits.dtype)


def log_sum_exp(logits: Tensor) -> Tensor:
    """The logarithm of the sum of the exponentials of each row."""
    return torch.logsumexp(logits, 0 if logits.dim() == 1 else 1)


def row_weights(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """The weight of each row's target; 0 for ignored rows."""
    if target.is_floating_point():
        return torch.ones_like(log_sum_exp(logits))
    counts = target != kwargs.get("ignore_index", -100)
    if "weight" not in kwargs:
        return counts.to(logits.dtype)
    return kwargs["weight"].to(logits.dtype)[target.where(counts, 0)] * counts


def reduced(rows: Tensor, logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """Reduce a number per row in the same way as the losses."""
    reduction = kwargs.get("reduction", "mean")
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    total = row_weights(logits, target, **kwargs).sum()
    return rows.sum() / total.clamp(min=torch.finfo(total.dtype).tiny)


def terms(logits: Tensor, target: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The factor of each class, with the classes last, and the weight of each row."""
    dim = 0 if logits.dim() == 1 else 1
    count = logits.shape[dim]
    smoothing = kwargs.get("label_smoothing", 0.0)
    row = row_weights(logits, target, **kwargs)
    if target.is_floating_point():
        share = target.movedim(dim, -1)
    else:
        share = F.one_hot(target.where(row != 0, 0), count).to(logits.dtype)
    share = share * (1 - smoothing) + smoothing / count
    if "weight" in kwargs:
        share = share * kwargs["weight"]
    return share * (row != 0).unsqueeze(-1), row


def magnitude(logits: Tensor, target: Tensor, *, z_loss: float = 0.0, **kwargs: Any) -> Tensor:
    """The magnitude of the loss, from those of logits, log-sum-exps and the sum over the rows."""
    share, row = terms(logits, target, **kwargs)
    classes = logits.movedim(0 if logits.dim() == 1 else 1, -1).abs()
    classes = classes.where(classes.isfinite(), 0)  # -inf among finite logits adds nothing
    sizes = log_sum_exp(logits).abs() + classes.amax(-1) if classes.numel() else row
    rows = (share * (classes + 2 * sizes.unsqueeze(-1))).sum(-1) + 4 * z_loss * row * sizes**2
    return reduced(rows, logits, target, **kwargs)


def pull(logits: Tensor, target: Tensor, errors: Tensor | float = 0.0, **kwargs: Any) -> Tensor:
    """The sum of the absolute terms of each logit's gradient, with the classes last.

    ``errors`` are the errors of the logits of each row, in the unit of the terms.
    """
    dim = 0 if logits.dim() == 1 else 1
    z_loss = kwargs.pop("z_loss", 0.0)
    with torch.no_grad():
        share, row = terms(logits, target, **kwargs)
        both = 1 + sizes(logits) + errors
        factor = share.sum(-1) + 4 * z_loss * row * log_sum_exp(logits).abs()
        return torch.softmax(logits, dim).movedim(dim, -1) * both * factor.unsqueeze(-1) + share


def sizes(logits: Tensor) -> Tensor:
    """``|logits| + |lse|`` of each element, with the classes last."""
    dim = 0 if logits.dim() == 1 else 1
    return log_sum_exp(logits).abs().unsqueeze(-1) + logits.movedim(dim, -1).abs()


def gradient_magnitude(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms."""
    dim = 0 if logits.dim() == 1 else 1
    own = pull(logits, target, **kwargs)
    kwargs.pop("z_loss", None)
    other = sizes(logits).detach() * kwargs.get("weight", 1)
    rows = (logits.movedim(dim, -1) * own).sum(-1)
    if target.is_floating_point():
        rows = rows + (target.movedim(dim, -1) * other).sum(-1)
    return reduced(rows, logits.detach(), target.detach(), **kwargs)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call with a class for each row of a matrix."""
    logits = torch.randn(shape, device=device, dtype=dtype)
    return Sample("bench", (logits, torch.randint(shape[1], shape[:1], device=device)))


def traffic(sample: Sample) -> Traffic:
    """Reads the logits, and probabilities if there are any."""
    logits, target = sample.args[:2]
    return Traffic((1 + target.is_floating_point()) * logits.nbytes, 3 * logits.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the logits, writes their gradient."""
    logits, target = sample.args[:2]
    return Traffic((2 + target.is_floating_point()) * logits.nbytes, 4 * logits.numel())


def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A loss module with class weights."""
    weight = normal("weight", (10,), device, dtype).abs() + 0.1
    return torchkiln.nn.CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=0.01)


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with targets or weights that do not match the logits, and with numbers out of range."""
    x, target = torch.ones(2, 4, device=device), torch.tensor([1, 3], device=device)
    good = GoodCall(torch.ops.torchkiln.cross_entropy.default, Sample("good", (x, target)))
    words = "[classes], [rows, classes] or [rows, classes, ...]"
    yield good.changed(f"logits: got a 0-dimensional tensor, expected {words}", logits=x[0, 0])
    words = "logits: got shape [2, 0], expected at least 1 class"
    yield good.changed(words, logits=x[:, :0])
    words = "expected int64, of classes, or float32, of probabilities, the dtype of logits"
    for dtype in (torch.int32, torch.uint8):
        said = f"target: got dtype {name_of(dtype)}, {words}"
        yield good.changed(said, target=target.to(dtype))
    yield from wrong_targets(good)
    for value in (4, -1, -100, 2**40):
        words = f"target: got {value}, expected one of 4 classes, 0 to 3, or ignore_index, -7"
        wrong = {"target": torch.tensor([-7, value], device=device), "ignore_index": -7}
        yield good.changed(words, IndexError, **wrong, check_target=True)
    for smoothing in (-0.1, 1.5, math.nan):
        words = f"label_smoothing: got {smoothing}, expected a number between 0 and 1"
        yield good.changed(words, ValueError, label_smoothing=smoothing)


def wrong_targets(good: GoodCall) -> Iterator[Invalid]:
    """Calls with targets of wrong shapes: classes and probabilities."""
    x = good["logits"]
    images = x.unsqueeze(-1).expand(2, 4, 3)
    for logits, shape in ((x, (3,)), (x, (2, 1)), (x, ()), (x, (2, 4)), (images, (2, 4))):
        expected = (
            f"{[logits.shape[0], *logits.shape[2:]]} for logits of shape {list(logits.shape)}"
        )
        words = f"target: got shape {list(shape)}, expected {expected}: a class for each row"
        target = torch.zeros(shape, dtype=torch.int64, device=x.device)
        yield good.changed(words, logits=logits, target=target)
    words = "target: got shape [2, 3], expected [2, 4], the shape of logits, for probabilities"
    yield good.changed(words, target=x[:, :3])
    expected = "a negative number: only classes can be ignored; leave it out"
    words = f"ignore_index: got 1 with a target of probabilities, expected {expected}"
    yield good.changed(words, ValueError, target=x, ignore_index=1)


CROSS_ENTROPY = OpSpec(
    op=torchkiln.cross_entropy,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    differentiable=(0, 1),
    refusals=Refusals(
        parameters={"weight": "logits"},
        shapes={"weight": "the classes of logits"},
        words={"reduction": ("none", "mean", "sum")},
    ),
    invalid=invalid,
    bench=bench,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    indices=(1,),
    waits_for=("check_target",),
    bench_shapes=((32768, 4096), (8192, 32768), (8192, 131072)),
    small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
    helpers=("_cross_entropy_forward", "_cross_entropy_backward"),
    module=module,
)
