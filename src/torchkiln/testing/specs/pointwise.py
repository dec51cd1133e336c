"""The contracts of the pointwise family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

import torchkiln
from torchkiln.ops._traced import name_of
from torchkiln.testing.data import cycle, large_matrix, normal
from torchkiln.testing.forms import with_forms
from torchkiln.testing.refusals import KNOWN_DTYPES, GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec

Shapes = Mapping[str, tuple[tuple[int, ...], ...]]

# Shapes for calls whose arguments have equal shapes: the scalar loop, the vector loop with tails.
ALIKE: Mapping[str, tuple[int, ...]] = (
    {"typical": (6, 10), "one": (1,), "0-dim": (), "empty": (0,)}
    | {"prime": (17,), "vector less one": (127,), "vector": (128,), "vector and one": (129,)}
    | {"power of two and one": (1025,)}
)
# Shapes that broadcast on either side and in the middle, shapes whose dimensions do not collapse,
# and shapes with enough elements for several threads or blocks.
ADD_SHAPES: Shapes = (
    {name: (shape, shape) for name, shape in ALIKE.items()}
    | {"0-dim beside 1-D": ((), (5,)), "empty in the middle": ((3, 0, 2), (3, 1, 2))}
    | {"power of two less one": ((1023,), (1023,)), "row": ((31, 33), (33,))}
    | {"column": ((31, 33), (31, 1)), "column beside vectors": ((31, 64), (31, 1))}
    | {"vectors, in the middle": ((4, 1, 32), (1, 3, 1)), "outer": ((13, 1), (1, 19))}
    | {"middle": ((4, 1, 5), (4, 3, 1)), "images": ((2, 3, 5, 7), (2, 3, 5, 7))}
    | {"images and channels": ((2, 3, 5, 7), (3, 1, 1))}
    | {"rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), (1, 2, 2, 1, 2, 2, 3, 1, 3))}
    | {"threads": ((257, 521), (257, 521)), "threads and row": ((257, 521), (521,))}
)
MULADD_SHAPES: Shapes = (
    {name: (shape, shape, shape) for name, shape in ALIKE.items()}
    | {"empty in the middle": ((3, 0, 2), (3, 1, 2), (2,))}
    | {"scale and shift of columns": ((31, 33), (33,), (33,))}
    | {"scale and shift of rows": ((31, 33), (31, 1), (31, 1))}
    | {"outer and matrix": ((13, 1), (1, 19), (13, 19)), "all broadcast": ((4, 1, 1), (3, 1), (5,))}
    | {"images and channels": ((2, 3, 5, 7), (3, 1, 1), (3, 1, 1))}
    | {"rank 9": (*ADD_SHAPES["rank 9"], (2, 1, 1, 3, 2, 1, 3, 2, 1)), "scalars": ((5, 7), (), ())}
    | {"scalar factor": ((5, 7), (), (5, 7)), "scalar first": ((), (5, 7), (7,))}
    | {"scalar shift": ((5, 7), (5, 7), ()), "only the shift is no scalar": ((), (), (5, 7))}
    | {"threads": ((257, 261), (257, 261), (257, 261))}
    | {"threads and columns": ((257, 261), (261,), (261,))}
)


def add_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each pair of shapes, then with pairs of dtypes."""
    for name, (left, right) in ADD_SHAPES.items():
        yield Sample(name, (normal("a", left, device, dtype), normal("b", right, device, dtype)))
    a = normal("a", (5, 9), device, dtype)
    yield Sample("float32 on the right", (a, normal("b", (9,), device, torch.float32)))
    yield Sample("float64 on the left", (normal("b", (5, 9), device, torch.float64), a))
    yield Sample("int64 on the right", (a, torch.arange(-4, 5, device=device)))
    yield Sample("bool on the left", (torch.arange(9, device=device) % 2 == 0, a))
    yield Sample("0-dim float64 on the right", (a, normal("b", (), device, torch.float64)))
    yield Sample("0-dim on the CPU", (a, normal("b", (), torch.device("cpu"), dtype)))


def muladd_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each triple of shapes, then with triples of dtypes."""
    for name, shapes in MULADD_SHAPES.items():
        pairs = zip("abc", shapes, strict=True)
        yield Sample(name, tuple(normal(key, shape, device, dtype) for key, shape in pairs))
    a, b = normal("a", (5, 9), device, dtype), normal("b", (5, 9), device, dtype)
    c = normal("c", (5, 9), device, dtype)
    row = normal("b", (9,), device, torch.float32)
    integers = torch.arange(-4, 5, device=device)
    flags = integers % 2 == 0
    wide = normal("c", (5, 9), device, torch.float64)
    cpu = torch.device("cpu")
    yield Sample("float32 in the middle", (a, row, c))
    yield Sample("float64 on the right", (a, b, wide))
    yield Sample("int64 and bool", (a, integers, flags))
    yield Sample("bool first", (flags, a, integers))
    yield Sample("0-dim float64 on the right", (a, b, normal("c", (), device, torch.float64)))
    yield Sample("0-dim on the CPU", (a, normal("b", (), cpu, dtype), normal("c", (), cpu, dtype)))


def unpromotable(good: GoodCall, names: str, *cases: tuple[torch.dtype, ...]) -> Iterator[Invalid]:
    """Calls whose dtypes promote to a dtype without kernels."""
    for dtypes in cases:
        *first, last = map(name_of, dtypes)
        said = f"{', '.join(first)} and {last}"
        both = name_of(reduce(torch.promote_types, dtypes))
        yield good.changed(
            f"{', '.join(names)}: got dtypes {said}, which promote to {both}, {KNOWN_DTYPES}",
            **{name: good[name].to(dtype) for name, dtype in zip(names, dtypes, strict=True)},
        )


def add_invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with dtypes that do not promote, and with shapes that do not broadcast."""
    x = torch.ones(4, device=device)
    good = GoodCall(torch.ops.torchkiln.add.default, Sample("good", (x, x)))
    yield from unpromotable(
        good,
        "ab",
        (torch.int64, torch.int64),
        (torch.int32, torch.bool),
        (torch.bool, torch.bool),
        (torch.float32, torch.complex64),
    )
    words = "b: got shape [3], expected one that broadcasts with a of shape [4]"
    yield good.changed(words, b=torch.ones(3, device=device))


def muladd_invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with three dtypes that do not promote, and with shapes that do not broadcast."""
    x, matrix = torch.ones(4, device=device), torch.ones(4, 4, device=device)
    good = GoodCall(torch.ops.torchkiln.muladd.default, Sample("good", (x, x, x)))
    yield from unpromotable(
        good,
        "abc",
        (torch.int64, torch.int64, torch.int64),
        (torch.bool, torch.int32, torch.bool),
        (torch.float32, torch.complex64, torch.float32),
    )
    words = "{}: got shape [3], expected one that broadcasts with {} of shape {}"
    yield good.changed(words.format("b", "a", "[4]"), b=x[:3])
    yield good.changed(words.format("c", "a and b", "[4, 4]"), b=matrix, c=x[:3])


def add_backward_traffic(sample: Sample) -> Traffic:
    """Traffic of sums for broadcast arguments; other gradients are the incoming one, at no cost."""
    a, b = sample.args
    shape = torch.broadcast_shapes(a.shape, b.shape)
    summed = [t for t in (a, b) if t.shape != shape]
    count = shape.numel()
    size = torch.result_type(a, b).itemsize
    return Traffic(sum(count * size + t.nbytes for t in summed), count * len(summed))


def muladd_backward_traffic(sample: Sample) -> Traffic:
    """Traffic that reads the incoming gradient, a and b, and writes the gradients of a and b."""
    a, b, _ = sample.args
    count = torch.broadcast_shapes(*(t.shape for t in sample.args)).numel()
    return Traffic(count * a.itemsize + 2 * (a.nbytes + b.nbytes), 2 * count)


def muladd_large(device: torch.device) -> Sample:
    """A call with a matrix of more than 2**31 elements, a row and a number."""
    a = large_matrix(device)
    c = torch.tensor(3.0, device=device, dtype=a.dtype)
    return Sample("large", (a, 8 * cycle(a.shape[1], 241, device), c))


def muladd(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The product and the sum, as two ops of torch."""
    return a * b + c


def muladd_gradient_magnitude(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A function whose gradients are the op's, with absolute factors; broadcast ones are sums."""
    return a * b.detach().abs() + a.detach().abs() * b + c


ADD = OpSpec(
    op=torchkiln.add,
    reference=torch.add,
    magnitude=lambda a, b: a.abs() + b.abs(),
    inputs=add_inputs,
    refusals=Refusals(promotes=True, numbers=("a", "b")),
    invalid=add_invalid,
    backward_traffic=add_backward_traffic,
    opaque=False,
)


def addcmul_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls of muladd in the order of torch.addcmul, then other factors."""
    for call in muladd_inputs(device, dtype):
        a, b, c = call.args
        tensors = all(isinstance(value, Tensor) and value.dtype == dtype for value in call.args)
        # torch.addcmul takes at most one tensor on the CPU if others are on a GPU, muladd takes
        # two.
        if tensors and sum(value.device != device for value in call.args) <= 1:
            yield replace(call, args=(c, a, b))
    a, b, c = (normal(name, (5, 7), device, dtype) for name in "abc")
    yield Sample("value", (c, a, b), {"value": -1.5})


def addcmul_terms(first: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    return first.abs() + (value * a * b).abs()


def addcmul_gradient_magnitude(first: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    """muladd_gradient_magnitude() of the arguments of addcmul."""
    return muladd_gradient_magnitude(a * abs(value), b, first)


def with_addcmul(parent: OpSpec) -> OpSpec:
    """The contract of addcmul; tests/ops/test_muladd.py compares its promotion with torch's."""
    return replace(
        parent,
        name="addcmul",
        op=torchkiln.addcmul,
        composed=True,
        reference=torch.addcmul,
        composite=torch.addcmul,
        magnitude=addcmul_terms,
        gradient_magnitude=addcmul_gradient_magnitude,
        inputs=addcmul_inputs,
        refusals=None,
        invalid=addcmul_invalid,
        large=None,
        forms=(),
    )


def addcmul_invalid(device: torch.device) -> Iterator[Invalid]:
    """A call with shapes that do not broadcast."""
    x = torch.ones(4, device=device)
    words = re.escape("torchkiln.muladd: b: got shape [3], expected one that broadcasts")
    yield Invalid("shape of tensor2", (x, x, x[:3]), RuntimeError, f"{words}.*")


MULADD = OpSpec(
    op=torchkiln.muladd,
    reference=muladd,
    magnitude=lambda a, b, c: (a * b).abs() + c.abs(),
    gradient_magnitude=muladd_gradient_magnitude,
    inputs=muladd_inputs,
    refusals=Refusals(promotes=True, numbers=("a", "b", "c")),
    invalid=muladd_invalid,
    large=muladd_large,
    operations=(2, 2),
    backward_traffic=muladd_backward_traffic,
    opaque=False,
    helpers=("_muladd_backward",),
)
MULADD = with_forms(MULADD, with_addcmul)
