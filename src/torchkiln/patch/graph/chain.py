"""Chains of convolution, batch norm, residual sum and activation in a traced forward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchkiln.nn.convolution import CONVOLUTIONS, is_batch_norm
from torchkiln.nn.plain import has_hooks, is_torchs
from torchkiln.patch.formula.activation import computed, computed_in_place
from torchkiln.patch.formula.reads import Reads
from torchkiln.patch.graph.derived import Derived, inside, is_derived
from torchkiln.patch.graph.pool import is_max_pool

SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
IN_PLACE = (operator.iadd, "add_")


FACTS = ("shape", "ndim", "dtype", "device", "size", "dim")
"""Attributes and methods of tensors whose values are no tensors."""


def is_fact(node: fx.Node) -> bool:
    """Whether a node computes a size, a dtype or a device."""
    if node.op == "call_method":
        return node.target in FACTS
    if node.target is getattr:
        return node.args[1] in FACTS
    given = node.all_input_nodes
    is_operator = node.op == "call_function" and node.target in OPERATORS
    return is_operator and len(given) > 0 and all(map(is_fact, given))


OPERATORS = frozenset(f for f in vars(operator).values() if callable(f))


class TensorProxy(fx.Proxy):
    """A traced value that is an instance of ``Tensor`` for ``isinstance``, as in a real call.

    Sizes are not: torch would read the memory of a tensor among the sizes of ``torch.empty``.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self) if is_fact(self.node) else Tensor


def changing(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    """An in-place operator of a traced value; torch would trace the out-of-place operator."""

    def operate(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return operate


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior"):
    setattr(TensorProxy, f"__{_name}__", changing(getattr(operator, _name)))


class CallTracer(fx.Tracer):
    """Records the calls of a module; every call of a submodule is one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """True for every submodule."""
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A traced value."""
        return TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """The node of a :class:`TensorProxy`. Torch would treat the proxy as a constant."""
        return a.node if type(a) is TensorProxy else super().create_arg(a)


@dataclass(frozen=True)
class Chain:
    """The calls that become one call."""

    norm: fx.Node
    between: tuple[fx.Node, ...]
    """Identities and the sum, in order."""
    end: fx.Node
    """The activation; the batch norm if none follows."""
    residual: fx.Node | None
    act: str
    conv: fx.Node | None = None
    """The convolution before the batch norm, if it becomes part of the call."""
    pool: fx.Node | None = None
    """The max pool after the activation, if it becomes part of the call."""
    in_place: bool = False
    """Whether the sum has the memory and the dtype of the norm's result."""
    derived: Derived | None = None
    """The class of the batch norm, if it is derived from torch's."""
    reads: Reads = Reads()  # noqa: RUF009  immutable
    """Conditions on the modules whose formula is part of the call."""

    @property
    def last(self) -> fx.Node:
        """The call that returns the result of the chain."""
        return self.pool or self.end


def called_module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """The submodule that a node calls with one argument."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return root.get_submodule(str(node.target))


def activation_of(root: nn.Module, node: fx.Node) -> tuple[str, Reads] | None:
    """The activation that a node computes from its only tensor, and the conditions for that."""
    module = called_module(root, node)
    if module is not None:
        if has_hooks(module) or "forward" in vars(module):
            return None
        found = computed_in_place(module)
        if isinstance(found, str):
            return None
        name = str(node.target)
        own = Reads(parts=((name, type(module)),))
        return found.name, own + found.trace.reads.below(name)
    if len(node.args) != 1:
        return None
    act = function_of(node.op, node.target, tuple(node.kwargs.items()))
    return None if act is None else (act, Reads())


@lru_cache(maxsize=256)
def function_of(op: str, target: Any, options: tuple[tuple[str, Any], ...]) -> str | None:
    """The activation that a function of torch, or a method of its tensors, computes."""
    if op == "call_method":
        target = getattr(Tensor, str(target), None)
    elif op != "call_function" or not str(getattr(target, "__module__", "")).startswith("torch"):
        return None

    class Called(nn.Module):
        """A module that calls the function."""

        def forward(self, x: Tensor) -> Any:
            """The result of the called function."""
            return target(x, **dict(options))

    found = computed(Called(), overwrites=True)
    return None if isinstance(found, str) else found.name


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds two traced values."""
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    return node.op in ("call_method", "call_function") and node.target in SUMS


def norms(root: nn.Module, graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of batch norms."""
    for node in graph.nodes:
        module = called_module(root, node)
        if is_batch_norm(module) or is_derived(module):
            yield node


def chain_in(root: nn.Module, graph: fx.Graph, norm: fx.Node) -> Chain | str:
    """The chain of a batch norm of torch, or of a class derived from it, or why there is none."""
    name = str(norm.target)
    module = root.get_submodule(name)
    if not is_derived(module):
        return chain_of(root, norm)
    calls = inside(module)
    if isinstance(calls, str):
        return calls
    fold = unfold(graph, norm, calls)
    chain = chain_of(root, norm)
    if isinstance(chain, str):
        fold()
        return chain
    own = Reads(parts=((name, type(module)),))
    return replace(chain, derived=(type(module), calls), reads=chain.reads + own)


def unfold(graph: fx.Graph, norm: fx.Node, names: tuple[str, ...]) -> Callable[[], None]:
    """Add a node behind a batch norm's for each submodule that its forward calls.

    The node of the batch norm then stands for the norm alone. Returns the undo.
    """
    last = norm
    users = list(norm.users)
    for name in names:
        with graph.inserting_after(last):
            last = graph.call_module(f"{norm.target}.{name}", (last,))
    for user in users:
        user.replace_input_with(norm, last)

    def undo() -> None:
        node = last
        node.replace_all_uses_with(norm)
        while node is not norm:
            before = node.args[0]
            assert isinstance(before, fx.Node)
            graph.erase_node(node)
            node = before

    return undo


def chain_of(root: nn.Module, norm: fx.Node) -> Chain | str:
    """The chain of a batch norm, or the reason why there is none."""
    if has_hooks(root.get_submodule(str(norm.target))):
        return "it has hooks"
    found = chain_behind(root, norm)
    x = norm.args[0]
    conv = x if isinstance(x, fx.Node) and is_convolution(root, x) else None
    if isinstance(found, str):
        if conv is None:
            return found
        chain = replace(without_activation(root, norm), conv=conv)
        return chain if can_move(root, chain) else "a call before it may change its input"
    pool = pool_behind(root, found)
    for first, last in ((conv, pool), (conv, None), (None, pool), (None, None)):
        chain = replace(found, conv=first, pool=last)
        if can_move(root, chain):
            return chain
    return "a call before the activation may change its input"


def pool_behind(root: nn.Module, chain: Chain) -> fx.Node | None:
    """The max pool that is the only user of the result of a chain without a residual."""
    if chain.residual is not None or len(chain.end.users) != 1:
        return None
    user = next(iter(chain.end.users))
    return user if is_max_pool(called_module(root, user)) else None


def is_convolution(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node calls one of torch's convolutions, and the result is used once."""
    module = called_module(root, node)
    return module is not None and is_torchs(module, CONVOLUTIONS) and len(node.users) == 1


def can_move(root: nn.Module, chain: Chain) -> bool:
    """Whether no other call before the end of a chain changes the chain's inputs or statistics."""
    own = {chain.conv, chain.norm, *chain.between, chain.end, chain.pool}
    node = chain.conv or chain.norm
    while node is not chain.last:
        is_norm = node.op == "call_module" and node.target == chain.norm.target
        if node not in own and (is_norm or not is_harmless(root, node)):
            return False
        node = node.next
    return True


def is_harmless(root: nn.Module, node: fx.Node) -> bool:
    """Whether a call changes nothing but the state of torch's own modules."""
    if node.op == "call_module":
        return is_plain_module(root.get_submodule(str(node.target)))
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "_")
        module = str(getattr(node.target, "__module__", ""))
        is_known = module.startswith(("torch", "_operator")) and "inplace" not in node.kwargs
        is_changing = name.endswith("_") or (module == "_operator" and name in CHANGING)
        return is_known and not is_changing and "out" not in node.kwargs
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    return node.op in ("placeholder", "get_attr")


CHANGING = {name for name in dir(operator) if name.startswith("i")} | {"setitem", "delitem"}
CHANGING -= {"index", "indexOf", "inv", "invert", "is_", "is_not", "itemgetter"}
"""Operators that change their first argument."""


def is_plain_module(module: nn.Module) -> bool:
    """Whether a module and its submodules are torch's, have no hooks and change no argument."""
    return all(
        type(part).__module__.startswith("torch.nn.modules")
        and "forward" not in vars(part)
        and not has_hooks(part)
        and not getattr(part, "inplace", False)
        for part in module.modules()
    )


def chain_behind(root: nn.Module, norm: fx.Node) -> Chain | str:
    """The chain that begins with a batch norm, or the reason why there is none."""
    node = norm
    between: list[fx.Node] = []
    reads = Reads()
    residual: fx.Node | None = None
    in_place = False
    while True:
        if len(node.users) != 1:
            return "its output is used more than once"
        user = next(iter(node.users))
        act = activation_of(root, user)
        if act is not None:
            name, more = act
            return Chain(
                norm, tuple(between), user, residual, name, in_place=in_place, reads=reads + more
            )
        module = called_module(root, user)
        if residual is None and is_sum(user) and user.args[0] is not user.args[1]:
            residual = next(a for a in user.args if isinstance(a, fx.Node) and a is not node)
            in_place = user.target in IN_PLACE
            if in_place and user.args[0] is residual:
                return "its residual is changed in place"
        elif not is_identity(module):
            return "no activation follows"
        else:
            reads += Reads(parts=((str(user.target), nn.Identity),))
        between.append(user)
        node = user


def is_identity(module: nn.Module | None) -> bool:
    """Whether a call of a module returns its argument and does nothing else."""
    return module is not None and is_torchs(module, (nn.Identity,))


def without_activation(root: nn.Module, norm: fx.Node) -> Chain:
    """The chain of a batch norm and the identities behind it."""
    node, between, reads = norm, [], Reads()
    while len(node.users) == 1 and is_identity(called_module(root, user := next(iter(node.users)))):
        between.append(user)
        reads += Reads(parts=((str(user.target), nn.Identity),))
        node = user
    return Chain(norm, tuple(between), node, None, "none", reads=reads)


def module_of(graph: fx.Graph, path: str) -> fx.Node:
    """The submodule at a path. Reading a child from the dict ``_modules`` saves 1 us of look-up."""
    if "." in path:
        return graph.get_attr(path)
    return graph.call_function(operator.getitem, (graph.get_attr("_modules"), path))


def rewrite(graph: fx.Graph, chain: Chain, function: Callable[..., Any]) -> fx.Node:
    """Replace the calls of a chain by ``function(*modules, x, residual, act)``.

    The modules are the convolution if the chain has one, the batch norm, and the max pool if there
    is one. A chain with a max pool has no argument ``residual``.
    """
    called = [node for node in (chain.conv, chain.norm, chain.pool) if node is not None]
    with graph.inserting_before(chain.last):
        modules = [module_of(graph, str(node.target)) for node in called]
        residual = [chain.residual] if chain.pool is None else []
        args = (*modules, called[0].args[0], *residual, chain.act)
        flags = {"in_place": chain.in_place, "inside": chain.derived is not None}
        options: dict[str, Any] = {name: True for name, is_set in flags.items() if is_set}
        fused = graph.call_function(function, args, options)
    chain.last.replace_all_uses_with(fused)
    replaced = (chain.last, chain.end, *reversed(chain.between), chain.norm, chain.conv)
    for node in dict.fromkeys(replaced):
        if node is not None:
            graph.erase_node(node)
    return fused
