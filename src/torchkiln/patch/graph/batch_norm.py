"""Forwards with chains of modules as one call, for ``torchkiln.fuse``."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx, nn

from torchkiln.nn.convolution import conv_norm_act, is_batch_norm, norm_act
from torchkiln.patch.formula.reads import Reader, Reads, reading
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import Watch
from torchkiln.patch.graph.branches import separate
from torchkiln.patch.graph.chain import CallTracer, Chain, chain_in, norms, rewrite
from torchkiln.patch.graph.derived import Derived, is_derived, still_calls
from torchkiln.patch.graph.pool import conv_norm_act_pool, norm_act_pool
from torchkiln.patch.graph.recompute import (
    light_conv_norm_act,
    light_conv_norm_act_pool,
    light_norm_act,
)
from torchkiln.patch.plan import Plan, plan_of
from torchkiln.patch.probe import shallow_copy
from torchkiln.patch.report import Replacement

Name = tuple[str, str, str]
"""A global of generated code: its name, a module, a path in the module ("" for the module)."""

Function = Callable[..., Any]
CALLS: dict[tuple[bool, bool], Function] = {
    (False, False): norm_act,
    (True, False): conv_norm_act,
    (False, True): norm_act_pool,
    (True, True): conv_norm_act_pool,
}
"""The function of a chain, by two flags: whether it has a convolution, whether a max pool."""

INPUTS: dict[Any, int] = {conv_norm_act: 2, conv_norm_act_pool: 3}
"""The index of the input among the arguments."""

LIGHT: dict[Any, Function] = {
    norm_act: light_norm_act,
    conv_norm_act: light_conv_norm_act,
    conv_norm_act_pool: light_conv_norm_act_pool,
}
"""The variants of these functions whose inputs and results backward may compute again."""

FUNCTIONS = {call.__name__: call for call in (*CALLS.values(), *LIGHT.values())}
"""The functions of torchkiln that a forward calls."""


@dataclass(frozen=True)
class FusedForward(Plan):
    """The traced forward of a module, with chains as one call each."""

    kind: ClassVar[str] = "batch_norm"
    saved_as: ClassVar[str] = "fused"

    source: str
    names: tuple[Name, ...]
    count: int
    """The number of arguments of the forward."""
    reads: Reads = Reads()  # noqa: RUF009  immutable
    """The attributes that the forward read, and the modules whose formula a call contains."""
    children: tuple[str, ...] = ()
    """The names of the submodules, which a container calls in turn."""
    derived: tuple[Derived, ...] = ()
    """The classes of batch norms that are derived from torch's."""
    function: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scope = {name: found(module, path) for name, module, path in self.names}
        exec(compile(self.source, "<torchkiln.fuse>", "exec"), scope)
        object.__setattr__(self, "function", scope["forward"])

    def settings(self) -> dict[str, Any]:
        """The fields. In ``names``, functions of torchkiln have an empty name of their module."""
        ours = {(call.__module__, call.__name__) for call in FUNCTIONS.values()}
        names = tuple(
            (name, "" if (module, path) in ours else module, path)
            for name, module, path in self.names
        )
        return {**super().settings(), "names": names, "reads": self.reads.settings()}

    @classmethod
    def loaded(cls, settings: dict[str, Any]) -> Plan:
        """The plan with these settings from a pickle."""
        names = tuple(
            (name, module or FUNCTIONS[path].__module__, path)
            for name, module, path in settings["names"]
        )
        reads = Reads.loaded(settings["reads"])
        return super().loaded({**settings, "names": names, "reads": reads})

    def __str__(self) -> str:
        return "its forward, with conv_bn_act and bn_act"

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the arguments are tensors, and attributes, children and classes are unchanged."""
        is_traced = len(args) == self.count and all(isinstance(x, Tensor) for x in args)
        if not is_traced or tuple(module._modules) != self.children:
            return False
        return self.reads.hold(module) and all(still_calls(*pair) for pair in self.derived)

    def forward(self, module: Any, *args: Any, **_: Any) -> Any:
        """The result of the generated function."""
        return self.function(module, *args)


def found(module: str, path: str) -> Any:
    """The object at a path in a module."""
    parts = path.split(".") if path else []
    return functools.reduce(getattr, parts, importlib.import_module(module))


def named(name: str, value: object) -> Name | None:
    """The name of a global; None if it cannot be imported again."""
    if isinstance(value, ModuleType):
        return name, value.__name__, ""
    if isinstance(value, float) and name in ("inf", "nan"):
        return name, math.__name__, name
    module, path = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    try:
        return (name, module, path) if found(module, path) is value else None
    except (ImportError, AttributeError, ValueError):
        return None


class TracedForward(NamedTuple):
    """The calls of a module's forward."""

    graph: fx.Graph
    arguments: int
    """The number of arguments of the forward."""
    reads: Reads


def traced(module: nn.Module) -> TracedForward | str:
    """The calls of a module's forward, or the reason why it cannot be traced."""
    if "forward" in vars(module):
        return "its forward is an attribute of the instance"
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in parameters):
        return "its forward has optional arguments"
    reader = Reader(takes_tensors=True)
    root = shallow_copy(module)
    object.__setattr__(root, "__class__", reading(type(module), reader))
    watch, graphs = Watch(), []
    try:
        with torch.random.fork_rng([]):
            random = torch.get_rng_state()
            for training in (True, False):
                root.__dict__["training"] = training
                with watch:
                    graph = CallTracer().trace(root)
                for node in graph.nodes:
                    node.type = None  # an annotation may name a type that cannot be imported
                graphs.append(graph)
            if not torch.equal(random, torch.get_rng_state()):
                raise NoFormulaError("it draws random numbers")
        watch.check(variables=False)
        reader.note_globals(watch.globals)
        reads = reader.reads()
    except Exception as error:  # any error, from a forward of traced values
        reason = watch.reason or str(error).strip().partition(". ")[0]
        return f"its forward cannot be traced: {reason}"
    if any(name not in vars(module) for name in vars(root)):
        return "its forward makes a tensor that depends on no argument"
    one, other = (graph.python_code("self").src for graph in graphs)
    if one != other:
        return "its forward depends on training"
    return TracedForward(graphs[0], len(parameters), reads)


def lighten(fused: dict[fx.Node, tuple[Chain, Replacement]]) -> None:
    """Mark chains whose result only another chain reads: backward computes it again."""
    for node, (chain, row) in fused.items():
        if node.target in (norm_act, conv_norm_act):
            user = next(iter(node.users)) if len(node.users) == 1 else node
            at = INPUTS.get(user.target, 0)
            takes = user in fused and [a for a, x in enumerate(user.args) if x is node] == [at]
            keeps = not takes or chain.residual is not None
            node.args = (*node.args, keeps)
            row.now += "" if keeps else ", again in backward"
    for node in fused:
        node.target = LIGHT.get(node.target, node.target)


def find(
    module: nn.Module, rows: dict[str, Replacement], *, recompute: bool = False
) -> FusedForward | None:
    """The plan of a module; ``rows`` are the batch norms among its children that may change."""
    trace = traced(module)
    if isinstance(trace, str):
        for row in rows.values():
            row.reason = trace
        return None
    graph, count, reads = trace
    for row in rows.values():
        row.reason = "its module does not call it"
    fused: dict[fx.Node, tuple[Chain, Replacement]] = {}
    for norm in list(norms(module, graph)):
        called = rows.get(str(norm.target))
        if called is None:
            continue
        chain = chain_in(module, graph, norm)
        if isinstance(chain, str):
            called.reason = chain
            continue
        call = rewrite(graph, chain, CALLS[chain.conv is not None, chain.pool is not None])
        fused[call] = chain, called
        reads += chain.reads
        name = "bn_act" if chain.conv is None else "conv_bn_act"
        more = "with the residual" if chain.residual else "with the max pool" if chain.pool else ""
        called.now = f"{name}({', '.join(filter(None, (chain.act, more)))})"
        called.reason, called.outcome = "", "replaced"
    if not fused:
        return None
    if recompute:
        lighten(fused)
    separate(module, graph, {node: chain for node, (chain, _) in fused.items()})
    code = graph.python_code("self")
    used = {n: v for n, v in code.globals.items() if re.search(rf"\b{n}\b", code.src)}
    places = [named(name, value) for name, value in used.items()]
    if None in places:
        for row in rows.values():
            row.now, row.outcome, row.reason = "", "kept", "its forward calls a local function"
        return None
    found = tuple(place for place in places if place)
    derived = dict.fromkeys(chain.derived for chain, _ in fused.values() if chain.derived)
    children = tuple(module._modules)
    return FusedForward(code.src, found, count, reads, children, tuple(derived))


def find_all(
    model: nn.Module, refusal: Callable[[str, nn.Module], str | None], *, recompute: bool = False
) -> tuple[list[Replacement], list[tuple[nn.Module, FusedForward]]]:
    """A row for each batch norm, and the plans of the modules that call them.

    ``refusal`` returns the reason to leave the batch norm of this name unchanged, or "". None if it
    gets no row, because another kind may replace it.
    """
    all_rows: list[Replacement] = []
    plans: list[tuple[nn.Module, FusedForward]] = []
    for prefix, module in model.named_modules():
        rows: dict[str, Replacement] = {}
        for name, child in module.named_children():
            is_norm = is_batch_norm(child) or is_derived(child)
            if not is_norm or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                continue
            path = f"{prefix}.{name}" if prefix else name
            reason = refusal(path, child)
            if reason is None:
                continue
            row = Replacement(path, type(child).__name__, "batch_norm", reason=reason)
            all_rows.append(row)
            if not row.reason and isinstance(plan_of(module), FusedForward):
                row.reason = "its module was replaced before"
            if not row.reason:
                rows[name] = row
        plan = find(module, rows, recompute=recompute) if rows else None
        if plan is not None:
            plans.append((module, plan))
    return all_rows, plans
