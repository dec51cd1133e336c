"""The contract of log-probabilities and entropies of logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.ops._traced import name_of
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec

# Shapes of the logits, with the classes in the last dimension.
SHAPES: Mapping[str, tuple[int, ...]] = (
    {"one row": (7,), "one class": (5, 1), "prime": (7, 13), "batch": (2, 3, 5)}
    | {"vector less one": (9, 127), "vector": (9, 128), "vector and one": (9, 129)}
    | {"power of two and one": (5, 1025), "many rows": (4099, 3)}
    | {"long rows": (3, 17001), "very long row": (1, 140001), "no rows": (0, 5)}
)
OPTIONS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "ignored": {"ignore_index": 2},
}


def classes(logits: Tensor, ignored: int | None = None) -> Tensor:
    """A class for each row. Every row except the first may be ignored."""
    rows = torch.arange(math.prod(logits.shape[:-1]), device=logits.device)
    target = (rows * 7919 + 1) % logits.shape[-1]
    if ignored is not None:
        target[1::3] = ignored
    return target.reshape(logits.shape[:-1])


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, then with each option; one without the entropy."""

    def logits(*shape: int) -> Tensor:
        return 2 * normal("logits", shape, device, dtype)

    x = logits(6, 10)
    yield Sample("typical", (x, classes(x, -100)), {"entropy": True})
    for name, shape in SHAPES.items():
        x = logits(*shape)
        yield Sample(name, (x, classes(x)), {"entropy": True})
    for shape in ((4, 5), (3, 2, 131)):
        x = logits(*shape)
        for name, options in OPTIONS.items():
            target = classes(x, options.get("ignore_index"))
            yield Sample(f"{name}, {shape}", (x, target), {**options, "entropy": True})
    x = logits(9, 21)
    yield Sample("all ignored", (x, torch.full_like(classes(x), -100)), {"entropy": True})


def scaled(logits: Tensor, target: Tensor, ignore_index: int, temperature: float) -> Tensor:
    """The logits divided by the temperature, at least float32; 0 for ignored rows."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return z.masked_fill((target == ignore_index).unsqueeze(-1), 0)


def both(rows: tuple[Tensor, Tensor], target: Tensor, ignored: int, entropy: bool) -> Any:
    """The results of a call from numbers of all rows; 0 for ignored rows."""
    kept = [each.masked_fill(target == ignored, 0) for each in rows]
    return tuple(kept) if entropy else kept[0]


def own(values: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The value at each row's target class."""
    at = target.masked_fill(target == ignored, 0).unsqueeze(-1)
    return values.gather(-1, at).squeeze(-1)


def terms(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities, their logarithms (0 for a probability of 0), and the entropies."""
    logs = torch.log_softmax(z, -1)
    p = logs.exp()
    logs = logs.masked_fill(p == 0, 0)
    return p, logs, -(p * logs).sum(-1)


def reference(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Any:
    """The formula of the op, at least in float32."""
    z = scaled(logits, target, ignore_index, temperature)
    logp = own(torch.log_softmax(z, -1), target, ignore_index)
    return both((logp, terms(z)[2]), target, ignore_index, entropy)


def sizes(z: Tensor) -> Tensor:
    """``|z| + |lse|`` of each element, without infinite z."""
    absolute = z.abs().masked_fill(z.isinf(), 0)
    return absolute + torch.logsumexp(z, -1, keepdim=True).abs()


def magnitude(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Any:
    """The magnitudes of the logarithm and of the entropy, whose probabilities have errors, too."""
    z = scaled(logits, target, ignore_index, temperature)
    p, logs, of_row = terms(z)
    size = sizes(z)
    logp = own(size, target, ignore_index) + (size.amax(-1) if size.numel() else of_row)
    moved = (p * (1 + size) * (1 + logs.abs() + of_row.unsqueeze(-1))).sum(-1)
    return both((logp, moved), target, ignore_index, entropy)


def gradient_magnitude(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Any:
    """Functions whose gradients are the op's, with the absolute values of all terms."""
    z = scaled(logits, target, ignore_index, temperature)
    of_logp, of_entropy = pulls(z, target, ignore_index)
    rows = ((z * of_logp).sum(-1), (z * of_entropy).sum(-1))
    return both(rows, target, ignore_index, entropy)


def pulls(
    z: Tensor, target: Tensor, ignored: int, errors: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sums of absolute terms of both results' gradients; ``errors`` of ``z`` have the same unit."""
    with torch.no_grad():
        p, logs, of_row = terms(z)
        moved = p * (1 + sizes(z) + errors)
        at = target.masked_fill(target == ignored, 0).unsqueeze(-1)
        of_logp = moved.scatter_add(-1, at, torch.ones_like(moved))
        return of_logp, moved * (logs.abs() + of_row.unsqueeze(-1) + 1)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call for both results of a matrix of logits."""
    logits = torch.randn(shape, device=device, dtype=dtype)
    target = torch.randint(shape[1], shape[:1], device=device)
    return Sample("bench", (logits, target), {"entropy": True})


def traffic(sample: Sample) -> Traffic:
    """Reads the logits."""
    logits = sample.args[0]
    return Traffic(logits.nbytes, 5 * logits.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the logits, writes their gradient."""
    logits = sample.args[0]
    return Traffic(2 * logits.nbytes, 6 * logits.numel())


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with targets that do not match the logits, and with temperatures out of range."""
    x, target = torch.ones(2, 4, device=device), torch.tensor([1, 3], device=device)
    good = GoodCall(torch.ops.torchkiln.logprob.default, Sample("good", (x, target)))
    words = "logits: got a 0-dimensional tensor, expected at least 1 dimension"
    yield good.changed(words, logits=x[0, 0], target=target[0])
    words = "logits: got shape [2, 0], expected at least 1 class"
    yield good.changed(words, logits=x[:, :0])
    yield from wrong_targets(good, "logits", x)
    yield from wrong_temperatures(good)


def wrong_targets(good: GoodCall, name: str, x: Tensor) -> Iterator[Invalid]:
    """Calls with targets of other dtypes and shapes, for two rows."""
    target = torch.zeros(2, dtype=torch.int64, device=x.device)
    for dtype in (torch.int32, torch.float32):
        words = f"target: got dtype {name_of(dtype)}, expected int64, of classes"
        yield good.changed(words, target=target.to(dtype))
    for shape in ((3,), (2, 1), (), (2, 4)):
        said = f"target: got shape {list(shape)}, expected [2] for {name} of shape {list(x.shape)}"
        wrong = torch.zeros(shape, dtype=torch.int64, device=x.device)
        yield good.changed(f"{said}: a class for each row", target=wrong)


def wrong_temperatures(good: GoodCall) -> Iterator[Invalid]:
    """Calls with numbers that cannot divide logits."""
    for temperature in (0.0, -1.0, math.inf, math.nan):
        words = f"temperature: got {temperature:g}, expected a finite number greater than 0"
        yield good.changed(words, ValueError, temperature=temperature)


def typical_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The input and the target of the module."""
    return next(inputs(device, dtype)).args


LOGPROB = OpSpec(
    op=torchkiln.logprob,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    differentiable=(0,),
    refusals=Refusals(),
    invalid=invalid,
    bench=bench,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    indices=(1,),
    bench_shapes=((32768, 4096), (8192, 32768), (16384, 131072)),
    small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
    helpers=("_logprob_forward", "_logprob_backward"),
    module=layer(torchkiln.nn.Logprob, temperature=0.7, entropy=True),
    module_inputs=typical_inputs,
)
