"""Refused calls: the errors, and the state that a refused call must not change."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from torchkiln.testing.check import check
from torchkiln.testing.compare import Where, bits, require, require_values
from torchkiln.testing.forms import COLLECTIVES, NO_BATCHES
from torchkiln.testing.refusals import kinds_of, refused_calls
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec

REFUSED_FIRST = (NO_BATCHES, COLLECTIVES)
"""Reasons why a transform is refused before the arguments of the call are checked."""


def state(tensors: Iterable[Tensor], device: torch.device) -> list[object]:
    """Settings and tensors that a refused call must not change."""
    found: list[object] = [torch.is_grad_enabled(), torch.get_num_threads()]
    if device.type == "cuda":
        found += [torch.cuda.current_device(), torch.cuda.current_stream(device)]
    for a in tensors:
        found += [a._version, a.is_leaf and a.grad is None]
        if a.layout == torch.strided and not a.is_meta:
            found += bits(a).tolist()
    return found


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU, of which autograd's thread may release some at any time."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


ACCEPTED: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "float": (float, int),
    "int": (int,),
    "SymInt": (int,),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
}
"""Python types that torch.ops accepts for a schema type; for others torch.ops raises an error."""


def reaches_the_op(spec: OpSpec, sample: Sample) -> bool:
    """Whether torch.ops passes these arguments to the op."""
    kinds = kinds_of(spec.overload)
    given = dict(zip(kinds, sample.args, strict=False)) | dict(sample.kwargs)
    return all(accepts(kinds[name], value) for name, value in given.items())


def accepts(kind: str, value: object) -> bool:
    """Whether torch.ops accepts a value for an argument of this type."""
    if value is None:  # torch.ops passes None to the op as an undefined tensor
        return kind.endswith("?") or kind == "Tensor"
    kind, is_list, size = kind.removesuffix("?").partition("[")
    if is_list and not isinstance(value, (tuple, list)):
        return size == "1]" and accepts(kind, value)  # torch.ops makes a list of one element
    items = value if isinstance(value, (tuple, list)) and is_list else [value]
    types = ACCEPTED.get(kind, ())
    return all(
        isinstance(item, types) and (type(item) is not bool or kind == "bool") for item in items
    )


def entries(spec: OpSpec, sample: Sample) -> dict[str, Callable[..., object]]:
    """The entry points of the op, and torch.func transforms of the op."""
    found: dict[str, Callable[..., object]] = {"the function": spec.op}
    if spec.through_ops is not None and reaches_the_op(spec, sample):
        found["torch.ops"] = spec.through_ops
    tensors = sample.take(sample.positions)
    if spec.differentiable and tensors and all(t.layout == torch.strided for t in tensors):
        op = sample.bind(spec.op, sample.positions)
        if spec.excluded.get("vmap") not in REFUSED_FIRST:
            found["the function under vmap"] = lambda *_, **__: torch.func.vmap(
                op, randomness="different"
            )(*(torch.stack([t, t]) for t in tensors))
        floating = all(t.is_floating_point() for t in tensors)
        if floating and spec.excluded.get("func_grad") not in REFUSED_FIRST:
            found["the function under vjp"] = lambda *_, **__: torch.func.vjp(op, *tensors)
    return found


def under_autocast(op: Callable[..., object], *args: object, **kwargs: object) -> object:
    """The call while autocast is on for every kind of device of this machine."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        return op(*args, **kwargs)


def ways_to_refuse(spec: OpSpec, case: Invalid) -> dict[str, Callable[..., object]]:
    """All entry points of the op, each of which must refuse the call."""
    sample = Sample(case.name, case.args, case.kwargs)
    found = entries(spec, sample)
    # Autocast can make a call with a wrong dtype valid, but no other invalid call.
    if "got dtype" not in case.message:
        found["the function under autocast"] = partial(under_autocast, spec.op)
    if spec.differentiable and any(tensor.is_floating_point() for tensor in sample.tensors):
        leaves = sample.map(lambda t: t.detach().requires_grad_(t.is_floating_point()))
        found["the function of leaves"] = lambda *_, **__: leaves.call(spec.op)
    return found


def require_refused(
    spec: OpSpec, case: Invalid, name: str, entry: Callable[..., object], where: Where
) -> None:
    """Check that the call raises the error of the case, with the message of the case."""
    words = f"{case.message}(; .+)?" if case.advises else case.message
    args, kwargs = Sample(case.name, case.args, case.kwargs).arguments(spec.op)
    try:
        result = entry(*args, **kwargs)
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


@check()
def bad_input(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Each invalid call raises the error and message of its spec and changes nothing."""
    gc.collect()  # so that no tensor of another test is freed during a call
    for case in refused_calls(spec, device):
        sample = Sample(case.name, case.args, case.kwargs)
        where = Where(spec, "bad_input", sample)
        for name, entry in ways_to_refuse(spec, case).items():
            before, most = state(sample.tensors, device), allocated(device)
            require_refused(spec, case, name, entry, where)
            same = state(sample.tensors, device) == before and allocated(device) <= most
            require(same, where, "the refused call changed something")
    typical = spec.typical(device, dtype)
    where = Where(spec, "bad_input", typical, "the op after a refusal")
    require_values(typical.call(spec.op), typical, where)
