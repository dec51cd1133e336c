"""Batch norms of classes derived from torch's, such as ``BatchNormAct2d`` of timm.

The forward of such a class normalizes as torch's does, and then calls submodules one after the
other. The proof compares code, not results, so it holds for every input. The class may define
nothing but ``__init__`` and ``forward``. The statements of its forward must be those of torch's
forward, up to the names of variables, the check of the rank and the calls at the end; or the
forward calls that of ``super()``, which must be torch's.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import batchnorm

from torchkiln.nn.batch_norm import PLAIN_CLASSES
from torchkiln.nn.convolution import NORM_OF
from torchkiln.nn.plain import MISSING
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.source.code import contents
from torchkiln.patch.source.text import definition

RANKS = {cls: rank for rank, cls in NORM_OF.items()}

HARMLESS = {
    *("__module__", "__doc__", "__qualname__", "__init__", "forward", "extra_repr"),
    *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"),
    *("__firstlineno__", "__static_attributes__", "__constants__"),
}
"""Attributes of a derived class that do not change the call of a module, but for the forward."""

Chain = tuple[str, ...]
"""A global, and attributes of modules below it, such as ``("F", "batch_norm")``."""

Derived = tuple[type[nn.Module], tuple[str, ...]]
"""A class that is derived from torch's, and the submodules that its forward calls."""


def torchs(cls: type) -> type[nn.Module] | None:
    """The class of torch from which the class of a batch norm is derived; None for other classes.

    The classes of torch and of torchkiln themselves are not derived.
    """
    if any(base in PLAIN_CLASSES and base not in RANKS for base in cls.__mro__):
        return None
    base = next((base for base in cls.__mro__ if base in RANKS), None)
    return None if base is cls else base


def is_derived(module: nn.Module | None) -> bool:
    """Whether the class of a module is derived from torch's batch norm."""
    return torchs(type(module)) is not None


@dataclass(frozen=True)
class Proof:
    """The calls of submodules in a forward, in order, and the code that was read."""

    calls: tuple[str, ...] | str
    """The names of the submodules; a text is the reason why the forward is not proven."""
    forward: object
    code: object
    bases: tuple[type, ...]
    attributes: tuple[tuple[type, frozenset[str]], ...]
    """The attributes of each class between this one and torch's."""
    globals: tuple[tuple[Chain, object], ...] = ()

    def holds(self, cls: Any) -> bool:
        """Whether the class still runs this code, with these globals."""
        forward = cls.forward
        if forward is not self.forward or getattr(forward, "__code__", None) is not self.code:
            return False
        return (
            cls.__mro__ is self.bases
            and all(vars(one).keys() == names for one, names in self.attributes)
            and all(resolved(forward, chain) is value for chain, value in self.globals)
        )


PROOFS: dict[type, Proof] = {}


def calls_of(cls: type) -> tuple[str, ...] | str:
    """The submodules that the forward of a class calls in order after torch's batch norm.

    A text is the reason why this is not proven. After a change of the class it is proven again.
    """
    proof = PROOFS.get(cls)
    if proof is None or not proof.holds(cls):
        proof = PROOFS[cls] = prove(cls)
    return proof.calls


def still_calls(cls: type, calls: tuple[str, ...]) -> bool:
    """Whether the forward of a class is still proven to make these calls."""
    return calls_of(cls) == calls


# The mark that torch.compiler.assume_constant_result sets. A call of it imports the compiler, which
# takes seconds.
still_calls._dynamo_marked_constant = True  # type: ignore[attr-defined]


def inside(norm: nn.Module) -> tuple[str, ...] | str:
    """The submodules that a batch norm calls, or the reason not to change its calls."""
    base: Any = torchs(type(norm))
    hidden = {*norm._parameters, *norm._buffers}
    own = [n for n in vars(norm) if n in hidden or callable(getattr(base, n, None))]
    if own:
        return f"its {own[0]} is an attribute of the instance"
    found = calls_of(type(norm))
    if isinstance(found, str):
        return found
    for name in found:
        if not isinstance(norm._modules.get(name), nn.Module):
            return f"its forward calls {name}, which is no submodule"
        if name in vars(norm) or hasattr(type(norm), name) or name.startswith("__"):
            return f"its forward calls {name}, which another attribute may hide"
    return found


def prove(cls: Any) -> Proof:
    """The proof for a class."""
    base: Any = torchs(cls) or cls
    between = [one for one in cls.__mro__ if one not in base.__mro__]
    attributes = tuple((one, frozenset(vars(one))) for one in between)
    forward = cls.forward
    read = Globals(forward)
    calls: tuple[str, ...] | str
    try:
        check_classes(cls, base, between)
        calls = () if forward is base.forward else Reading(cls, base, read).calls()
    except NoFormulaError as error:
        calls = str(error)
    code, values = getattr(forward, "__code__", None), tuple(read.values.items())
    return Proof(calls, forward, code, cls.__mro__, attributes, values)


def check_classes(cls: type, base: Any, between: Sequence[type]) -> None:
    """Refuses classes that change more than the forward, and a replaced forward of torch."""
    function = vars(batchnorm._BatchNorm)["forward"]
    is_own = isinstance(function, FunctionType) and function.__globals__ is vars(batchnorm)
    is_own = is_own and base.forward is function
    if not is_own or function.__code__.co_filename != batchnorm.__file__:
        raise NoFormulaError("the forward of torch's batch norm is not torch's")
    if (*between, *base.__mro__) != cls.__mro__ or any(type(one) is not type for one in between):
        raise NoFormulaError("its class has other bases than torch's batch norm")
    for one in between:
        more = vars(one).keys() - HARMLESS
        if more:
            raise NoFormulaError(f"its class defines {min(more)}")


def resolved(function: Any, chain: Chain) -> object:
    """The object that a function reads by a global and attributes of modules, or MISSING."""
    name, *rest = chain
    value = function.__globals__.get(name, MISSING)
    if value is MISSING:
        value = builtins_of(function).get(name, MISSING)
    for part in rest:
        value = vars(value).get(part, MISSING) if type(value) is ModuleType else MISSING
    return value


def builtins_of(function: Any) -> dict[str, object]:
    """The names that a function finds after its globals."""
    names: dict[str, object] = function.__builtins__
    return names


@dataclass
class Globals:
    """The globals that a function reads."""

    function: Any
    values: dict[Chain, object] = field(default_factory=dict)

    def value(self, node: ast.AST, variables: Sequence[str]) -> object:
        """The object of a name, or of an attribute of a module; MISSING for other expressions."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in variables:
            return MISSING
        chain = (node.id, *reversed(names))
        value = resolved(self.function, chain)
        if value is not MISSING:
            self.values[chain] = value
        return value


class Form:
    """Writes syntax trees of a function so that trees of the same meaning are equal.

    Variables are numbers in the order in which they appear, and globals are objects.
    """

    def __init__(self, function: FunctionType, read: Globals) -> None:
        self.variables = function.__code__.co_varnames
        self.arguments = self.variables[: function.__code__.co_argcount]
        self.read = read
        self.numbers = {name: at for at, name in enumerate(self.arguments)}

    def of(self, node: Any) -> Any:
        """The form of a node, of a list of nodes, or of a value."""
        if isinstance(node, list):
            return tuple(self.of(part) for part in node if not is_text(part))
        if not isinstance(node, ast.AST):
            return type(node), repr(node)
        if isinstance(node, ast.Name) and node.id in self.variables:
            return "variable", self.numbers.setdefault(node.id, len(self.numbers))
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = self.read.value(node, self.variables)
            if value is not MISSING:
                return "global", id(value)
        parts = ((name, value) for name, value in ast.iter_fields(node) if name != "ctx")
        return type(node), *((name, self.of(value)) for name, value in parts)


def is_text(node: object) -> bool:
    """Whether a statement is a text or another constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def body_of(function: Any) -> Iterator[ast.stmt]:
    """The statements of a forward of one argument that does nothing else."""
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        raise NoFormulaError("its forward is decorated")
    if any(type(scope) is not dict for scope in (function.__globals__, builtins_of(function))):
        raise NoFormulaError("its globals are no dict")
    code = function.__code__
    options = code.co_flags & 0x0C, code.co_kwonlyargcount, code.co_posonlyargcount
    if code.co_cellvars:
        raise NoFormulaError("its forward defines a function")
    if code.co_argcount != len(("self", "x")) or any(options) or function.__defaults__:
        raise NoFormulaError("its forward has optional arguments")
    node = definition(function)
    if isinstance(node, str):
        raise NoFormulaError(node)
    return (part for part in node.body if not is_text(part))


class Reading:
    """Reads the forward of a class beside torch's."""

    def __init__(self, cls: type, base: Any, read: Globals) -> None:
        self.owner = next(one for one in cls.__mro__ if "forward" in vars(one))
        self.function = read.function
        if vars(self.owner)["forward"] is not self.function:
            raise NoFormulaError("its forward is decorated")
        self.base = base
        self.statements = list(body_of(self.function))
        self.form = Form(self.function, read)
        self.inherits = self.calls_super(cls)
        self.expected: Any = None
        """The form of the call of ``F.batch_norm``."""
        self.holder = ""
        """The variable that has the last result."""
        self.is_normal = False
        """Whether the batch norm has been computed."""
        self.found: list[str] = []

    def calls_super(self, cls: type) -> bool:
        """Whether ``super().forward`` in the function is torch's forward."""
        cells = self.function.__closure__ or ()
        if not cells:
            return False
        if self.function.__code__.co_freevars != ("__class__",):
            raise NoFormulaError("its forward uses variables of an enclosing function")
        if contents(cells[0]) is not self.owner:
            raise NoFormulaError("its forward calls super() of another class")
        after = cls.__mro__[cls.__mro__.index(self.owner) + 1 :]
        found = next(one for one in after if "forward" in vars(one))
        if vars(found)["forward"] is not self.base.forward:
            raise NoFormulaError("super() is not torch's batch norm")
        return True

    def calls(self) -> tuple[str, ...]:
        """The names of the submodules that the forward calls after the batch norm."""
        rest = self.statements
        if not self.inherits:
            rest = self.after_torchs()
        itself = self.form.arguments[0]
        for statement in rest[:-1]:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != itself:
                    self.take(value)
                    self.holder = name
                case _:
                    raise differs(statement)
        match rest[-1:]:
            case [ast.Return(value=ast.expr() as value)]:
                self.take(value)
            case _:
                raise NoFormulaError("its forward does not end with a result")
        return tuple(self.found)

    def after_torchs(self) -> list[ast.stmt]:
        """The statements that follow torch's; raises unless all before them equal torch's."""
        torchs_form = Form(self.base.forward, Globals(self.base.forward))
        check, *common, last = body_of(self.base.forward)
        if not self.statements or not self.is_rank_check(self.statements[0], torchs_form.of(check)):
            raise NoFormulaError("its forward does not begin with a check of the rank")
        own = self.statements[1:]
        if not isinstance(last, ast.Return) or len(own) <= len(common):
            raise NoFormulaError("its forward has fewer statements than torch's batch norm")
        for mine, theirs in zip(own, common, strict=False):
            if self.form.of(mine) != torchs_form.of(theirs):
                raise differs(mine)
        self.expected = torchs_form.of(last.value)
        return own[len(common) :]

    def is_rank_check(self, statement: ast.stmt, torchs: Any) -> bool:
        """Whether a statement raises if the rank of the argument is not that of torch's class."""
        match statement:
            case ast.Assert(test=test, msg=message):
                messages = [message] if message else []
            case ast.Expr(value=ast.Call(func=function, args=[test, message], keywords=[])) if (
                self.form.of(function) == ("global", id(torch._assert))
            ):
                messages = [message]
            case _:
                return bool(self.form.of(statement) == torchs)
        match test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=rank)]):
                is_rank = type(rank) is int and rank == self.rank() and self.is_rank(left)
            case _:
                return False
        return __debug__ and is_rank and all(map(self.is_message, messages))

    def rank(self) -> int:
        """The only rank of the class of torch; 0 if it takes several."""
        return 0 if self.base is nn.BatchNorm1d else RANKS[self.base]

    def is_rank(self, node: ast.AST) -> bool:
        """Whether an expression is the rank of the argument."""
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="ndim"):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="dim"), args=[]):
                if node.keywords:
                    return False
            case _:
                return False
        return name == self.form.arguments[1]

    def is_message(self, node: ast.AST) -> bool:
        """Whether an expression is a text, perhaps with the rank of the argument."""
        match node:
            case ast.Constant():
                return True
            case ast.JoinedStr(values=values):
                return all(map(self.is_message, values))
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.is_rank(value)
        return False

    def take(self, node: ast.expr) -> None:
        """Reads an expression that uses the last result, and nothing but it."""
        itself, _ = self.form.arguments
        match node:
            case ast.Name(id=name) if name and name == self.holder:
                self.holder = ""
            case ast.Call() if not self.is_normal and self.is_torchs(node):
                self.is_normal = True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=[arg], keywords=[]
            ) if owner == itself:
                self.take(arg)
                self.found.append(name)
            case _:
                raise differs(node)

    def is_torchs(self, node: ast.Call) -> bool:
        """Whether a call is torch's batch norm of the argument."""
        if not self.inherits:
            return bool(self.form.of(node) == self.expected)
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Name() as name, args=[], keywords=[]), attr="forward"
                ),
                args=[ast.Name(id=argument)],
                keywords=[],
            ):
                is_super = self.form.of(name) == ("global", id(super))
                return is_super and argument == self.form.arguments[1]
        return False


def differs(node: ast.AST) -> NoFormulaError:
    """The error for code that is neither torch's batch norm nor a call of a submodule."""
    line = textwrap.shorten(ast.unparse(node).partition("\n")[0], 80, placeholder=" ...")
    return NoFormulaError(f"its forward is not torch's batch norm and calls of submodules: {line}")
