"""Refusals."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import torch
from torch import Tensor

from torchkiln.testing.check import check
from torchkiln.testing.compare import Where, bits, require
from torchkiln.testing.spec import Invalid, OpSpec, Sample


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


def entries(spec: OpSpec, case: Invalid) -> dict[str, Callable[..., object]]:
    """The ways to the op that have to refuse the call in the same words."""
    found: dict[str, Callable[..., object]] = {"the function": spec.op}
    # torch.ops refuses what is neither a tensor nor None by itself, in words of its own.
    if all(a is None or isinstance(a, Tensor) for a in case.args):
        found["torch.ops"] = spec.overload
    tensors = [a for a in case.args if isinstance(a, Tensor) and a.layout == torch.strided]
    if len(tensors) == len(case.args):
        found["the function under vmap"] = lambda *args, **kwargs: torch.func.vmap(
            lambda *rows: spec.op(*rows, **kwargs)
        )(*(torch.stack([a, a]) for a in args))
        if all(a.is_floating_point() for a in tensors):
            found["the function under vjp"] = lambda *args, **kwargs: torch.func.vjp(
                lambda *leaves: spec.op(*leaves, **kwargs), *args
            )
    if "device" in case.message or any(a is None for a in case.args):  # what no cast mends
        found["the function under autocast"] = lambda *args, **kwargs: under_autocast(
            spec.op, *args, **kwargs
        )
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
    for case in spec.invalid(device):
        sample = Sample(case.name, case.args, case.kwargs)
        where = Where(spec, "bad_input", sample)
        for name, entry in entries(spec, case).items():
            before = state(case.args, device)
            try:
                result = sample.call(entry)
            except Exception as error:
                message = str(error).split("\n")[0]
                require(
                    type(error) is case.error and re.fullmatch(case.message, message) is not None,
                    where,
                    f"{name} raised {type(error).__name__}({message!r}), expected "
                    f"{case.error.__name__} matching {case.message!r}",
                )
            else:
                raise AssertionError(f"{where}: {name} returned {result!r}, expected an error")
            require(state(case.args, device) == before, where, "the refused call changed something")
    typical = spec.typical(device, dtype)
    require(
        bool(typical.call(spec.op).isfinite().all()),
        Where(spec, "bad_input", typical),
        "the op does not work after a refusal",
    )
