"""Calls that drop copies of the changed parameters after each step of an optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook


def call_after_steps(forget: Callable[[set[int]], None]) -> None:
    """Call ``forget`` after each step with the ids of the parameters that it has changed.

    Fused optimizers, and those that write through ``.data``, change no ``_version``. A compiled
    step changes it.
    """

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_compiling():
            forget({id(p) for group in optimizer.param_groups for p in group["params"]})

    register_optimizer_step_post_hook(hook)
