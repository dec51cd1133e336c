"""Sharding rules for :class:`torch.distributed.tensor.DTensor`, registered when it is imported."""

from contextlib import suppress
from types import ModuleType

MODULE = "torch.distributed.tensor"


def register_rules(_: ModuleType) -> None:
    """Registers the rules of all ops.

    Registers nothing if the internals of this torch differ: DTensor then reports a missing rule.
    """
    with suppress(ImportError, AttributeError):
        from torchkiln.distributed import rules  # noqa: PLC0415  imports torch's module

        rules.registered()
