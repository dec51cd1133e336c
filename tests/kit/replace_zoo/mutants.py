"""Generated mutants: forwards that are recognised, each with one change.

A mutant is the source of a class. One expression of its forward is wrapped, or a number, an
operator or a name is another one, or a statement is moved, left out or added.
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
from replace_zoo.judge import Mode, same
from replace_zoo.zoo import draw
from torch import Tensor

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from replace_zoo.zoo import ClippedGradient, Straight, log, weight

def keep(module, x):
    module.last = x
    return x

def count(module, x):
    module.calls += 1
    return x
"""

NORMS = (
    "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
    "self.weight * (x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6))",
    "self.weight * (x.float() * (x.float().square().mean(-1, True) + self.eps) ** -0.5).to(x.dtype)",
    "F.rms_norm(x, (16,), self.weight, self.eps)",
    "F.layer_norm(x, (16,), self.weight, self.bias, self.eps)",
    "(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * (1 + self.weight)",
)
ACTS = (
    "0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3))))",
    "x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))",
    "x * torch.sigmoid(1.702 * x)",
    "F.gelu(x)",
    "torch.relu(x).square()",
    "x * torch.sigmoid(x)",
)
UNITS = (
    "self.down(F.silu(self.gate(x)) * self.up(x))",
    "self.down(self.up(x) * F.gelu(self.gate(x), approximate='tanh'))",
    "self.drop(self.down(self.drop0(self.act(self.gate(x)) * self.up(x))))",
)
BODIES: dict[str, tuple[str, ...]] = {
    "norm": (
        *(f"y = {form}\nreturn y" for form in NORMS),
        "d = x - x.mean(-1, keepdim=True)\nv = d.pow(2).mean(-1, keepdim=True)\n"
        "d = d * torch.rsqrt(v + self.eps)\nreturn d * self.weight + self.bias",
        "t = x.dtype\nh = x.to(torch.float32)\nv = h.pow(2).mean(-1, keepdim=True)\n"
        "h = h * torch.rsqrt(v + self.eps)\nreturn self.weight * h.to(t)",
    ),
    "gated": (
        "h = x * F.silu(z)\nreturn h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)"
        " * self.weight",
        "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n"
        "return self.weight * h * F.silu(z)",
    ),
    "act": tuple(f"y = {form}\nreturn y" for form in ACTS),
    "unit": (
        *(f"y = {form}\nreturn y" for form in UNITS),
        "g, u = self.both(x).chunk(2, dim=-1)\ny = F.silu(g) * u\nreturn self.drop(self.down(y))",
        "h = self.both(x)\nu, g = h.chunk(2, dim=-1)\nreturn self.down(self.drop0(u * F.silu(g)))",
    ),
    "net": (
        "y = self.bn(self.conv(x))\ny = y + x\nreturn self.relu(y)",
        "y = self.conv(x)\ny = F.relu(self.bn(y))\ny = self.bn2(self.conv2(y))\ny += x\n"
        "return torch.relu(y)",
        "y = F.silu(self.bn(x))\nz = self.conv(y)\nreturn self.bn2(z).add(x).relu()",
    ),
    "layer": (
        "h = x + self.mix(x)\ny = self.norm(h)\nreturn h + self.down(y)",
        "y = self.mix(x)\nx = self.ln(x + y)\ny = self.down(self.act2(self.up(x)))\n"
        "return self.norm(x + y)",
    ),
}
INITS = {
    "norm": "self.eps, self.calls, self.weight = 1e-5, 0, weight()",
    "gated": "self.eps, self.calls, self.weight = 1e-5, 0, weight()",
    "act": "self.eps, self.calls = 1e-5, 0",
    "unit": "self.calls, self.act = 0, nn.SiLU()\n{}self.drop, self.drop0 = nn.Dropout(0.2), nn.Dropout(0.1)",
    "net": "self.calls, self.conv, self.conv2 = 0, *(nn.Conv2d(4, 4, 3, padding=1) for _ in '12')\n"
    "{}self.bn, self.bn2, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU()",
    "layer": "self.calls, self.norm, self.ln = 0, nn.RMSNorm(16), nn.LayerNorm(16)\n"
    "{}self.mix, self.up, self.down = (nn.Linear(16, 16) for _ in '123')\n{}self.act2 = nn.GELU()",
}
PROJECTIONS = "self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in '123')"
PACKED = "self.both, self.down = nn.Linear(16, 32), nn.Linear(16, 16)"

WRAPPERS = (
    "{}.clamp(-0.5, 0.5)",
    "{}.clamp(max=7.0)",
    "{}.clamp(-1e3, 1e3)",
    "{}.clamp(min=-1e-3)",
    "torch.nan_to_num({})",
    "{}.detach()",
    "F.dropout({}, 0.3, self.training)",
    "F.dropout({}, 0.3)",
    "torch.where({0} > 30, {0} * 0, {0})",
    "({0} + torch.randn_like({0}) if self.training else {0})",
    "{}.to(torch.bfloat16).to(x.dtype)",
    "{}.float().to(x.dtype)",
    "({0} if x.dim() != 2 else {0} * 2)",
    "({0} if x.dim() == 3 else {0} + 1)",
    "({0} * 2 if x.abs().max().item() > 20 else {0})",
    "({0} * 1.5 if self.training else {0})",
    "({0} if self.training else {0} + 1e-2)",
    "log({})",
    "keep(self, {})",
    "count(self, {})",
    "Straight.apply({})",
    "ClippedGradient.apply({})",
    "{}.mul_(1.5)",
    "({} * (1 + 1e-3))",
    "({} + 1e-4)",
    "{}.abs()",
    "({} + 0)",
    "({} * 1)",
    "({0} * torch.is_grad_enabled())",
    "({0} + 0 * torch.rand(()))",
    "{}.contiguous()",
    "{}.clone()",
    "({0} + {0}.detach() * 0)",
)
SWAPS = {
    "mean": "sum",
    "pow": "mul",
    "square": "abs",
    "rsqrt": "reciprocal",
    "sqrt": "square",
    "silu": "gelu",
    "gelu": "silu",
    "relu": "sigmoid",
    "sigmoid": "tanh",
    "tanh": "sigmoid",
    "erf": "tanh",
    "gate": "up",
    "bn": "bn2",
    "drop": "drop0",
    "float": "bfloat16",
}
STATEMENTS = (
    "x = x.clamp(-40, 40)",
    "x.mul_(2)",
    "x = x.detach()",
    "self.calls += 1",
    "self.last = x",
    "log(x)",
    "torch.rand(1)",
    "x = x * (1 + self.training)",
    "x = x if x.dim() > 2 else 2 * x",
    "x = x.clone()",
    "if self.training and torch.rand(()) < 0.5: return x",
    "if x.shape[0] == 3: return x",
    "if not self.training: return x",
    "if x.abs().sum() > 1e4: return 0 * x",
    "if x.isnan().any(): raise ValueError",
    "{}.zero_()",
    "{}.add_(1)",
    "{} = {}.detach()",
)


@dataclass(frozen=True)
class Mutant:
    """A class by its source."""

    kind: str
    body: str
    source: str


def is_tensor(node: ast.AST) -> bool:
    """Whether an expression may be a tensor that can be wrapped."""
    if isinstance(node, ast.Name):
        return node.id in "xyzhdvgu" and isinstance(node.ctx, ast.Load)
    return isinstance(node, (ast.BinOp, ast.Call)) or (
        isinstance(node, ast.Attribute) and node.attr == "weight"
    )


def places(tree: ast.Module, kind: type | tuple[type, ...]) -> list[tuple[ast.AST, str, int | None]]:
    """Parents, fields and indices of the expressions of a kind."""
    return [
        (parent, name, index)
        for parent in ast.walk(tree)
        for name, value in ast.iter_fields(parent)
        for index, node in (enumerate(value) if isinstance(value, list) else [(None, value)])
        if isinstance(node, kind)
    ]  # fmt: skip


def set_at(place: tuple[Any, str, int | None], new: ast.AST) -> None:
    """Put an expression at a place."""
    parent, name, index = place
    if index is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[index] = new


def get_at(place: tuple[Any, str, int | None]) -> Any:
    """The expression at a place."""
    value = getattr(place[0], place[1])
    return value if place[2] is None else value[place[2]]


def wrap(tree: ast.Module, drawn: random.Random) -> None:
    """Wrap an expression; a case of its own has the functions that nets leave out."""
    is_net = any(isinstance(n, ast.Attribute) and n.attr == "bn" for n in ast.walk(tree))
    wrappers = [w for w in WRAPPERS if not (is_net and ".apply" in w)]
    place = drawn.choice([p for p in places(tree, ast.expr) if is_tensor(get_at(p))])
    text = drawn.choice(wrappers).format(f"({ast.unparse(get_at(place))})")
    set_at(place, ast.parse(text, mode="eval").body)


def number(tree: ast.Module, drawn: random.Random) -> None:
    """Change a number, or a flag."""
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
    """Change an operator, or exchange its operands."""
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
    """Call another function or submodule."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in SWAPS]
    if not nodes:
        return wrap(tree, drawn)
    node = drawn.choice(nodes)
    node.attr = SWAPS[node.attr]
    return None


def statement(tree: ast.Module, drawn: random.Random) -> None:
    """Add, move, repeat or leave out a statement, or return more."""
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
    """The source of a class."""
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
    """Drawn mutants of all kinds."""
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
    """A part of the mutants."""
    return list(mutants(1000 + index, size))


def originals() -> list[Mutant]:
    """The forwards without a change."""
    pairs = [(kind, body) for kind, bodies in BODIES.items() for body in bodies]
    return [Mutant(k, b, text_of(k, b, str(i))) for i, (k, b) in enumerate(pairs)]


def written(found: list[Mutant], folder: Path) -> ModuleType:
    """A module of classes M0, M1, and so on."""
    path = folder / "zoo_mutants.py"
    path.write_text(HEAD + "".join(mutant.source for mutant in found))
    spec = importlib.util.spec_from_file_location(f"zoo_mutants_{id(found)}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = [(draw(2, 3, 16),), (draw(3, 16, scale=60.0),), (draw(1, 2, 2, 16, scale=3e3),)]
IMAGES = [(draw(2, 4, 5, 5),), (draw(3, 4, 3, 3, scale=60.0).contiguous(memory_format=torch.channels_last),)]
MODES = (lambda: Mode(True), lambda: Mode(False), lambda: Mode(False, torch.no_grad()))


def problems(mutant: Mutant, cls: Any, notes: list[str] | None = None) -> list[str]:
    """What ``replace`` or ``fuse`` does to a mutant."""
    inputs: list[tuple[Tensor, ...]] = list(IMAGES if mutant.kind == "net" else ROWS)
    if mutant.kind == "gated":
        inputs = [(x, x.flip(0) * 0.5) for (x, *_) in inputs]
    change = "fuse" if mutant.kind == "net" else "replace"
    modes = MODES if mutant.kind == "net" else MODES[:2]
    return same(cls, inputs, change, modes=modes, notes=notes)
