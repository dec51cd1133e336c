"""The calls of a forward that are rewritten, and the functions that rewritten source calls."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from torchkiln.patch.fed import norm_for
from torchkiln.patch.source.angles import ANGLES, noted, rewrite_angles
from torchkiln.patch.source.code import forward_of
from torchkiln.patch.source.dropout import rewrite_dropouts
from torchkiln.patch.source.feeds import NORM, rewrite_feeds
from torchkiln.patch.source.heads import LOSS_FUNCTION, Head, rewrite_head
from torchkiln.patch.source.layer import LINEAR_ACT, linear_act, rewrite_layers
from torchkiln.patch.source.logits import LOGITS, logits_of, takes_logits
from torchkiln.patch.source.loss_calls import LOSS, loss_of, rewrite_losses
from torchkiln.patch.source.outputs import OUTPUT, output_of
from torchkiln.patch.source.residual import (
    ADD_NORM,
    PLUS,
    add_norm,
    plus,
    rewrite_others,
    rewrite_sums,
)
from torchkiln.patch.source.rope_calls import ROPE, rewrite_ropes, rope_of
from torchkiln.patch.source.shared import SHARED, outputs, rewrite_shared
from torchkiln.patch.source.text import definition, parsed

HELPERS: dict[str, Callable[..., Any]] = {
    ADD_NORM: add_norm,
    PLUS: plus,
    NORM: norm_for,
    LINEAR_ACT: linear_act,
    SHARED: outputs,
    LOSS: loss_of,
    ROPE: rope_of,
    ANGLES: noted,
    LOGITS: logits_of,
    LOSS_FUNCTION: takes_logits,
    OUTPUT: output_of,
}
"""The functions that rewritten source calls."""


class Calls(NamedTuple):
    """The calls of a forward that can become part of one op."""

    norms: list[str]
    layers: list[tuple[str, str]]
    losses: int
    dropouts: list[str]
    shared: list[str]
    ropes: int = 0
    angles: str = ""
    head: tuple[str, ...] = ()
    fed: list[tuple[str, str]] = []  # noqa: RUF012  never changed


class Names(NamedTuple):
    """The submodules whose calls could be part of one op."""

    norms: Collection[str]
    dropouts: Collection[str]
    layers: Collection[str]
    acts: Collection[str]
    wide: Collection[str]
    quiet: Collection[str] = ()
    """Norms whose calls have no side effect."""
    properties: Collection[str] = ()
    """Attributes that are computed when they are read, which may have an effect."""
    losses: bool = False
    """Whether losses of torch may be called."""
    ropes: bool = False
    """Whether rotations are called."""
    angles: bool = False
    """Whether the forward returns cos and sin for rotations."""
    head: tuple[str, ...] = ()
    """The :class:`~torchkiln.patch.source.heads.Head`, if a loss is made of its logits."""
    feeding: Collection[str] = ()
    """Norms whose results may be written in FP8."""
    readers: Collection[str] = ()
    """Modules with layers in FP8."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of replacement for which there are enough modules."""
        pairs = self.layers and self.acts
        rotates = self.ropes or self.angles
        found: dict[str, Any] = {
            "head": self.head,
            "residual": self.norms,
            "mlp": pairs,
            "linear": len(self.wide) > 1 or bool(self.readers),
        }
        found |= {"rope": rotates, "loss": self.losses}
        return [kind for kind, has in found.items() if has]


def rewrite(node: ast.FunctionDef, function: FunctionType, names: Names) -> Calls:
    """Rewrite the definition of a function."""
    if names.head:  # first, because it reads the original source
        rewrite_head(node, function, Head(*names.head))
    count = rewrite_losses(node, function) if names.losses else 0
    ropes = len(rewrite_ropes(node, function)) if names.ropes else 0
    angles = rewrite_angles(node, function, names.properties) if names.angles else ""
    sums = rewrite_sums(node, names.norms)
    dropouts = rewrite_dropouts(node, ADD_NORM, names.dropouts)
    layers = rewrite_layers(node, names.layers, names.acts)
    found = rewrite_shared(node, names.wide, names.quiet, names.properties)
    fed = rewrite_feeds(node, names.feeding, names.readers)
    if sums:  # last, because the other functions take operators, but no call of a helper
        rewrite_others(node)
    return Calls(sums, layers, count, dropouts, found, ropes, angles, names.head, fed)


def calls_of(cls: type[nn.Module], names: Names) -> Calls | str:
    """The calls in the source of a forward, or the reason why they cannot be rewritten."""
    function = forward_of(cls)
    node = function if isinstance(function, str) else definition(function)
    shown = parsed(inspect.unwrap(cls.forward)) if isinstance(node, str) else node
    if shown is None:
        return Calls([], [], 0, [], [])
    found = rewrite(shown, inspect.unwrap(cls.forward), names)
    return node if isinstance(node, str) and any(found) else found
