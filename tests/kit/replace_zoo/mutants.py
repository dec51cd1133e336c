"""Generated mutants: forwards that replace() recognises, each with one change.

A mutant is the source of a class. In its forward an expression is wrapped, a number, operator or
name is replaced, or a statement is moved, deleted or added.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from replace_zoo.judge import same
from replace_zoo.seen import Mode
from replace_zoo.templates import (
    BODIES,
    HEAD,
    INITS,
    PACKED,
    PROJECTIONS,
    STATEMENTS,
    SWAPS,
    WRAPPERS,
)
from replace_zoo.zoo import draw


@dataclass(frozen=True)
class Mutant:
    """The source of one class, its kind, and the body of its forward."""

    kind: str
    body: str
    source: str


def is_tensor(node: ast.AST) -> bool:
    """Whether an expression may be a tensor, so that a function can be called on it."""
    if isinstance(node, ast.Name):
        return node.id in "xyzhdvgu" and isinstance(node.ctx, ast.Load)
    return isinstance(node, (ast.BinOp, ast.Call)) or (
        isinstance(node, ast.Attribute) and node.attr == "weight"
    )


def places(
    tree: ast.Module, kind: type | tuple[type, ...]
) -> list[tuple[ast.AST, str, int | None]]:
    """Parent, field and index of each expression of a kind."""
    return [
        (parent, name, index)
        for parent in ast.walk(tree)
        for name, value in ast.iter_fields(parent)
        for index, node in (enumerate(value) if isinstance(value, list) else [(None, value)])
        if isinstance(node, kind)
    ]  # fmt: skip


def set_at(place: tuple[Any, str, int | None], new: ast.AST) -> None:
    """Replace the expression at (parent, field, index)."""
    parent, name, index = place
    if index is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[index] = new


def get_at(place: tuple[Any, str, int | None]) -> Any:
    """The expression at (parent, field, index)."""
    value = getattr(place[0], place[1])
    return value if place[2] is None else value[place[2]]


def wrap(tree: ast.Module, drawn: random.Random) -> None:
    """Call a function on an expression. Nets do not get the wrappers with ``apply``."""
    is_net = any(isinstance(n, ast.Attribute) and n.attr == "bn" for n in ast.walk(tree))
    wrappers = [w for w in WRAPPERS if not (is_net and ".apply" in w)]
    place = drawn.choice([p for p in places(tree, ast.expr) if is_tensor(get_at(p))])
    text = drawn.choice(wrappers).format(f"({ast.unparse(get_at(place))})")
    set_at(place, ast.parse(text, mode="eval").body)


def number(tree: ast.Module, drawn: random.Random) -> None:
    """Change a number, or negate a flag."""
    found = [p for p in places(tree, ast.Constant) if not isinstance(get_at(p).value, str | None)]
    if not found:
        return wrap(tree, drawn)
    place = drawn.choice(found)
    was = get_at(place).value
    options = [was * 1.001, was + 1, -was, was * 2, was + 1e-4, 0]
    new = not was if isinstance(was, bool) else drawn.choice(options)
    new = int(new) if isinstance(was, int) and not isinstance(was, bool) else new
    return set_at(place, ast.Constant(new))


def operator(tree: ast.Module, drawn: random.Random) -> None:
    """Change a binary operator, or exchange its operands."""
    found = places(tree, ast.BinOp)
    if not found:
        return wrap(tree, drawn)
    node = get_at(drawn.choice(found))
    if drawn.random() < 0.5:
        node.left, node.right = node.right, node.left
    else:
        node.op = drawn.choice([ast.Add(), ast.Sub(), ast.Mult(), ast.Div()])
    return None


def name(tree: ast.Module, drawn: random.Random) -> None:
    """Replace the name of a function or submodule by that of another."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in SWAPS]
    if not nodes:
        return wrap(tree, drawn)
    node = drawn.choice(nodes)
    node.attr = SWAPS[node.attr]
    return None


def statement(tree: ast.Module, drawn: random.Random) -> None:
    """Add, move, repeat or delete a statement, or return more."""
    at = drawn.randrange(len(tree.body))
    what = drawn.random()
    if what < 0.6:
        assigned = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in "xyhdv"]
        text = drawn.choice(STATEMENTS).replace("{}", drawn.choice(assigned or ["x"]))
        tree.body[at:at] = ast.parse(text).body
    elif what < 0.7 and len(tree.body) > 2:
        tree.body[0], tree.body[1] = tree.body[1], tree.body[0]
    elif what < 0.8 and len(tree.body) > 1:
        del tree.body[min(at, len(tree.body) - 2)]
    elif what < 0.9 and len(tree.body) > 1:
        tree.body.insert(0, copy.deepcopy(tree.body[min(at, len(tree.body) - 2)]))
    else:
        last = tree.body[-1]
        assert isinstance(last, ast.Return)
        assert last.value is not None
        extra = drawn.choice(["x", "x.shape", "x.mean()", "None"])
        last.value = ast.Tuple([last.value, ast.parse(extra, mode="eval").body], ast.Load())


MUTATIONS: tuple[Callable[[ast.Module, random.Random], None], ...] = (
    *(wrap, wrap, wrap, wrap),
    *(number, operator, name),
    *(statement, statement),
)


def text_of(kind: str, body: str, index: str) -> str:
    """The source of the class M``index`` with this body as its forward."""
    arguments = "self, x, z" if kind == "gated" else "self, x"
    pad = "\n        "
    init = INITS[kind].replace("{}", pad.lstrip("\n"))
    init += pad + "self.bias = weight()" if "self.bias" in body else ""
    if kind == "unit":
        init += pad + (PACKED if "self.both" in body else PROJECTIONS)
    lines = body.strip().replace("\n", pad)
    return (
        f"\n\nclass M{index}(nn.Module):\n    def __init__(self):{pad}super().__init__(){pad}{init}"
        f"\n\n    def forward({arguments}):{pad}{lines}\n"
    )


def mutants(seed: int, count: int) -> Iterator[Mutant]:
    """Yields ``count`` mutants of all kinds, drawn from ``seed``."""
    drawn = random.Random(seed)
    for index in range(count):
        kind = drawn.choice(list(BODIES))
        tree = ast.parse(drawn.choice(BODIES[kind]).replace("return", "returned ="))
        last = tree.body[-1]
        assert isinstance(last, ast.Assign)
        tree.body[-1] = ast.Return(last.value)
        drawn.choice(MUTATIONS)(tree, drawn)
        body = ast.unparse(ast.fix_missing_locations(tree))
        yield Mutant(kind, body, text_of(kind, body, str(index)))


def chunk(index: int, size: int = 20) -> list[Mutant]:
    """Part ``index`` of all mutants: ``size`` of them, drawn from a seed of their own."""
    return list(mutants(1000 + index, size))


def originals() -> list[Mutant]:
    """The unchanged forwards."""
    pairs = [(kind, body) for kind, bodies in BODIES.items() for body in bodies]
    return [Mutant(k, b, text_of(k, b, str(i))) for i, (k, b) in enumerate(pairs)]


def written(found: list[Mutant], folder: Path) -> ModuleType:
    """Writes the classes M0, M1, … to a file and imports it as a module."""
    path = folder / "zoo_mutants.py"
    path.write_text(HEAD + "".join(mutant.source for mutant in found))
    spec = importlib.util.spec_from_file_location(f"zoo_mutants_{id(found)}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = [(draw(2, 3, 16),), (draw(3, 16, scale=60.0),), (draw(1, 2, 2, 16, scale=3e3),)]
IMAGES = [
    (draw(2, 4, 5, 5),),
    (draw(3, 4, 3, 3, scale=60.0).contiguous(memory_format=torch.channels_last),),
]
MODES = (lambda: Mode(True), lambda: Mode(False), lambda: Mode(False, torch.no_grad()))


def problems(mutant: Mutant, cls: Any, notes: list[str] | None = None) -> list[str]:
    """Differences between a mutant and its copy that ``replace`` or ``fuse`` has changed."""
    inputs: list[tuple[Tensor, ...]] = list(IMAGES if mutant.kind == "net" else ROWS)
    if mutant.kind == "gated":
        inputs = [(x, x.flip(0) * 0.5) for (x, *_) in inputs]
    change = "fuse" if mutant.kind == "net" else "replace"
    modes = MODES if mutant.kind == "net" else MODES[:2]
    return same(cls, inputs, change, modes=modes, notes=notes)
