"""Records the arguments of modules in a call of the model, and restores the model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class Conversion(NamedTuple):
    """Functions around a forward."""

    arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    result: Callable[[Any], Any]


@dataclass(frozen=True)
class Given:
    """The arguments of a call."""

    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, example: Any) -> Given:
        """The arguments from an example: a mapping, a tuple or a single value."""
        if isinstance(example, Mapping):
            return cls((), dict(example))
        return cls(example if isinstance(example, tuple) else (example,), {})

    def leaves(self) -> Given:
        """The arguments with detached tensors; each keeps its ``requires_grad``."""

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().requires_grad_(value.requires_grad)

        return Given(*tree_map(leaf, (self.args, self.options)))

    def values(self, module: nn.Module) -> list[Any]:
        """All values that the call of a module depends on, its parameters included."""
        return [*tree_leaves((self.args, self.options)), *module.parameters()]


def calls_of_modules(
    model: nn.Module,
    modules: Sequence[nn.Module],
    example: Any,
    conversions: Mapping[nn.Module, Conversion] | None = None,
) -> dict[nn.Module, Given]:
    """The arguments of the first call of each module in a call of the model.

    ``conversions`` are functions around the forwards of some modules.
    """
    given: dict[nn.Module, Given] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if module not in given:
            given[module] = Given(args, options).leaves()

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    for module, (arguments, result) in (conversions or {}).items():
        hooks += [
            module.register_forward_pre_hook(lambda _, given, change=arguments: change(given)),
            module.register_forward_hook(lambda _, __, made, change=result: change(made)),
        ]
    try:
        with preserved(model):
            call = Given.of(example)
            model(*call.args, **call.options)
    finally:
        for hook in hooks:
            hook.remove()
    return given


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """A context that restores buffers and random states; gradients are on only in training."""
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    trains = model.training and torch.is_grad_enabled()
    gpus = {x.device for x in (*model.parameters(), *buffers) if x.device.type == "cuda"}
    try:
        with torch.random.fork_rng(gpus), torch.set_grad_enabled(trains):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
