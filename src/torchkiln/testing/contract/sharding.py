"""The sharding rules of ops, tested in one process that simulates all devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchkiln.testing.check import UnavailableError, check
from torchkiln.testing.compare import outputs
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec

MESHES = ((2,), (2, 2))


class Call(NamedTuple):
    """A call of an op, or of a helper that its gradient uses."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]


class Record(TorchDispatchMode):
    """Records the calls of ops that have a sharding rule."""

    def __init__(self, has_rule: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_rule = has_rule
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if self.has_rule(func):
            results = result if isinstance(result, tuple) else (result,)
            self.calls.append(Call(func, args, dict(kwargs or {}), results))
        return result


def calls_of(spec: OpSpec, sample: Sample, has_rule: Callable[[Any], bool]) -> list[Call]:
    """The calls of forward without a gradient, and of forward and backward with one."""
    with Record(has_rule) as record:
        with torch.no_grad():
            sample.call(spec.op)
        wanted = spec.wanted(sample)
        if wanted:
            leaves = spec.leaves(sample)
            results = [y for y in outputs(leaves.call(spec.op)) if y.requires_grad]
            grads = [
                torch.ones_like(y) * torch.arange(1, y.numel() + 1).view(y.shape).cos()
                for y in results
            ]
            torch.autograd.grad(results, leaves.take(wanted), grads, allow_unused=True)
    return record.calls


@contextmanager
def process_group(size: int) -> Iterator[None]:
    """A process group of torch's fake backend: no other process exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    if dist.is_initialized():
        raise UnavailableError("torch.distributed is initialised in this process")
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@check(dtypes=(torch.float64,), device="cpu", slow=True)
def sharding(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Shards of arguments give the results of whole ones, by every choice of the DTensor rules."""
    if not dist.is_available():
        raise UnavailableError("this torch has no torch.distributed")
    from torch.distributed._local_tensor import LocalTensorMode  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    from torchkiln.distributed import rules  # noqa: PLC0415

    if spec.overload not in rules.registered():
        raise UnavailableError("the op has no sharding rule")
    samples = [s for s in spec.inputs(device, dtype) if all(t.numel() for t in s.tensors)]
    calls: dict[str, tuple[str, Call]] = {}
    for sample in samples:
        for call in calls_of(spec, sample, rules.has_rule):
            found = rules.strategies_of(call.op, call.args, call.kwargs)
            calls.setdefault(f"{call.op}: {found}", (sample.name, call))
    for shape in MESHES:
        size = torch.Size(shape).numel()
        with process_group(size), LocalTensorMode(size):
            mesh = init_device_mesh("cpu", shape)
            for name, call in calls.values():  # one call for each list of choices
                require_choices(f"{spec.name}: sharding: {name}: {call.op}", call, mesh)


def require_choices(where: str, call: Call, mesh: Any) -> None:
    """Run a call with each choice of placements; on a mesh of two dimensions, pairs of choices."""
    from torchkiln.distributed import rules  # noqa: PLC0415

    def described(value: Any) -> Any:
        return SimpleNamespace(shape=value.shape, mesh=mesh) if isinstance(value, Tensor) else value

    options = {name: described(value) for name, value in call.kwargs.items()}
    found = rules.strategies_of(call.op, tuple(map(described, call.args)), options)
    chosen = [(one,) for one in found] if mesh.ndim == 1 else list(pairwise([*found, found[0]]))
    tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    for each in chosen:
        inputs = list(zip(*(inputs for _, inputs in each), strict=True))
        if not all(map(partial(is_divisible, mesh), tensors, inputs)):
            continue
        placed = dict(
            zip(map(id, tensors), map(partial(sharded, mesh), tensors, inputs), strict=True)
        )
        args = [placed.get(id(value), value) for value in call.args]
        kwargs = {name: placed.get(id(value), value) for name, value in call.kwargs.items()}
        with torch.no_grad():
            results = call.op(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        placements = zip(*(outputs for outputs, _ in each), strict=True)
        for one, expected, wanted in zip(results, call.results, placements, strict=True):
            if expected is None or expected.numel() == 0:
                continue
            said = f"{where}: {', '.join(map(str, wanted))}"
            if tuple(one.placements) != wanted:
                raise AssertionError(f"{said}: got {one.placements}")
            whole = one.full_tensor()
            for on_device in whole._local_tensors.values():
                try:
                    torch.testing.assert_close(on_device, expected, equal_nan=True)
                except AssertionError as error:
                    error.add_note(said)
                    raise


def is_divisible(mesh: Any, tensor: Tensor, placements: tuple[Any, ...]) -> bool:
    """Whether each device gets an element; torch does not use a choice otherwise."""
    parts: dict[int, int] = {}
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            parts[placement.dim] = parts.get(placement.dim, 1) * size
    return all(tensor.shape[dim] >= count for dim, count in parts.items())


def sharded(mesh: Any, tensor: Tensor, placements: tuple[Any, ...]) -> Any:
    """A DTensor with these placements; parts of a sum are equal on all devices."""
    from torch.distributed._local_tensor import LocalTensor  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor  # noqa: PLC0415

    whole = [Replicate() if p.is_partial() else p for p in placements]
    copies = LocalTensor({rank: tensor.detach() for rank in range(mesh.size())})
    found = distribute_tensor(copies, mesh, whole, src_data_rank=None)
    parts = [size for size, p in zip(mesh.shape, placements, strict=True) if p.is_partial()]
    if not parts:
        return found
    local = found.to_local() / torch.Size(parts).numel()
    shape, stride = found.shape, found.stride()
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride, run_check=False)
