"""Chains of batch norm, residual sum and activation in the traced forward of a module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
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
    """The activation."""
    residual: fx.Node | None
    act: str


def called_module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """The submodule that a node calls with one argument."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return root.get_submodule(str(node.target))


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def activation_of(root: nn.Module, node: fx.Node) -> str | None:
    """The name of the activation that a node computes from its only tensor."""
    module = called_module(root, node)
    if module is not None:
        return None if has_hooks(module) else name_of(module)
    if len(node.args) != 1 or node.kwargs.keys() - {"inplace"}:
        return None
    if node.op == "call_function" and callable(node.target):
        return FUNCTIONS.get(node.target)
    return METHODS.get(str(node.target)) if node.op == "call_method" else None


def name_of(module: nn.Module) -> str | None:
    """The name of a module's activation."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    names: dict[type[nn.Module], str] = {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        nn.Sigmoid: "sigmoid",
        nn.Tanh: "tanh",
    }
    return names.get(type(module))


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds two traced values."""
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    if node.op == "call_method":
        return node.target in ("add", "add_")
    return node.op == "call_function" and node.target in SUMS


def norms(root: nn.Module, graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of torch's batch norms."""
    for node in graph.nodes:
        if type(called_module(root, node)) in BATCH_NORMS:
            yield node


def chain_of(root: nn.Module, norm: fx.Node) -> Chain | str:
    """The chain that begins with a batch norm, or the reason why there is none."""
    if has_hooks(root.get_submodule(str(norm.target))):
        return "it has hooks"
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


def rewrite(graph: fx.Graph, chain: Chain, function: Callable[..., Any]) -> None:
    """Replace the calls of a chain by ``function(norm, x, residual, act)``."""
    with graph.inserting_before(chain.end):
        norm = graph.get_attr(str(chain.norm.target))
        args = (norm, chain.norm.args[0], chain.residual, chain.act)
        fused = graph.call_function(function, args)
    chain.end.replace_all_uses_with(fused)
    for node in (chain.end, *reversed(chain.between), chain.norm):
        graph.erase_node(node)
