"""Fast checks of the code that a call of a module runs, and fast reads of module attributes."""

from __future__ import annotations

from typing import Any

from torch import nn
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


def attribute(module: nn.Module, name: str, *default: Any) -> Any:
    """``getattr(module, name, *default)`` without the 0.3 us of torch's look-up of parameters."""
    own = module.__dict__
    if name in own:
        return own[name]
    value = own["_parameters"].get(name)
    if value is None:
        value = own["_buffers"].get(name)
    if value is None:
        value = own["_modules"].get(name)
    return getattr(module, name, *default) if value is None else value
