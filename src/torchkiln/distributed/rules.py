"""The sharding rules of all ops for torch's DTensor.

:func:`register_with_torch` uses torch's ``register_sharding`` and corrects torch's cache key, which
ignores strings, floats and bools: a call with another activation would get the placements of the
first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from torchkiln.distributed import choices, quantized
from torchkiln.distributed.choices import RANDOM, Choices
from torchkiln.distributed.dropout import HANDLERS

Strategy = tuple[list[Placement], list[Placement]]


Rule = Callable[[Any], Choices]

CHOICES: Mapping[str, Rule] = choices.CHOICES | quantized.CHOICES
"""The function of each op by name. All other ops run replicated, except those in ``RANDOM``."""


def replicated(_: SimpleNamespace) -> Choices:
    """No choice: DTensor then replicates all tensors."""
    yield from ()


@cache
def registered() -> dict[OpOverload, Rule]:
    """The rules by op; the first call registers the rules of torchkiln."""
    rules: dict[OpOverload, Rule] = {}
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = full_name.partition("::")
        if namespace == "torchkiln" and name not in RANDOM:
            op = getattr(torch.ops.torchkiln, name).default
            rules[op] = CHOICES.get(name, replicated)
            register_with_torch(op)
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    for name in RANDOM:
        handlers[getattr(torch.ops.torchkiln, name).default] = HANDLERS[name]
    return rules


def has_rule(op: OpOverload) -> bool:
    """Whether an op has a rule."""
    return op in registered()


def register_rule(op: OpOverload, choices: Rule) -> None:
    """Register a rule for an op of another library.

    Args:
        op: an overload, such as ``torch.ops.mine.norm.default``.
        choices: a function of the call, whose attributes are the arguments; tensors have a shape
            and no values. It yields pairs of placements along one dimension of a mesh: a list for
            the results, and a dict for arguments by name. Other arguments are replicated.
    """
    registered()[op] = choices
    register_with_torch(op)


def register_with_torch(op: OpOverload) -> None:
    """Register a rule that looks up the choices of the op."""

    def rule(*args: Any, **kwargs: Any) -> list[Strategy]:
        return strategies_of(op, args, kwargs)

    register_sharding(op)(rule)
    arguments = op._schema.arguments
    static = [i for i, a in enumerate(arguments) if not a.kwarg_only and not is_tensor(a)]
    keywords = [a.name for a in arguments if a.kwarg_only]
    table = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    table[op] = RuntimeSchemaInfo(min(static, default=100), keywords or None, needs_pytree=True)


def is_tensor(argument: Any) -> bool:
    """Whether an argument of an op is a tensor, by its type in the schema."""
    return "Tensor" in str(argument.type)


def strategies_of(op: OpOverload, args: Any, kwargs: Any) -> list[Strategy]:
    """The choices for a call, in the form that register_sharding requires."""
    arguments = op._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    values = {a.name: a.default_value for a in arguments} | given
    tensors = {a.name for a in arguments if is_tensor(a) and values[a.name] is not None}
    names = [name for name in given if name in tensors]
    results = len(op._schema.returns)
    found: list[Strategy] = [([Replicate()] * results, [Replicate()] * len(names))]
    for outputs, inputs in registered()[op](SimpleNamespace(**values)):
        found.append((list(outputs), [inputs.get(name, Replicate()) for name in names]))
    return found
