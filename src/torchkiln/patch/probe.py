"""Copies of a module with random parameters, and calls of these copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs")))


@contextmanager
def usual_modes() -> Iterator[None]:
    """A context with gradients, without inference mode and autocast; random states are restored.

    New tensors are on the CPU, also if the program has another default device.
    """
    is_usual = torch.get_default_device().type == "cpu"
    with (
        nullcontext() if is_usual else torch.device("cpu"),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng([]),
    ):
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed float64 numbers, without a change to torch's random state."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class, in evaluation mode, without hooks.

    Parameters and children are shared. Buffers, lists, dicts and sets are copied, so that a call
    cannot change the original through them.
    """
    new = object.__new__(type(module))
    for name, value in vars(module).items():
        new.__dict__[name] = value.copy() if isinstance(value, (list, dict, set)) else value
    for name, buffer in new._buffers.items():
        new._buffers[name] = None if buffer is None else buffer.clone()
    for name in ("_parameters", "_modules"):
        new.__dict__[name] = dict(vars(module)[name])
    for name in HOOKS:
        new.__dict__[name] = type(vars(module)[name])()
    new.__dict__["training"] = False
    return new


def random_copy(module: nn.Module) -> nn.Module:
    """A leaf with random float64 parameters on the CPU; the module may be on the meta device."""
    new = shallow_copy(module)
    for seed, (name, parameter) in enumerate(module.named_parameters(recurse=False)):
        random = numbers(*parameter.shape, seed=seed + 1)
        new._parameters[name] = nn.Parameter(random, requires_grad=False)
    return new


def cast(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy in another dtype and on another device, with copied parameters."""
    new = shallow_copy(module)
    for name, parameter in new._parameters.items():
        if parameter is not None:
            moved = converted(parameter.detach(), dtype, device)
            new._parameters[name] = nn.Parameter(moved.clone(), requires_grad=False)
    for name, buffer in new._buffers.items():
        new._buffers[name] = None if buffer is None else converted(buffer, dtype, device)
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else cast(child, dtype, device)
    return new


def converted(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on a device, in another dtype if it has floating-point numbers."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


@torch.no_grad()
def run(module: nn.Module, *args: Any) -> Any:
    """The result of a module's forward, without its hooks; None if it raises.

    Random states are restored after the call.
    """
    device = next((x.device for x in args if isinstance(x, Tensor)), torch.device("cpu"))
    generators = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(generators), torch.autocast(device.type, enabled=False):
            return type(module).forward(module, *args)
    except Exception:
        return None


def is_close(found: Any, expected: Tensor, scale: Tensor | None = None) -> bool:
    """Whether results are equal up to the precision of float32, which a module may compute in.

    The error is relative to ``scale``, by default the largest number of a row.
    """
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if scale is None:
        scale = expected.abs().amax(-1, keepdim=True)
    return bool(((found.double() - expected).abs() <= 1e-5 * scale.clamp_min(1e-30)).all())


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The root mean square of the error, divided by the root mean square of the truth."""
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-300))


def first_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype of the first tensor of floating-point numbers."""
    return next((x.dtype for x in tensors if x.is_floating_point()), None)
