"""Refusals."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torchkiln.testing.check import check
from torchkiln.testing.compare import Where, bits, outputs, require
from torchkiln.testing.spec import OpSpec, Sample


def state(args: tuple[object, ...], device: torch.device) -> list[object]:
    """All that a refused call must leave as it was."""
    found: list[object] = [torch.is_grad_enabled(), torch.get_num_threads()]
    if device.type == "cuda":
        found += [torch.cuda.current_device(), torch.cuda.memory_allocated(device)]
        found += [torch.cuda.current_stream(device)]
    for a in args:
        if isinstance(a, Tensor):
            found += [a._version, a.is_leaf and a.grad is None]
            if a.layout == torch.strided and not a.is_meta:
                found += bits(a).tolist()
    return found


# What torch.ops takes for an argument of a schema; it refuses all else in words of its own. None
# reaches an op as a tensor that is not defined.
ACCEPTED: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, type(None)),
    "Optional[Tensor]": (Tensor, type(None)),
    "float": (float, int),
    "Optional[float]": (float, int, type(None)),
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "Optional[List[int]]": (int, tuple, list, type(None)),
    "Optional[int]": (int, torch.dtype, type(None)),
}


def reaches_the_op(spec: OpSpec, sample: Sample) -> bool:
    """Whether torch.ops hands these arguments on."""
    kinds = {a.name: str(a.type) for a in spec.overload._schema.arguments}
    given = dict(zip(kinds, sample.args, strict=False)) | dict(sample.kwargs)
    return all(accepts(kinds[name], value) for name, value in given.items())


def accepts(kind: str, value: object) -> bool:
    """Whether torch.ops takes a value for an argument of this type."""
    if kind == "List[int]":
        return isinstance(value, (tuple, list)) and all(isinstance(item, int) for item in value)
    return isinstance(value, ACCEPTED.get(kind, ()))


def entries(spec: OpSpec, sample: Sample) -> dict[str, Callable[..., object]]:
    """The ways to the op that have to refuse the call in the same words."""
    found: dict[str, Callable[..., object]] = {"the function": spec.op}
    if reaches_the_op(spec, sample):
        found["torch.ops"] = spec.overload
    tensors = sample.take(sample.positions)
    if tensors and all(t.layout == torch.strided for t in tensors):
        op = sample.bind(spec.op, sample.positions)
        found["the function under vmap"] = lambda *_, **__: torch.func.vmap(
            op, randomness="different"
        )(*(torch.stack([t, t]) for t in tensors))
        if all(t.is_floating_point() for t in tensors):
            found["the function under vjp"] = lambda *_, **__: torch.func.vjp(op, *tensors)
    return found


def under_autocast(op: Callable[..., object], *args: object, **kwargs: object) -> object:
    """The call while autocast is on for every kind of device there is."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        return op(*args, **kwargs)


@check()
def bad_input(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Each invalid call raises the error and message of its spec and changes nothing."""
    gc.collect()  # so that nothing of other tests goes away during a call
    for case in spec.invalid(device):
        sample = Sample(case.name, case.args, case.kwargs)
        where = Where(spec, "bad_input", sample)
        ways = entries(spec, sample)
        # What no cast mends.
        if "device" in case.message or any(a is None for a in case.args):
            ways["the function under autocast"] = partial(under_autocast, spec.op)
        if spec.inplace is not None:
            ways["the function in place"] = spec.inplace
        for name, entry in ways.items():
            words = case.message
            if entry is spec.inplace:  # which has a name of its own
                words = words.replace(f"{spec.name}: ", f"{spec.name}_: ")
            before = state(case.args, device)
            try:
                result = sample.call(entry)
            except Exception as error:
                message = str(error).split("\n")[0]
                require(
                    type(error) is case.error and re.fullmatch(words, message) is not None,
                    where,
                    f"{name} raised {type(error).__name__}({message!r}), expected "
                    f"{case.error.__name__} matching {words!r}",
                )
            else:
                raise AssertionError(f"{where}: {name} returned {result!r}, expected an error")
            require(state(case.args, device) == before, where, "the refused call changed something")
    typical = spec.typical(device, dtype)
    require(
        all(bool(output.isfinite().all()) for output in outputs(typical.call(spec.op))),
        Where(spec, "bad_input", typical),
        "the op does not work after a refusal",
    )
