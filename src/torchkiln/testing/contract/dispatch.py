"""Registration of the op and of its helper ops: schema, Meta, autocast."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchkiln.testing.check import check
from torchkiln.testing.compare import Where, each, gradients, noted, outputs, require, require_same
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.contract.values import SMALL, TINY, relaid
from torchkiln.testing.sample import FLOATING, Result, Sample
from torchkiln.testing.spec import OpSpec


class Recorder(TorchDispatchMode):
    """Records the calls of the ops with the given names."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func._schema.name in self.names:
            self.calls.append((func, args, given))
        return func(*args, **given)


EAGER_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


@check(dtypes=(torch.float32, torch.bfloat16), needs="through_ops")
def opcheck(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.library.opcheck passes: schema, autograd registration, fake tensors, AOT dispatch."""
    returns = spec.overload._schema.returns
    # Torch cannot trace ops that return an argument; the public functions do not call such ops.
    has_alias = any(one.alias_info is not None for one in returns)
    tests = EAGER_TESTS if has_alias else "ALL"
    for i, sample in enumerate(spec.samples(device, dtype, requires_grad=True)):
        if i == 0 or (sample.numel <= TINY and dtype == torch.float32):
            sample.start_generators()
            args, kwargs = sample.arguments(spec.op)
            if spec.written is not None:
                args, kwargs = (), {**spec.written.defaults, **spec.written.given(sample)}
            with noted(Where(spec, "opcheck", sample)):
                torch.library.opcheck(spec.overload, args, kwargs, test_utils=tests)


@check(dtypes=(torch.float32, torch.bfloat16))
def opcheck_helpers(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.library.opcheck of the helper ops passes for the arguments that the op gives them."""
    namespace = spec.overload.namespace
    names = {f"{namespace}::{helper}" for helper in spec.helpers}
    sample = spec.typical(device, dtype, requires_grad=True)
    recorder = Recorder(names)
    with recorder:
        results = outputs(sample.call(spec.op))
        gradients(results, sample.take(spec.wanted(sample)), incoming(spec, results))
    where = Where(spec, "opcheck_helpers", sample)
    seen = {func._schema.name for func, _, _ in recorder.calls}
    require(
        seen == names,
        where,
        f"called {sorted(seen)}, expected {sorted(names)}",
    )
    for func, args, kwargs in recorder.calls:
        plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        torch.library.opcheck(func, plain, kwargs)


def require_same_layout(found: Result, real: Result, where: Where) -> None:
    """Compare shapes, dtypes, and strides of dimensions larger than 1."""

    def described(tensor: Tensor) -> tuple[object, ...]:
        strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        return tuple(tensor.shape), tensor.dtype, strides if tensor.numel() else None

    for pair, place in each((found, real), where):
        left, right = map(described, pair)
        require(left == right, place, f"{left}, but the real result has {right}")


def empty_like(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """A tensor with the same shape, strides and dtype; a fake one if a mode makes fake tensors."""
    size, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(size, strides, dtype=tensor.dtype, device=device or tensor.device)


on_meta = partial(empty_like, device="meta")


@check(dtypes=FLOATING)
def meta_and_fake(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Meta and fake tensors give the shape, dtype and strides of the real result and gradients."""
    mode = FakeTensorMode()
    for sample in spec.samples(device, dtype):
        if sample.numel > SMALL:
            continue
        others = (
            relaid(sample) if dtype == torch.float32 else ()
        )  # strides do not depend on the dtype
        # meta and fake tensors have neither data nor an address
        known: dict[object, tuple[Result, Result]] = {}
        for moved in (sample, *(moved for moved, _ in others)):
            real = moved.call(spec.op)
            where = Where(spec, "meta_and_fake", moved)
            key = tuple((tensor.shape, tensor.stride()) for tensor in moved.tensors)
            if key not in known:
                meta = moved.map(on_meta).call(spec.op)
                with mode:
                    known[key] = meta, moved.map(empty_like).call(spec.op)
            meta, fake = known[key]
            require_same_layout(meta, real, where.at("meta"))
            require_same_layout(fake, real, where.at("fake"))
            for (one, other), place in each((fake, real), where.at("fake")):
                require(one.device == other.device, place, f"on {one.device}")
        require_same_gradient_layout(spec, sample)


def require_same_gradient_layout(spec: OpSpec, sample: Sample) -> None:
    """Compare the layouts of gradients of the call on meta tensors and of the real call."""
    results = []
    for call in (sample, sample.map(on_meta)):
        leaves = spec.leaves(call)
        called = outputs(leaves.call(spec.op))
        inputs = [leaves.args[i] for i in spec.wanted(leaves)]
        results.append(gradients(called, inputs, incoming(spec, called)))
    real, meta = results
    require_same_layout(meta, real, Where(spec, "meta_and_fake", sample, "gradient"))


@check()
def autocast(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Autocast converts the arguments that the spec names; gradients have their original dtypes."""
    for low in (torch.bfloat16, torch.float16):
        for sample in spec.samples(device, dtype):
            if sample.numel > SMALL:
                continue
            where = Where(spec, "autocast", sample, f"to {low}")
            cast = sample
            for i in spec.autocast:
                tensor = i in cast.positions
                if tensor and cast.args[i].dtype in (torch.float32, torch.float16, torch.bfloat16):
                    cast = cast.substitute(i, cast.args[i].to(low))
            leaves = spec.leaves(sample)
            with torch.autocast(device.type, low):
                found = leaves.call(spec.op)
            require_same(found, cast.call(spec.op), where)
            wanted, results = spec.wanted(sample), outputs(found)
            grads = gradients(results, leaves.take(wanted), incoming(spec, results))
            for i, grad in zip(wanted, grads, strict=True):
                same = grad.dtype == leaves.args[i].dtype
                require(same, where, f"argument {i}: gradient {grad.dtype}")


class Tagged(Tensor):
    """A subclass that adds no code."""


@check()
def subclasses(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """A result has the subclass of its inputs, and __torch_function__ gets the call."""
    seen: list[object] = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(  # type: ignore[no-untyped-call]
                func, types, args, kwargs or {}
            )

    sample = spec.typical(device, dtype)
    where = Where(spec, "subclasses", sample)
    expected = sample.call(spec.op)
    for subclass in (Tagged, Watching):
        found = sample.map(lambda t, s=subclass: t.as_subclass(s)).call(spec.op)  # type: ignore[misc]
        for output in outputs(found):
            require(type(output) is subclass, where, f"{type(output)}, expected {subclass}")
        plain = tuple(output.as_subclass(Tensor) for output in outputs(found))
        require_same(plain, expected, where)
    either = spec.overload in seen or spec.overload.overloadpacket in seen
    require(either, where, f"__torch_function__ saw {seen}")
