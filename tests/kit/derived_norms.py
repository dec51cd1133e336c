"""Classes derived from torch's batch norm, for the tests of torchkiln.fuse.

Their forwards are made from the source of the installed torch.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
from collections.abc import Iterator

from torch.nn.modules.batchnorm import _BatchNorm

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.BatchNorm2d):
    def __init__(self, channels, act):
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = act

    def forward(self, x):
"""
CHECK = "torch._assert(x.ndim == 4, f'expected 4 dimensions, got {x.ndim}')"
END = "x = self.drop(x)\nx = self.act(x)\nreturn x"
INHERITED = "return self.act(self.drop(super().forward(x)))"


class Renamed(ast.NodeTransformer):
    """The argument of torch's forward as ``x``."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("x" if node.id == "input" else node.id, node.ctx)


def spelled_out(check: str = CHECK, end: str = END) -> str:
    """A class that writes the statements of torch's forward out, and then calls submodules."""
    source = inspect.cleandoc("\n" + inspect.getsource(_BatchNorm.forward))
    (torchs,) = ast.parse(source).body
    assert isinstance(torchs, ast.FunctionDef)
    lines = [ast.unparse(Renamed().visit(part)) for part in torchs.body[1:]]
    assert lines[-1].startswith("return F.batch_norm(x, ")
    lines[-1] = "x = " + lines[-1].removeprefix("return ")
    return with_body("\n".join([check, *lines, end]))


def with_body(body: str) -> str:
    return HEAD + "".join(f"        {line}\n" for line in body.split("\n"))


def changed(old: str, new: str, source: str | None = None) -> str:
    """A class with one change in its source."""
    source = spelled_out() if source is None else source
    assert source.count(old) == 1
    return source.replace(old, new)


FORMS = {
    "assert of torch": spelled_out(),
    "assert": spelled_out("assert x.dim() == 4"),
    "check of torch": spelled_out("self._check_input_dim(x)", "return self.act(self.drop(x))"),
    "other names": spelled_out(end="y = self.drop(x)\nreturn self.act(y)"),
    "super": with_body(INHERITED),
    "super, then variables": with_body(
        "y = super().forward(x)\ny = self.drop(y)\nreturn self.act(y)"
    ),
    "no drop": spelled_out(end="return self.act(x)"),
    "other globals": spelled_out()
    .replace("from torch.nn import functional as F", "from torch import _assert")
    .replace("torch._assert(", "_assert(")
    .replace("F.batch_norm(", "torch.nn.functional.batch_norm("),
}


def in_class(line: str) -> str:
    """A class with one more definition."""
    return changed(CLASS, f"{CLASS}    {line}\n")


NORM = "x = F.batch_norm(x, "
INIT = "        self.drop = nn.Identity()\n"
CLASS = "class Norm(nn.BatchNorm2d):\n"
TORCHS = spelled_out().split("\n")[-5].strip()
STEPS = "its forward is not torch's batch norm and calls of submodules: "
CHECKED = "its forward does not begin with a check of the rank"
ATTACKS = {
    "dtype": (changed(NORM, "x = x * (x.dtype is torch.float64)\n        " + NORM), STEPS + "x * "),
    "rank": (spelled_out("if x.ndim == 4: x = x * 2"), CHECKED),
    "shape": (spelled_out(end="return self.act(x) if len(x) < 9 else x"), STEPS + "self.act(x) if"),
    "number of the shape": (changed("self.eps)", "self.eps * x.shape[0])"), STEPS + "F.batch_norm"),
    "cast": (changed(NORM, "x = F.batch_norm(x.double(), "), STEPS + "F.batch_norm"),
    "number": (changed("1.0 / float", "2.0 / float"), STEPS + "if self.training"),
    "type of a number": (changed("_factor = 0.0", "_factor = 0"), STEPS + "if self.momentum"),
    "order": (changed("self.weight, self.bias", "self.bias, self.weight"), STEPS + "F.batch_norm"),
    "condition": (changed("bn_training = True", "bn_training = self.affine"), STEPS + "if self.tr"),
    "gradient": (spelled_out(end="return self.act(x.detach())"), STEPS + "x.detach()"),
    "effect": (spelled_out(end="self.calls = 1\nreturn self.act(x)"), STEPS + "self.calls = 1"),
    "no check": (spelled_out("pass"), CHECKED),
    "check of another rank": (spelled_out("assert x.ndim == 3"), CHECKED),
    "check of another tensor": (spelled_out("assert self.ndim == 4"), CHECKED),
    "effect of a check": (spelled_out("torch._assert(x.ndim == 4, f'{x.zero_()}')"), CHECKED),
    "activation first": (changed(NORM, "x = self.act(x)\n        " + NORM), STEPS + "x"),
    "call of the argument": (changed(NORM, "z = F.batch_norm(x, "), STEPS + "x"),
    "result unused": (spelled_out(end="y = self.act(x)\nreturn x"), STEPS + "x"),
    "twice": (spelled_out(end=TORCHS + "\nreturn self.act(x)"), STEPS + "F.batch_norm"),
    "two results": (spelled_out(end="return self.act(x), x"), STEPS + "(self.act(x), x)"),
    "option": (spelled_out(end="return self.act(x, 1)"), STEPS + "self.act(x, 1)"),
    "code behind": (spelled_out(end="return self.act(x)\nself.act(x)"), STEPS + "return self.act"),
    "no result": (spelled_out(end="x = self.act(x)"), "its forward does not end with a result"),
    "default": (changed("self, x)", "self, x=None)"), "its forward has optional arguments"),
    "decorator": (
        changed("    def f", "    @torch.no_grad()\n    def f"),
        "its forward is decorated",
    ),
    "function": (spelled_out(end="[lambda: x]\nreturn x"), "its forward defines a function"),
    "property": (
        in_class("momentum = property(lambda self: 0.5, lambda self, value: None)"),
        "its class defines momentum",
    ),
    "look-up": (
        in_class("def __getattr__(self, n): return super().__getattr__(n)"),
        "its class defines __getattr__",
    ),
    "setter": (
        in_class("def __setattr__(self, n, v): super().__setattr__(n, v)"),
        "its class defines __setattr__",
    ),
    "call": (
        in_class("def __call__(self, x): return 2 * super().__call__(x)"),
        "its class defines __call__",
    ),
    "other check": (
        in_class("def _check_input_dim(self, x): ..."),
        "its class defines _check_input_dim",
    ),
    "mixin": (
        changed(CLASS, "class A: ...\n" + CLASS.replace("nn.", "A, nn.")),
        "its class defines",
    ),
    "metaclass": (
        changed(CLASS, "class A(type): ...\n" + CLASS.replace("2d", "2d, metaclass=A")),
        "its class has other bases",
    ),
    "forward of the instance": (
        changed(INIT, INIT + "        self.forward = lambda x: x\n"),
        "its forward is an attribute of the instance",
    ),
    "check of the instance": (
        changed(INIT, INIT + "        self._check_input_dim = id\n"),
        "its _check_input_dim is an attribute of the instance",
    ),
    "no module": (
        changed(INIT, "        self.drop = F.relu\n"),
        "calls drop, which is no submodule",
    ),
    "hidden module": (
        changed(INIT, INIT + "        vars(self)['drop'] = F.relu\n"),
        "calls drop, which another attribute may hide",
    ),
    "private name": (
        changed("self.drop(x)", "self.__drop(x)").replace(
            INIT, INIT + "        self.add_module('__drop', nn.Identity())\n"
        ),
        "calls __drop, which another attribute may hide",
    ),
    "functional": (
        changed("from torch.nn import functional as F", "class F: batch_norm = nn.BatchNorm2d"),
        STEPS + "F.batch_norm",
    ),
    "float": (changed(CLASS, "float = abs\n" + CLASS), STEPS + "if self.training"),
    "builtins": (
        changed(CLASS, "__builtins__ = {**vars(__import__('builtins')), 'float': abs}\n" + CLASS),
        STEPS + "if self.training",
    ),
    "super": (
        changed(CLASS, "super = lambda: nn.ReLU()\n" + CLASS, with_body(INHERITED)).replace(
            "super().__init__(", "nn.BatchNorm2d.__init__(self, "
        ),
        STEPS + "super().forward(x)",
    ),
    "super is derived": (
        changed(
            CLASS,
            CLASS.replace("Norm(", "A(") + "    def forward(self, x): return x\n\nclass Norm(A):\n",
            with_body(INHERITED),
        ),
        "super() is not torch's batch norm",
    ),
}


def mutants() -> Iterator[str]:
    """Sources with one change of an expression or a statement of torch's forward."""
    tree = ast.parse(spelled_out())
    for at, change in itertools.product(range(len(common(tree))), MUTATIONS):
        mutant = copy.deepcopy(tree)
        change(common(mutant)[at])
        source = ast.unparse(ast.fix_missing_locations(mutant))
        if source != ast.unparse(tree):
            yield source


def common(tree: ast.Module) -> list[ast.AST]:
    """The nodes that a class has in common with torch's forward, without texts."""
    (forward,) = (n for n in ast.walk(tree) if getattr(n, "name", "") == "forward")
    assert isinstance(forward, ast.FunctionDef)
    parts = [part for part in forward.body[1:-3] if not isinstance(part, ast.Expr)]
    return [node for part in parts for node in ast.walk(part)]


def other_constant(node: ast.AST) -> None:
    """Changes a constant."""
    if isinstance(node, ast.Constant):
        node.value = ... if node.value is None else not node.value


def other_name(node: ast.AST) -> None:
    """Changes the name of a variable, a global or an attribute."""
    if isinstance(node, ast.Name):
        node.id = "momentum" if node.id == "exponential_average_factor" else "self"
    if isinstance(node, ast.Attribute):
        node.attr = "affine"


def other_operator(node: ast.AST) -> None:
    """Changes an operator."""
    match node:
        case ast.BoolOp(op=op):
            node.op = ast.And() if isinstance(op, ast.Or) else ast.Or()
        case ast.Compare(ops=[op]):
            node.ops = [ast.IsNot() if isinstance(op, ast.Is) else ast.Is()]
        case ast.UnaryOp():
            node.op = ast.USub()
        case ast.BinOp():
            node.op = ast.Mult()


def without_statement(node: ast.AST) -> None:
    """Removes the first statement of a branch."""
    if isinstance(node, ast.If):
        node.body[:1] = [ast.Pass()]


def with_statement(node: ast.AST) -> None:
    """Adds a statement to a branch."""
    if isinstance(node, ast.If):
        node.orelse.append(ast.parse("x = x * 2").body[0])


MUTATIONS = (other_constant, other_name, other_operator, without_statement, with_statement)
