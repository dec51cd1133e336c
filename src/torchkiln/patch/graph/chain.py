"""Chains of convolution, batch norm, residual sum and activation in a traced forward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torchkiln.nn.convolution import CONVOLUTIONS, is_batch_norm
from torchkiln.nn.plain import has_hooks, is_torchs
from torchkiln.patch.formula.activation import computed
from torchkiln.patch.graph.pool import is_max_pool

SUMS = (operator.add, operator.iadd, torch.add)
FUNCTIONS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((torch.relu, torch.relu_, F.relu, F.relu_), "relu"),
    F.silu: "silu",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
}
METHODS = {name + end: name for name in ("relu", "sigmoid", "tanh") for end in ("", "_")}


class TensorProxy(fx.Proxy):
    """A traced value that ``isinstance`` takes for a tensor, as the arguments of a call are."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor


class CallTracer(fx.Tracer):
    """Records the calls of a module; those of its submodules are calls, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Every submodule."""
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A traced value."""
        return TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """The node of a traced value, which torch would take for a constant."""
        return a.node if type(a) is TensorProxy else super().create_arg(a)


@dataclass(frozen=True)
class Chain:
    """The calls that become one."""

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
    """The max pool behind the activation, if it becomes part of the call."""

    @property
    def last(self) -> fx.Node:
        """The call whose result is that of the chain."""
        return self.pool or self.end


def called_module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """The submodule that a node calls with one argument."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return root.get_submodule(str(node.target))


def activation_of(root: nn.Module, node: fx.Node) -> str | None:
    """The name of the activation that a node computes from its only tensor."""
    module = called_module(root, node)
    if module is not None:
        if has_hooks(module) or "forward" in vars(module):
            return None
        found = computed(module)
        return found.name if found else None
    if len(node.args) != 1 or node.kwargs.keys() - {"inplace"}:
        return None
    if node.op == "call_function" and callable(node.target):
        return FUNCTIONS.get(node.target)
    return METHODS.get(str(node.target)) if node.op == "call_method" else None


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds two traced values."""
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    if node.op == "call_method":
        return node.target in ("add", "add_")
    return node.op == "call_function" and node.target in SUMS


def norms(root: nn.Module, graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of batch norms."""
    for node in graph.nodes:
        if is_batch_norm(called_module(root, node)):
            yield node


def chain_of(root: nn.Module, norm: fx.Node) -> Chain | str:
    """The chain of a batch norm, or the reason why there is none."""
    if has_hooks(root.get_submodule(str(norm.target))):
        return "it has hooks"
    found = chain_behind(root, norm)
    x = norm.args[0]
    conv = x if isinstance(x, fx.Node) and is_convolution(root, x) else None
    if isinstance(found, str):
        return found if conv is None else Chain(norm, (), norm, None, "none", conv)
    pool = pool_behind(root, found)
    for first, last in ((conv, pool), (conv, None), (None, pool), (None, None)):
        chain = replace(found, conv=first, pool=last)
        if can_move(chain):
            return chain
    return "its input is used before the activation"


def pool_behind(root: nn.Module, chain: Chain) -> fx.Node | None:
    """The max pool that alone takes the result of a chain without a residual."""
    if chain.residual is not None or len(chain.end.users) != 1:
        return None
    user = next(iter(chain.end.users))
    return user if is_max_pool(called_module(root, user)) else None


def is_convolution(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node calls one of torch's convolutions, and the result is used once."""
    module = called_module(root, node)
    return module is not None and is_torchs(module, CONVOLUTIONS) and len(node.users) == 1


def can_move(chain: Chain) -> bool:
    """Whether no other call before the end of a chain may change its input."""
    first = chain.conv or chain.norm
    x, node = first.args[0], first.next
    while node is not chain.last:
        if isinstance(x, fx.Node) and node in x.users and node not in chain.between:
            return False
        node = node.next
    return True


def chain_behind(root: nn.Module, norm: fx.Node) -> Chain | str:
    """The chain that begins with a batch norm, or the reason why there is none."""
    node = norm
    between: list[fx.Node] = []
    residual: fx.Node | None = None
    while True:
        if len(node.users) != 1:
            return "its output is used more than once"
        user = next(iter(node.users))
        act = activation_of(root, user)
        if act is not None:
            return Chain(norm, tuple(between), user, residual, act)
        module = called_module(root, user)
        if residual is None and is_sum(user) and user.args[0] is not user.args[1]:
            residual = next(a for a in user.args if isinstance(a, fx.Node) and a is not node)
        elif type(module) is not nn.Identity or has_hooks(module):
            return "no activation follows"
        between.append(user)
        node = user


def rewrite(graph: fx.Graph, chain: Chain, function: Callable[..., Any]) -> fx.Node:
    """Replace the calls of a chain by ``function(*modules, x, residual, act)``.

    The modules are the convolution, if it is part of the chain, the batch norm, and the max pool,
    which takes the place of the residual.
    """
    called = [node for node in (chain.conv, chain.norm, chain.pool) if node is not None]
    with graph.inserting_before(chain.last):
        modules = [graph.get_attr(str(node.target)) for node in called]
        residual = [chain.residual] if chain.pool is None else []
        args = (*modules, called[0].args[0], *residual, chain.act)
        fused = graph.call_function(function, args)
    chain.last.replace_all_uses_with(fused)
    replaced = (chain.last, chain.end, *reversed(chain.between), chain.norm, chain.conv)
    for node in dict.fromkeys(replaced):
        if node is not None:
            graph.erase_node(node)
    return fused
