"""Forwards with sums and norms, layers and activations, rotations, and losses, as single ops."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import is_torchs
from torchkiln.patch.fed import added
from torchkiln.patch.fp8 import can_share
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import cast
from torchkiln.patch.report import Replacement
from torchkiln.patch.source.calls import HELPERS, Calls, Names, calls_of, rewrite
from torchkiln.patch.source.code import properties, remade
from torchkiln.patch.source.dropout import is_dropout
from torchkiln.patch.source.feeds import Fed, fed_parameter
from torchkiln.patch.source.heads import Head
from torchkiln.patch.source.layer import act_to_be, compared
from torchkiln.patch.source.loss_calls import may_call
from torchkiln.patch.source.residual import op_of
from torchkiln.patch.source.rotary import Rotary
from torchkiln.patch.source.shared import is_sharable

HEAD_CALLS = {
    "logits": "linear_cross_entropy at {}",
    "loss": "linear_cross_entropy at {}, without logits",
    "inner": "logits of {} for linear_cross_entropy",
}
"""The calls of a head, by its mode."""


@dataclass(frozen=True)
class Rewritten(Plan):
    """The forward of a class with some calls of its submodules as one op each."""

    saved_as: ClassVar[str] = "rewritten"
    takes_options: ClassVar[bool] = True

    owner: type[nn.Module]
    norms: tuple[tuple[str, str], ...]
    """The names of norms that follow a sum, and the ops."""
    layers: tuple[tuple[str, str, str], ...] = ()
    """The names of layers, the names of the activations after them, and the activations."""
    losses: int = 0
    """The number of rewritten calls of torch's cross-entropy."""
    dropouts: tuple[str, ...] = ()
    """The names of dropouts before the sums."""
    shared: tuple[str, ...] = ()
    """The names of layers that share their input with other layers."""
    quiet: tuple[str, ...] = ()
    """The names of norms that may be called between the ``shared`` layers."""
    ropes: int = 0
    """The number of rewritten calls of rotations."""
    angles: str = ""
    """The columns of the returned cos and sin that are equal; "" if unknown."""
    head: tuple[str, ...] = ()
    """The name of a head and its mode, if a loss is made of its logits."""
    fed: tuple[tuple[str, str], ...] = ()
    """The names of norms, and of the modules that read their results in FP8."""
    function: Callable[..., Any] = field(init=False, repr=False, compare=False)
    reads: Fed | None = field(init=False, repr=False, compare=False)
    """The argument of the forward that only layers of the module read."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the first rewritten call."""
        rotates = self.ropes or self.angles
        kinds: dict[str, Any] = {"head": self.head}
        kinds |= {"residual": self.norms, "mlp": self.layers, "rope": rotates, "loss": self.losses}
        return next((kind for kind, calls in kinds.items() if calls), "linear")

    @property
    def is_timed(self) -> bool:  # type: ignore[override]
        """False with rotations: cos and sin of a repeated call are not known to be from the model.

        Also false with a head, which saves memory rather than time.
        """
        return not (self.ropes or self.angles or self.head)

    def class_name(self, original: type[nn.Module]) -> str:
        """A forward with a loss keeps its class name: libraries save the name of a model."""
        return original.__name__ if self.losses or self.head else super().class_name(original)

    def __post_init__(self) -> None:
        reads: list[Fed | None] = [None]

        def change(node: ast.FunctionDef, function: FunctionType) -> None:
            rewrite(node, function, self.names)
            reads.append(fed_parameter(node))

        made = remade(self.owner, change, **HELPERS)
        object.__setattr__(self, "function", made)
        object.__setattr__(self, "reads", reads[-1] if passes_arguments(self.owner) else None)

    def takes_quantized(self, module: Any, x: Tensor, place: int | str | None) -> bool:
        """Whether all layers that read the argument are in FP8."""
        reads = self.reads
        if reads is None:
            return False
        if place != reads.parameter and not (place in {None, 0} and reads.is_first):
            return False
        try:
            layers = [module.get_submodule(name) for name in reads.layers]
        except AttributeError:  # the name is that of a method
            return False
        return can_share(layers, x)

    @property
    def names(self) -> Names:
        """The submodules whose calls are rewritten."""
        return Names(
            [name for name, _ in self.norms],
            self.dropouts,
            [layer for layer, _, _ in self.layers],
            [act for _, act, _ in self.layers],
            self.shared,
            self.quiet,
            properties(self.owner),
            bool(self.losses),
            bool(self.ropes),
            bool(self.angles),
            self.head,
            [norm for norm, _ in self.fed],
            [reader for _, reader in self.fed],
        )

    def method(self, _: type[nn.Module]) -> Callable[..., Any]:
        """The rewritten forward, with the decorators of the original."""
        return self.function

    def __str__(self) -> str:
        calls = [f"dropout_add at {name}" for name in self.dropouts]
        calls += [f"{op} at {name}" for name, op in self.norms]
        calls += [f"linear({act}) at {layer}" for layer, _, act in self.layers]
        if self.shared:
            calls.append(f"one sum of gradients for {', '.join(self.shared)}")
        calls += [f"{norm} in FP8 where {reader} takes it" for norm, reader in self.fed]
        if self.ropes or self.angles:
            calls.append("rope" if self.ropes else "cos and sin for rope")
        if self.head:
            name, mode = self.head
            calls.append(HEAD_CALLS[mode].format(name))
        return ", ".join([*calls, *(["cross_entropy"] if self.losses else [])])

    def forward(self, module: Any, *args: Any, **options: Any) -> Any:
        """The rewritten forward."""
        return self.function(module, *args, **options)


class Rewrites:
    """Finds the modules whose forward is rewritten, given all other replacements."""

    def __init__(
        self,
        matches: Iterable[tuple[Replacement, nn.Module, Match]],
        kinds: Collection[str],
        rotary: Rotary,
        heads: Mapping[nn.Module, Head],
        quantized: AbstractSet[nn.Module] = frozenset(),
        *,
        exact: bool,
    ) -> None:
        self.matches = {module: (row, match) for row, module, match in matches}
        self.kinds = kinds
        self.rotary = rotary
        self.heads = heads
        self.quantized = quantized
        self.exact = exact
        self.known: dict[Any, bool] = {}
        self.calls: dict[Any, Calls | str] = {}
        self.plans: dict[Any, Rewritten] = {}

    def find(self, module: nn.Module, row: Replacement) -> Rewritten | None:
        """The plan of a module, or None. Writes the outcome of its calls, if any, to the row."""
        children = {
            name: child
            for name, child in module.named_modules()
            if name and all(map(str.isidentifier, name.split(".")))
        }
        norms, layers, acts = self.norms(children), self.layers(children), self.acts(children)
        losses = "loss" in self.kinds and not self.exact and may_call(type(module))
        names = Names(
            *(norms, self.dropouts(children), layers, acts, self.wide(children)),
            losses=losses,
            ropes=module in self.rotary.errors,
            angles=module in self.rotary.angles,
            head=tuple(self.heads.get(module, ())),
            readers=self.readers(children),
        )
        if module in self.rotary.reasons:
            row.kind, row.reason = "rope", self.rotary.reasons[module]
        if not names.kinds:
            return None
        names = names._replace(quiet=self.quiet(children), properties=properties(type(module)))
        feeding = [name for name in names.quiet if children[name] in self.matches]
        names = names._replace(feeding=feeding if names.readers else ())
        key = (type(module), *(x if isinstance(x, bool) else frozenset(x) for x in names))
        if key not in self.calls:
            self.calls[key] = calls_of(type(module), names)
        found = self.calls[key]
        if isinstance(found, str):
            row.kind, row.reason = names.kinds[0], found
            return None
        if not any(found):
            return None
        calls = (
            tuple((name, str(op_of(norms[name][1].plan))) for name in found.norms),
            tuple((layer, act, acts[act]) for layer, act in found.layers),
            found.losses,
            tuple(found.dropouts),
            tuple(found.shared),
            tuple(names.quiet) if found.shared else (),
            found.ropes,
            found.angles,
            found.head,
            tuple(found.fed),
        )
        if (type(module), calls) not in self.plans:
            self.plans[type(module), calls] = Rewritten(type(module), *calls)
        plan = self.plans[type(module), calls]
        row.kind, row.now, row.reason = plan.kind, str(plan), ""
        for comparison in self.rotary.errors.get(module, []):
            of_call = Replacement(row.name, row.was)
            comparison.record(of_call)
            worsen(row, of_call)
        for name in found.norms:
            self.compare_norm(row, children[name], *norms[name])
        for layer, act in found.layers:
            self.compare_layer(row, layers[layer], acts[act])
        return None if row.reason else plan

    def norms(self, children: dict[str, nn.Module]) -> dict[str, tuple[Replacement, Match]]:
        """The norms that get a new forward and have an op that includes a sum."""
        if "residual" not in self.kinds:
            return {}
        found = {name: self.matches[m] for name, m in children.items() if m in self.matches}
        return {name: entry for name, entry in found.items() if op_of(entry[1].plan)}

    def quiet(self, children: dict[str, nn.Module]) -> list[str]:
        """The norms whose calls have no side effect."""
        kinds = {
            name: self.matches[m][1].plan.kind for name, m in children.items() if m in self.matches
        }
        torchs = (nn.LayerNorm, nn.RMSNorm)
        return [n for n, m in children.items() if kinds.get(n) == "norm" or is_torchs(m, torchs)]

    def dropouts(self, children: dict[str, nn.Module]) -> list[str]:
        """The dropouts of torch; none if exact, because the op draws other random numbers."""
        return [] if self.exact else [name for name, m in children.items() if is_dropout(m)]

    def layers(self, children: dict[str, nn.Module]) -> dict[str, nn.Linear]:
        """The linear layers of torch, except those that get a product in FP8."""
        if "mlp" not in self.kinds or self.exact:
            return {}
        plain = {name: m for name, m in children.items() if type(m) is nn.Linear}
        return {name: m for name, m in plain.items() if m not in self.quantized}

    def wide(self, children: dict[str, nn.Module]) -> list[str]:
        """The linear layers that may share an input, whose gradients then take long to add."""
        names = [name for name, child in children.items() if type(child) is nn.Linear]
        is_wanted = "linear" in self.kinds and not self.exact
        return [name for name in names if is_wanted and is_sharable(children[name])]

    def readers(self, children: dict[str, nn.Module]) -> list[str]:
        """The modules with layers in FP8."""
        return [n for n, m in children.items() if not self.quantized.isdisjoint(m.modules())]

    def acts(self, children: dict[str, nn.Module]) -> dict[str, str]:
        """The activations that modules compute, by name of the module."""
        given = {n: act_to_be(m, self.matches.get(m, (None, None))[1]) for n, m in children.items()}
        return {name: act for name, act in given.items() if act is not None}

    def compare_norm(
        self, row: Replacement, norm: nn.Module, of_norm: Replacement, match: Match
    ) -> None:
        """Add the errors of a norm to the row."""
        is_bitwise = self.is_bitwise(norm, match)
        worsen(row, of_norm, bitwise=is_bitwise)
        if not is_bitwise and self.exact:
            row.reason = "not bitwise equal"

    def compare_layer(self, row: Replacement, layer: nn.Linear, act: str) -> None:
        """Add the errors of a layer to the row."""
        weight = layer.weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        found = compared(layer, act, weight.dtype, device)
        of_layer = Replacement(row.name, row.was)
        found.record(of_layer)
        worsen(row, of_layer)
        row.reason = row.reason or found.refusal(exact=False)

    def is_bitwise(self, norm: nn.Module, match: Match) -> bool:
        """Whether the op returns the same bits as a sum and the norm's new forward."""
        weight = next(norm.parameters(), torch.empty(0))
        device = torch.device("cpu") if weight.is_meta else weight.device
        key = (match.plan, weight.dtype, device, match.inputs[0].shape)
        if key not in self.known:
            copy = cast(match.copy, weight.dtype, device)
            a = match.inputs[0].to(device, weight.dtype)
            b = a.flip(0)
            with torch.no_grad():
                y, total = added(match.plan, copy, a, b)
                expected = match.plan.forward(copy, a + b)
                self.known[key] = torch.equal(total, a + b) and torch.equal(y, expected)
        return self.known[key]


PASSING = frozenset(("transformers.utils.deprecation",))
"""Modules whose decorators pass arguments on, and read none but those that they rename."""


def passes_arguments(cls: type[nn.Module]) -> bool:
    """Whether no decorator of a forward reads the arguments."""
    function: Any = cls.forward
    while hasattr(function, "__wrapped__"):
        if function.__globals__.get("__name__") not in PASSING:
            return False
        function = function.__wrapped__
    return True


def worsen(row: Replacement, call: Replacement, *, bitwise: bool = True) -> None:
    """Add a call to a row of the largest errors, and of whether all calls are bitwise equal."""
    row.bitwise = row.bitwise is not False and bool(call.bitwise) and bitwise
    if row.error_now is None or (call.error_now or 0.0) > row.error_now:
        row.error_was, row.error_now, row.dtype = call.error_was, call.error_now, call.dtype
