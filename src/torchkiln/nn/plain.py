"""Fast checks of the code that a call of a module runs, and fast reads of module attributes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def is_torchs(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether a call runs the forward of one of these classes and nothing else."""
    return type(module) in classes and "forward" not in module.__dict__ and not has_hooks(module)


MISSING = "no such attribute"
BY_TORCH: dict[tuple[type[nn.Module], str], bool] = {}
"""Classes and names for which torch looks an attribute up in the dicts of an instance."""


def attribute(module: nn.Module, name: str, *default: Any) -> Any:
    """``getattr(module, name, *default)``, without the 1 us that nn.Module takes for parameters.

    As in ``getattr``, an attribute of the class or its own ``__getattr__`` comes first.
    """
    if is_compiling():  # torch.compile would add guards for the table
        return getattr(module, name, *default)
    key = type(module), name
    by_torch = BY_TORCH.get(key)
    if by_torch is None:
        by_torch = BY_TORCH[key] = is_by_torch(*key)
    if by_torch:
        own = module.__dict__
        for place in (own, own["_parameters"], own["_buffers"], own["_modules"]):
            if name in place:
                return place[name]
        if default:  # getattr would take 2 us to raise and catch an exception
            return default[0]
    return getattr(module, name, *default)


def is_by_torch(cls: type[nn.Module], name: str) -> bool:
    """Whether a class has no such attribute, and no look-up of its own."""
    look_ups = cls.__getattr__, cls.__getattribute__
    return not hasattr(cls, name) and look_ups == (
        nn.Module.__getattr__,
        nn.Module.__getattribute__,
    )
