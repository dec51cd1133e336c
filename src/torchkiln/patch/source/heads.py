"""Models that make a loss from the logits of a linear layer, found in the source of forwards."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from torchkiln.patch.source.code import forward_of
from torchkiln.patch.source.layer import parameters_of
from torchkiln.patch.source.logits import INNER, LOGITS, PENDING, is_known
from torchkiln.patch.source.loss_calls import assigned, known_value, names_of
from torchkiln.patch.source.outputs import OUTPUT, is_output, prepare
from torchkiln.patch.source.text import SCOPES, definition

LOSS_FUNCTION = "_kiln_loss_function"
"""The helper in rewritten source: its argument is the model's ``loss_function``."""

METHODS = frozenset(("view", "reshape", "contiguous", "float", "to", "size", "dim"))
READS = frozenset(("shape", "device", "dtype"))
"""Attributes of logits that are known before the logits are computed."""

OPERATORS = (ast.Div, ast.Mult, ast.Add)


class Head(NamedTuple):
    """The calls of a head in a forward."""

    name: str
    """The name of the submodule."""
    mode: str
    """``inner`` if the logits are returned; ``outer`` if the forward makes a loss of them."""


class Heads(NamedTuple):
    """The modules to rewrite for heads."""

    found: dict[nn.Module, Head]
    reasons: dict[str, str]
    """The reasons not to rewrite modules that make a loss of logits, by name."""


def find(
    model: nn.Module,
    free: Mapping[str, nn.Module],
    is_skipped: Callable[[str, nn.Module], bool],
    *,
    loss_only: bool,
) -> Heads:
    """The modules among ``free`` to rewrite, for each loss and its head.

    A head is a linear layer with an output for each token of an embedding.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    sizes = {embedding.num_embeddings for embedding in embeddings}
    linear = {name: m for name, m in model.named_modules() if parameters_of(m) is not None}
    heads: dict[nn.Module, Head | None] = {
        m: None
        for name, m in linear.items()
        if getattr(m, "out_features", None) in sizes and not is_skipped(name, m)
    }
    found: dict[nn.Module, Head] = {}
    reasons: dict[str, str] = {}
    for path, module in reversed(list(free.items())):
        names = [name for name, child in module.named_modules() if name and child in heads]
        head = of_class(type(module), names) if names else None
        if isinstance(head, Head) and head.mode != INNER and has_own_loss(module):
            head = "its loss_function is not that of transformers"
        if isinstance(head, str):
            reasons[path] = head
        elif head is not None and head.mode == INNER:
            heads[module] = head
        elif head is not None:
            found[module] = head._replace(mode="loss" if loss_only else "logits")
            inside = module.get_submodule(head.name)
            while (inner := heads[inside]) is not None:
                found[inside] = inner
                inside = inside.get_submodule(inner.name)
    if not found and not reasons:
        reasons[""] = "no forward makes a loss of tokens from the outputs of a linear layer"
    return Heads(found, reasons)


def of_class(cls: type[nn.Module], names: Collection[str]) -> Head | str | None:
    """The head in the forward of a class; the reason to keep its loss; None without a loss."""
    function = forward_of(cls)
    node = function if isinstance(function, str) else definition(function)
    if isinstance(function, str) or isinstance(node, str):
        return str(node)
    return Flow(node, function.__globals__, names).head()


def has_own_loss(module: nn.Module) -> bool:
    """Whether a forward calls a ``loss_function`` that the user has set."""
    return "loss_function" in names_of(type(module)) and not is_known(
        getattr(module, "loss_function", None)
    )


def rewrite_head(node: ast.FunctionDef, function: FunctionType, head: Head) -> None:
    """Rewrite the calls of a head, and the returned values."""
    flow = Flow(node, function.__globals__, [head.name])
    flow.head()
    if head.mode == INNER:
        node.args.kwonlyargs.append(ast.arg(PENDING))
        node.args.kw_defaults.append(ast.Constant(value=False))
    for call in flow.calls:
        wanted = ast.Name(PENDING, ast.Load()) if head.mode == INNER else flow.labels()
        call.args[:0] = [call.func, wanted]
        call.func = ast.Name(LOGITS, ast.Load())
    for call in flow.losses:
        if is_attribute(call.func, "loss_function"):
            call.func = ast.Call(ast.Name(LOSS_FUNCTION, ast.Load()), [call.func], [])
    for cls in flow.outputs:
        prepare(cls)
    for part in [] if head.mode == INNER else own_nodes(node):
        if isinstance(part, ast.Return) and part.value is not None and flow.holds(part.value):
            training = ast.Attribute(ast.Name("self", ast.Load()), "training", ast.Load())
            drops = training if head.mode == "loss" else ast.Constant(value=False)
            given = [ast.keyword("drops", drops)]
            part.value = ast.Call(ast.Name(OUTPUT, ast.Load()), [part.value], given)
    ast.fix_missing_locations(node)


class Flow:
    """The uses of the logits in a forward."""

    def __init__(
        self, node: ast.FunctionDef, scope: Mapping[str, Any], names: Collection[str]
    ) -> None:
        self.node, self.scope = node, scope
        self.own = set(assigned(node))
        parts = list(own_nodes(node))
        self.parents = {id(c): p for p in parts for c in ast.iter_child_nodes(p)}
        self.calls = [p for p in parts if isinstance(p, ast.Call) and path_of(p.func) in names]
        ends = [(p.end_lineno or 0, p.end_col_offset or 0) for p in self.calls]
        self.begin = min(ends, default=(0, 0))
        """The end of the first call of the head. A variable may have another value before it."""
        self.variables: set[str] = set()
        count = -1
        while count != len(self.variables):
            count = len(self.variables)
            for part in parts:
                if isinstance(part, (ast.Assign, ast.AnnAssign)) and self.holds(part.value):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    self.variables |= {x.id for x in targets if isinstance(x, ast.Name)}
        self.held = [p for p in parts if isinstance(p, ast.expr) and self.holds(p)]
        self.losses = [p for p in parts if isinstance(p, ast.Call) and self.is_loss(p)]
        classes = [self.value(p.func) for p in self.held if isinstance(p, ast.Call)]
        self.outputs = [cls for cls in classes if is_output(cls)]

    def head(self) -> Head | str | None:
        """The head, if all uses of its logits are known; else the reason; None without a loss."""
        losses = [call for call in self.losses if any(map(self.holds, ast.walk(call)))]
        paths = {str(path_of(call.func)) for call in self.calls}
        returns = [part for part in own_nodes(self.node) if isinstance(part, ast.Return)]
        if not self.calls or not (losses or returns):
            return None
        used = [reason for part in self.held if (reason := self.why_not(part))]
        inner = [p for scope in scopes(self.node) for p in ast.walk(scope)]
        if any(isinstance(p, ast.Name) and p.id in self.variables for p in inner):
            used.append("an inner function of its forward uses the logits")
        if len(paths) > 1:
            used.append("its forward has several heads")
        loops = [p for p in own_nodes(self.node) if isinstance(p, (ast.For, ast.While))]
        if any(call is part for loop in loops for part in ast.walk(loop) for call in self.calls):
            used.append("its forward calls the head in a loop")
        if losses:
            return used[0] if used else Head(paths.pop(), "outer")
        is_inner = all(p.value and self.holds(p.value) for p in returns) and not self.outputs
        is_plain = not any(isinstance(p, (ast.Tuple, ast.Dict)) for p in self.held)
        return Head(paths.pop(), INNER) if is_inner and is_plain and not used else None

    def value(self, node: ast.expr) -> Any:
        """The value of a global name."""
        return known_value(node, self.scope, self.own)

    def holds(self, node: ast.AST | None) -> bool:
        """Whether a value is or contains logits, if those were not computed yet."""
        if isinstance(node, ast.Name):
            return node.id in self.variables and (node.lineno, node.col_offset) >= self.begin
        if isinstance(node, ast.Call):
            return any(node is call for call in self.calls) or self.holds_result(node)
        return any(map(self.holds, parts_of(node)))

    def holds_result(self, node: ast.Call) -> bool:
        """Whether the result of a call with logits is or contains logits."""
        function = node.func
        if isinstance(function, ast.Attribute) and self.holds(function.value):
            return function.attr in METHODS - {"size", "dim"}
        called = self.value(function)
        is_made = called is torch.tanh or is_output(called)
        return is_made and any(map(self.holds, arguments(node)))

    def is_loss(self, node: ast.Call) -> bool:
        """Whether a call computes a loss of tokens."""
        function = node.func
        if is_attribute(function, "loss_function"):
            return True
        if isinstance(function, ast.Name) and function.id in self.own:
            made = [
                part.value
                for part in own_nodes(self.node)
                if isinstance(part, ast.Assign)
                and any(getattr(x, "id", "") == function.id for x in part.targets)
            ]
            return bool(made) and all(map(self.makes_loss, made))
        return self.value(function) is F.cross_entropy or self.makes_loss(function)

    def makes_loss(self, node: ast.expr) -> bool:
        """Whether an expression constructs torch's ``CrossEntropyLoss``."""
        return isinstance(node, ast.Call) and self.value(node.func) is nn.CrossEntropyLoss

    def why_not(self, node: ast.expr) -> str:
        """The reason if a value with logits is used in an unknown way; empty otherwise."""
        parent: Any = self.parents[id(node)]
        if isinstance(parent, ast.keyword):
            parent = self.parents[id(parent)]
        known = isinstance(parent, ast.Return)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known = isinstance(parent, (ast.Assign, ast.AnnAssign))
        elif isinstance(parent, (ast.Assign, ast.AnnAssign)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            known = all(isinstance(target, ast.Name) for target in targets)
        elif isinstance(parent, ast.Attribute):
            call = self.parents[id(parent)]
            is_called = isinstance(call, ast.Call) and call.func is parent
            known = parent.attr in (METHODS if is_called else READS)
            known &= parent.attr == "to" or not getattr(call, "keywords", ())
        elif isinstance(parent, ast.BinOp):
            is_divisor = isinstance(parent.op, ast.Div) and parent.right is node
            known = isinstance(parent.op, OPERATORS) and not is_divisor
        elif isinstance(parent, ast.Compare):
            known = all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
        elif isinstance(parent, ast.Subscript):
            known = parent.value is node
        elif isinstance(parent, ast.Call):
            known = self.holds(parent) or any(parent is loss for loss in self.losses)
        elif isinstance(parent, (ast.IfExp, ast.Tuple, ast.Dict)):
            known = self.holds(parent) and getattr(parent, "test", None) is not node
        return "" if known else f"its forward has another use of logits: {ast.unparse(parent)}"

    def labels(self) -> ast.expr:
        """The argument that is None in calls without a loss; ``True`` if no argument is."""
        names = {x.arg for x in (*self.node.args.args, *self.node.args.kwonlyargs)}
        for loss in self.losses:
            part: Any = loss
            while part is not self.node:
                child, part = part, self.parents[id(part)]
                test = getattr(part, "test", None)
                if not isinstance(part, ast.If) or child is test or child in part.orelse:
                    continue
                if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
                    name = getattr(test.left, "id", "")
                    if name in names and is_none(test.comparators[0]):
                        return ast.Name(name, ast.Load())
        return ast.Constant(value=True)


def parts_of(node: ast.AST | None) -> list[Any]:
    """The parts of an expression that its value may contain."""
    if isinstance(node, ast.Tuple):
        return node.elts
    if isinstance(node, ast.Dict):
        return node.values
    names = {ast.BinOp: ("left", "right"), ast.Subscript: ("value",), ast.IfExp: ("body", "orelse")}
    return [getattr(node, name) for name in names.get(type(node), ())]


def is_none(node: ast.expr) -> bool:
    """Whether an expression is None."""
    return isinstance(node, ast.Constant) and node.value is None


def is_attribute(node: ast.expr, name: str) -> bool:
    """Whether an expression is an attribute of ``self``."""
    return path_of(node) == name


def path_of(node: ast.expr) -> str | None:
    """The path of an attribute of ``self``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names) if isinstance(node, ast.Name) and node.id == "self" and names else None


def arguments(call: ast.Call) -> list[ast.expr]:
    """The values of the arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A function and its parts, outside of inner definitions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield from own_nodes(child)


def scopes(node: ast.AST) -> Iterator[ast.AST]:
    """The inner definitions of a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            yield child
        else:
            yield from scopes(child)
