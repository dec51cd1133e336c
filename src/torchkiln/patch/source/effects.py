"""Groups of calls of layers with the same variable and no side effects between the calls."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torchkiln.patch.source.layer import call_of

PURE = {
    **dict.fromkeys(("view", "reshape", "transpose", "permute", "contiguous", "float"), "tensor"),
    **dict.fromkeys(("flatten", "unflatten", "unsqueeze", "squeeze", "expand", "to"), "tensor"),
    **dict.fromkeys(("sigmoid", "tanh", "type_as", "view_as", "mul"), "tensor"),
    **dict.fromkeys(("size", "chunk", "split", "unbind"), "tuple"),
    **dict.fromkeys(("dim", "numel"), ""),
}
"""Methods of a tensor without an effect, with the kind of their result."""


@dataclass
class Group:
    """Calls of layers with the same variable, in the order in which they run."""

    variable: str
    first: int
    """The index of the statement with the first call."""
    names: list[str] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    """Norms that are called after the first layer."""


def groups(
    block: list[ast.stmt],
    layers: Collection[str],
    norms: Collection[str],
    properties: Collection[str],
) -> Iterator[Group]:
    """The groups of calls that could run at the place of the first, if the layers are torch's.

    Between the calls of a group are only reads of variables and attributes, operators, methods of
    the results without an effect, and calls of norms. All other code ends a group: it may change a
    layer or the variable, perhaps under another name.
    """
    reader = Reader(layers, norms, properties)
    for index, statement in enumerate(block):
        reader.statement(index, statement)
    reader.end()
    return (group for group in reader.found if len(group.calls) > 1)


class Reader:
    """Reads expressions in the order in which Python computes them.

    The kind of an expression is ``tensor``, ``tuple``, or empty if unknown. Kinds are right if the
    layers of the group are torch's and their input is a tensor.
    """

    def __init__(
        self, layers: Collection[str], norms: Collection[str], properties: Collection[str]
    ) -> None:
        self.layers, self.norms, self.properties = layers, norms, properties
        self.found: list[Group] = []
        self.group: Group | None = None
        self.kinds: dict[str, str] = {}
        self.index = 0
        self.may_begin = True
        self.has_called = False

    def end(self) -> None:
        """Ends the group at an effect: no later call moves before the effect."""
        if self.group is not None:
            self.found.append(self.group)
        self.group = None
        self.kinds.clear()
        self.may_begin = False

    def statement(self, index: int, node: ast.stmt) -> None:
        """Reads a statement; a group begins before it only if no part so far has an effect."""
        self.index, self.may_begin, self.has_called = index, True, False
        if isinstance(node, (ast.Expr, ast.Return)):
            self.value(node.value)
        elif isinstance(node, ast.Assign):
            kind = self.value(node.value)
            for target in node.targets:
                self.store(target, kind)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.store(node.target, self.value(node.value))
        else:
            self.end()

    def store(self, target: ast.expr, kind: str) -> None:
        """Reads a target of an assignment."""
        if isinstance(target, ast.Starred):
            self.store(target.value, "tuple")
        elif isinstance(target, (ast.Tuple, ast.List)) and kind:
            for part in target.elts:
                self.store(part, "")
        elif isinstance(target, ast.Name):
            if self.group is not None and target.id == self.group.variable:
                self.end()
            self.kinds[target.id] = kind
        else:
            self.end()

    def value(self, node: ast.expr | None, *, certain: bool = True) -> str:
        """The kind of an expression; ``certain`` if it always runs, and exactly once."""
        if isinstance(node, (ast.Call, ast.Attribute)):
            read = self.call if isinstance(node, ast.Call) else self.attribute
            return read(node, certain=certain)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            is_input = self.group is not None and node.id == self.group.variable
            return "tensor" if is_input else self.kinds.get(node.id, "")
        if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Compare)):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    self.value(part, certain=False)
            return ""
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Slice, ast.Starred)):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            kinds = [self.value(part, certain=certain) for part in parts]
            first = kinds[:1] if isinstance(node, ast.Subscript) else kinds
            return "tensor" if "tensor" in first else ""
        if isinstance(node, (ast.Tuple, ast.List)):
            for part in node.elts:
                self.value(part, certain=certain)
            return "tuple"
        if node is not None and not isinstance(node, (ast.Constant, ast.Lambda)):
            self.end()
        return ""

    def attribute(self, node: ast.Attribute, *, certain: bool) -> str:
        """Reads an attribute; returns its kind."""
        kind = self.value(node.value, certain=certain)
        if isinstance(node.value, ast.Name) and node.attr in self.properties:
            self.end()
        if kind != "tensor":
            return ""
        return "tuple" if node.attr == "shape" else "tensor" if node.attr in {"T", "mT"} else ""

    def call(self, node: ast.Call, *, certain: bool) -> str:
        """Reads a call; returns the kind of its result."""
        layer, norm = call_of(node, self.layers), call_of(node, self.norms)
        if layer is not None and isinstance(layer[1], ast.Name) and certain:
            return self.layer(*layer, node)
        function = node.func if isinstance(node.func, ast.Attribute) else None
        kind = self.value(function and function.value, certain=certain)
        arguments = [self.value(part, certain=certain) for part in node.args]
        for keyword in node.keywords:
            self.value(keyword.value, certain=certain)
        if norm is not None and self.group is not None and arguments == ["tensor"]:
            self.group.between.append(norm[0])
            self.has_called = True
            return "tensor"
        name = function.attr if function else ""
        if kind == "tensor" and name in PURE:
            return PURE[name]
        self.end()
        return ""

    def layer(self, name: str, variable: ast.expr, call: ast.Call) -> str:
        """Adds a layer's call to the group; returns the kind of its result."""
        assert isinstance(variable, ast.Name)
        if self.group is not None and self.group.variable != variable.id:
            begins = self.may_begin and not self.has_called
            self.end()
            self.may_begin = begins
        self.has_called = True
        if self.group is None and self.may_begin:
            self.group = Group(variable.id, self.index)
        if self.group is None:
            return ""
        self.group.names.append(name)
        self.group.calls.append(call)
        return "tensor"
