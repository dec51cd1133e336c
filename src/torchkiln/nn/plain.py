"""Whether a call of a module runs its forward and nothing else."""

from __future__ import annotations

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
    """Whether a call of the module runs torch's forward and nothing else."""
    return type(module) in classes and "forward" not in module.__dict__ and not has_hooks(module)
