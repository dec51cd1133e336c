"""Mutants of forwards that ``torchkiln.replace`` rewrites from their source.

A mutant is a forward with one change, drawn from a seed: of its statements, or of its submodules
after the replacement. Two models of a mutant have equal parameters; one of them is replaced.
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import torchkiln

COUNT = 2000
"""Number of mutants in a full run."""

SIZE = 16

FORWARDS: tuple[tuple[str, ...], ...] = (
    (
        *("h = self.norm(x)", "h = self.fc(h)", "x = x + h", "t = x", "x = self.norm2(x)"),
        "return t + self.o(x)",
    ),
    ("h = self.fc(r)", "y = self.norm(x + self.fc2(h))", "return y * 2"),
    ("h = self.fc(x)", "h = self.drop(h)", "h = self.norm(h + r)", "return h + x"),
    ("t = r + self.drop(self.fc(x))", "y = self.norm(t)", "return y + t"),
    (
        *("q = self.q(x).view(3, 2, 8)", "k = self.k(x).view(3, 2, 8)", "v = self.v(x)"),
        "return self.o((q * k).flatten(1) + v)",
    ),
    (
        *("q = self.norm(self.q(x)).view(3, 2, 8)", "k = self.norm2(self.k(x)).view(3, 2, 8)"),
        *("v = self.v(x) * 2", "return (q * k).flatten(1) + v"),
    ),
    ("h = self.fc(x)", "h = self.act(h)", "h = self.fc2(h)", "return h + r"),
    ("h = self.act(self.fc(x))", "return self.norm(h) + r"),
    (
        *(
            "x = x + self.fc(x)",
            "if r is not None:\n    t = x\n    x = self.norm2(x)\n    x = t + r",
        ),
        *("t = x", "x = self.norm(x)", "return t + self.o(x)"),
    ),
    (
        *("z = self.o(x)", "y = self.norm(x + r)", "loss = F.cross_entropy(z, z.argmax(-1))"),
        "return y + loss",
    ),
    ("q, k, v = self.q(x), self.k(x), self.v(x)", "h = q * k", "return h + v"),
    ("for _ in range(2):\n    x = x + self.fc(x)\n    x = self.norm(x)", "return x + r"),
    ("h = self.drop(self.mix(x))", "return self.norm(x + h)"),
)

STATEMENTS = (
    *("{v} += 1", "{v}.add_(1)", "{v} = {v} * 2", "{v}[:1] = 0.25", "{v}.zero_()", "del {v}"),
    *("alias = {v}\nalias.mul_(0.5)", "alias = {v}[:, 0]\nalias += 1", "alias = {v}\n{v} = {w}"),
    *("{v} = {w}", "{v}, {w} = {w}, {v}", "f = lambda: {v}", "keep = [{v}]\nkeep[0].mul_(3)"),
    *("self.effect({v})", "{v} = self.effect({v})", "self.log.append({v})", "self.last = {v}"),
    *("self.{m} = self.spare_{m}", "self.{m}, self.{n} = self.{n}, self.{m}"),
    *(
        "with torch.no_grad():\n    self.{m}.weight.mul_(1.5)",
        "self.{m}.weight.requires_grad_(False)",
    ),
    *("self.{m}.register_forward_hook(self.hook)", "self.{m}.eval()", "self.drop.p = 0.0"),
    *("raise ValueError", "1 / 0", "{v}.view(7)", "{v} = None", "self.{m} = None", "del self.{m}"),
    *("{v} = {v} + torch.rand(1)", "torch.manual_seed(5)", "{v} = {v}.detach()", "return {v}"),
    *(
        "{v} = {v}.float()",
        "{v} = {v}.T.contiguous().T",
        "if {v}.flatten()[0] > 0:\n    {v} = {v} * 2",
    ),
    *("self.norm = self.norm2", "self = self.twin", "torch.set_grad_enabled(False)"),
)

INSIDE = (
    *("self.effect({e})", "({e} * 2)", "{e}.mul_(2)", "({e} if x[0, 0] > 0 else self.effect(x))"),
    *("self.wrap({e})", "({e}, self.effect(x))[0]", "(self.effect(x), {e})[1]", "{e}.relu()"),
    *("(t := {e})", "self.hook(self, (), {e})", "[{e} for _ in (1, 2)][1]"),
)

EFFECTS = ("log", "write", "swap", "raise", "random", "weight", "same")
"""Actions of ``effect`` and of hooks."""


class Effect(nn.Module):
    """A submodule whose call changes its argument or its parent."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent = [parent]  # in a list, so that it is not registered as a submodule

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parent[0].hook(self, (), x)
        return y


class Base(nn.Module):
    """The submodules that the forwards use, and the actions that change them."""

    def __init__(self, kind: str, one: str, other: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.fc, self.fc2, self.mix = (
            nn.Linear(SIZE, SIZE) for _ in range(7)
        )
        self.norm, self.norm2, self.drop = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE), nn.Dropout(0.3)
        self.act: nn.Module = nn.GELU()
        spares: dict[str, nn.Module] = {"drop": nn.Dropout(0.6), "act": nn.SiLU()}
        spares |= {f"norm{i}": nn.LayerNorm(SIZE, 1.0).double() for i in ("", 2)}
        for name in ("q", "k", "v", "o", "fc", "fc2", "mix"):
            spares[name] = nn.Linear(SIZE, SIZE).double()
        for name, spare in spares.items():  # not registered, so not replaced
            vars(self)[f"spare_{name}"] = spare
        self.effect = Effect(self)
        self.kind, self.names, self.log = kind, (one, other), list[Any]()
        self.is_found = False  # effects are off while replace() searches, as it runs submodules

    @property
    def twin(self) -> Base:
        """The model itself; reading it is logged."""
        self.log.append("twin")
        return self

    def wrap(self, x: Tensor) -> Tensor:
        """Returns x; the call is logged."""
        self.log.append("wrap")
        return x

    def hook(self, _: Any, __: Any, x: Any) -> Any:
        """Runs the action of ``kind`` on the tensor or the model."""
        one, other = self.names
        if not self.is_found:
            return x
        self.log.append((self.kind, x.detach().clone() if isinstance(x, Tensor) else x))
        if self.kind == "write":
            x.mul_(0.5)
        elif self.kind == "swap":
            self._modules[one], self._modules[other] = self._modules[other], self._modules[one]
        elif self.kind == "raise":
            raise KeyError(one)
        elif self.kind == "random":
            return x + torch.rand(())
        elif self.kind == "weight":
            with torch.no_grad():
                next(self._modules[one].parameters()).mul_(2)  # type: ignore[union-attr]
        return x


def adapted(model: Any, name: str) -> None:
    """Put a submodule into a sequence before a tanh, as adapters wrap layers."""
    setattr(model, name, nn.Sequential(getattr(model, name), nn.Tanh()))


def parametrized(model: Any, name: str) -> None:
    """Parametrize a weight by its tanh."""
    parametrize.register_parametrization(getattr(model, name), "weight", nn.Tanh())


def own_forward(model: Any, name: str) -> None:
    """Set ``forward`` of one submodule to twice its result."""
    module = getattr(model, name)
    module.forward = lambda x: type(module).forward(module, x) * 2


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "nothing": lambda *_: None,
    "hook": lambda model, name: getattr(model, name).register_forward_hook(model.hook),
    "pre-hook": lambda model, name: getattr(model, name).register_forward_pre_hook(
        lambda module, args: model.hook(module, args, args[0])
    ),
    "gradient hook": lambda model, name: getattr(model, name).register_full_backward_hook(
        lambda *args: model.log.append(args[2][0])
    ),
    "spare": lambda model, name: setattr(model, name, getattr(model, f"spare_{name}")),
    "adapter": adapted,
    "parametrization": parametrized,
    "own forward": own_forward,
    "frozen": lambda model, name: getattr(model, name).requires_grad_(requires_grad=False),
    "eval": lambda model, _: model.eval(),
    "frozen all": lambda model, _: model.requires_grad_(requires_grad=False),
    "float32": lambda model, name: getattr(model, name).float(),
    "removed": delattr,
}


@dataclass(frozen=True)
class Mutant:
    """A forward with one change, and the effect and names of submodules for its actions."""

    seed: int
    body: str
    change: str
    """The key in ``CHANGES`` of what is done to a submodule after the replacement."""
    effect: str
    names: tuple[str, str]

    def __str__(self) -> str:
        return f"mutant {self.seed}: {self.change}, {self.effect}, {self.names}:\n{self.body}"

    def cls(self) -> type[Base]:
        """A class with this forward, whose source linecache has."""
        lines = [f"        {line}\n" for line in self.body.split("\n")]
        lines = ["class Net(Base):\n", "    def forward(self, x, r):\n", *lines]
        name = f"<mutant {self.seed}>"
        linecache.cache[name] = (1, None, lines, name)
        scope: dict[str, Any] = {"Base": Base, "torch": torch, "F": F, "__name__": __name__}
        exec(compile("".join(lines), name, "exec"), scope)
        made: type[Base] = scope["Net"]
        return made


def mutant(seed: int) -> Mutant:
    """The mutant that is drawn from a seed."""
    draw = random.Random(seed)
    lines = list(FORWARDS[seed % len(FORWARDS)])
    text = "\n".join(lines)
    modules = sorted(set(re.findall(r"self\.(\w+)\(", text)))
    one, other = draw.choice(modules), draw.choice(modules)
    change = "nothing"
    how = draw.choice(("statement", "statement", "inside", "line", "guard", "submodule"))
    at = draw.randrange(len(lines))
    if how == "statement":
        before = "\n".join(lines[:at])
        names = set(re.findall(r"^\s*(\w+)(?:, \w+)* = ", before, re.MULTILINE))
        v, w = draw.choice(sorted({"x", "r", *names})), draw.choice(("x", "r"))
        made = draw.choice(STATEMENTS).format(v=v, w=w, m=one, n=other)
        lines[at:at] = made.split("\n") if "\n" not in made else [made]
    elif how == "inside":
        values = re.finditer(r"self\.\w+\([^()]*\)|\b[xr]\b(?!\s*=)", text)
        found = draw.choice(list(values))
        made = draw.choice(INSIDE).format(e=found.group())
        lines = [text[: found.start()] + made + text[found.end() :]]
    elif how == "line":
        lines[at : at + 2] = draw.choice(
            (lines[at + 1 : at + 2], [lines[at], *lines[at : at + 2]], lines[at : at + 2][::-1])
        )
    elif how == "guard":
        inner = "\n".join("    " + line for line in "\n".join(lines[at : at + 2]).split("\n"))
        guard = draw.choice(
            (
                f"try:\n    self.effect(x)\n{inner}\nexcept KeyError:\n    self.log.append(x)",
                f"try:\n{inner}\nfinally:\n    self.log.append(dict(x=x).get('x'))",
                f"with torch.no_grad():\n{inner}",
                f"with torch.autocast('cpu', torch.bfloat16):\n{inner}",
            )
        )
        lines[at : at + 2] = [guard]
    else:
        change = draw.choice(sorted(CHANGES))
    effect = draw.choice(EFFECTS)
    return Mutant(seed, "\n".join(lines) or "pass", change, effect, (one, other))


def outcome(model: Base, seed: int) -> list[Any]:
    """Results, gradients, logged effects, exceptions and random states of two calls."""
    found: list[Any] = []
    for call in range(2):
        torch.manual_seed(seed + call)
        x, r = (torch.randn(3, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2))
        model.log.clear()
        try:
            y = model(x * 1, r * 1)
            found.append(y)
            if isinstance(y, Tensor) and y.requires_grad:
                leaves = [x, r, *(p for p in model.parameters() if p.requires_grad)]
                total = y.square().sum()
                found += torch.autograd.grad(total, leaves, allow_unused=True)
        except Exception as error:
            found.append(type(error))
        torch.set_grad_enabled(True)
        found.append(list(model.log))
        found += [torch.get_rng_state(), *model.parameters(), vars(model).get("last")]
        found.append([name for name, _ in model.named_modules()])
    return found


def difference(one: Any, other: Any) -> str:
    """The first place where two outcomes differ, as text; "" if they are equal."""
    if isinstance(one, (list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return f"{one} and {other}"
        pairs = enumerate(zip(one, other, strict=True))
        return next((f"[{i}] {found}" for i, pair in pairs if (found := difference(*pair))), "")
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if one is other or one == other else f"{one} and {other}"
    if one.dtype == other.dtype and torch.equal(one, other):
        return ""
    try:
        error = 1e-9 if one.dtype == torch.float64 else 1e-2
        torch.testing.assert_close(one, other, rtol=error, atol=error, equal_nan=True)
    except AssertionError as unlike:
        return str(unlike)
    return ""


def check(mutant: Mutant) -> str:
    """The difference of a replaced mutant from the original, also after undo(); "" if none."""
    cls = mutant.cls()
    models = []
    for _ in range(2):
        torch.manual_seed(mutant.seed)
        models.append(cls(mutant.effect, *mutant.names).double())
    was, now = models
    report = torchkiln.replace(now)
    for model in models:
        model.is_found = True
        try:
            CHANGES[mutant.change](model, mutant.names[0])
        except (AttributeError, ValueError):
            return ""  # the submodule has no parameter to change
    found = difference(outcome(was, mutant.seed), outcome(now, mutant.seed))
    if not any(map(parametrize.is_parametrized, now.modules())):  # else undo() refuses
        report.undo()
        found = found or difference(outcome(was, mutant.seed), outcome(now, mutant.seed))
    linecache.cache.pop(f"<mutant {mutant.seed}>", None)
    said = [row.now for row in report.rows if not row.name]
    return f"{mutant}\n{said}: {found}" if found else ""
