"""Residual sums and the norms behind them as one op, in the forward of a module.

``x = residual + y``, and the next use of ``x`` by a norm of the module, become one call. All other
statements of the forward stay as they are.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchkiln.ops.norm import add_layer_norm, add_rms_norm
from torchkiln.patch.chain import has_hooks
from torchkiln.patch.norm import Norm
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import cast
from torchkiln.patch.report import Row
from torchkiln.patch.source import compiled, definition, forward_of, parsed
from torchkiln.patch.torch_modules import TorchModule

ADD_NORM = "_kiln_add_norm"
"""The helper in rewritten source: ``(norm(a + b), a + b)``."""

OP_OF = {"rms_norm": "add_rms_norm", "layer_norm": "add_layer_norm"}


def op_of(plan: Plan) -> str | None:
    """The op for a sum before the norm of a plan."""
    return OP_OF.get(str(plan).partition("(")[0]) if plan.kind == "norm" else None


def added(plan: Plan, norm: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of a module with this plan after a sum, and the sum."""
    if isinstance(plan, Norm):
        eps = getattr(norm, plan.eps) if isinstance(plan.eps, str) else plan.eps
        weight = None if plan.weight is None else getattr(norm, plan.weight)
        if plan.op == "rms_norm":
            return add_rms_norm(a, b, a.shape[-1:], weight, eps, offset=plan.offset)
        bias = None if plan.bias is None else getattr(norm, plan.bias)
        return add_layer_norm(a, b, a.shape[-1:], weight, bias, eps)
    if isinstance(norm, nn.LayerNorm):
        return add_layer_norm(a, b, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return add_rms_norm(a, b, norm.normalized_shape, norm.weight, norm.eps)


def add_norm(norm: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """``(norm(a + b), a + b)``, by one op where it takes the call."""
    plan = getattr(type(norm), "_kiln_plan", None)
    if (
        isinstance(plan, (Norm, TorchModule))
        and isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and plan.fits(norm, a)
        and not has_hooks(norm)
    ):
        return added(plan, norm, a, b)
    total = a + b
    return norm(total), total


@dataclass(frozen=True)
class ResidualNorms(Plan):
    """The forward of a class with sums before these norms as part of them."""

    kind: ClassVar[str] = "residual"
    takes_options: ClassVar[bool] = True

    owner: type[nn.Module]
    norms: tuple[tuple[str, str], ...]
    """The names of the norms and their ops."""
    function: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        function = forward_of(self.owner)
        node = function if isinstance(function, str) else definition(function)
        if isinstance(function, str) or isinstance(node, str):
            raise ValueError(f"torchkiln.replace: {self.owner.__qualname__}: {node}")
        rewrite(node, {name for name, _ in self.norms})
        made = compiled(function, node, **{ADD_NORM: add_norm})
        object.__setattr__(self, "function", made)

    def __reduce__(self) -> tuple[Any, ...]:
        return ResidualNorms, (self.owner, self.norms)

    def __str__(self) -> str:
        return ", ".join(f"{op} at {name}" for name, op in self.norms)

    def forward(self, module: Any, *args: Any, **options: Any) -> Any:
        """The rewritten forward."""
        return self.function(module, *args, **options)


def find(cls: type[nn.Module], norms: Collection[str]) -> list[str] | str:
    """The names of those norms of a module that follow a sum, or why they stay as they are."""
    function = forward_of(cls)
    node = function if isinstance(function, str) else definition(function)
    if isinstance(node, str):
        shown = parsed(inspect.unwrap(cls.forward))
        return node if shown and rewrite(shown, norms) else []
    return rewrite(node, norms)


class Residuals:
    """Finds the modules whose sums become part of norms that get a new forward."""

    def __init__(self, matches: Iterable[tuple[Row, nn.Module, Match]], *, exact: bool) -> None:
        self.norms = {module: (row, match) for row, module, match in matches if op_of(match.plan)}
        self.exact = exact
        self.known: dict[Any, bool] = {}

    def find(self, module: nn.Module, row: Row) -> ResidualNorms | None:
        """The plan of a module; if its forward has sums, the row has what became of them."""
        norms = {
            name: self.norms[child]
            for name, child in module.named_modules()
            if child in self.norms and all(map(str.isidentifier, name.split(".")))
        }
        found = find(type(module), norms) if norms else []
        if not found:
            return None
        row.kind = "residual"
        if isinstance(found, str):
            row.why = found
            return None
        rows = [norms[name][0] for name in found]
        worst = max(rows, key=lambda each: each.error_now or 0.0)
        row.error_was, row.error_now, row.same = worst.error_was, worst.error_now, worst.same
        if not all(self.is_bitwise(module.get_submodule(name), norms[name][1]) for name in found):
            row.same, row.why = "other rounding", "not bitwise equal" if self.exact else ""
        plan = ResidualNorms(
            type(module), tuple((name, str(op_of(norms[name][1].plan))) for name in found)
        )
        row.now = str(plan)
        return None if row.why else plan

    def is_bitwise(self, norm: nn.Module, match: Match) -> bool:
        """Whether the op gives the numbers of a sum and of the norm's new forward."""
        weight = next(norm.parameters(), torch.empty(0))
        device = torch.device("cpu") if weight.is_meta else weight.device
        key = (match.plan, weight.dtype, device, match.inputs[0].shape)
        if key not in self.known:
            copy = cast(match.copy, weight.dtype, device)
            a = match.inputs[0].to(device, weight.dtype)
            b = a.flip(0)
            with torch.no_grad():
                y, total = added(match.plan, copy, a, b)
                expected = match.plan.forward(copy, a + b)
                self.known[key] = torch.equal(total, a + b) and torch.equal(y, expected)
        return self.known[key]


def rewrite(node: ast.FunctionDef, norms: Collection[str]) -> list[str]:
    """Rewrite sums before these norms; returns the names of the norms."""
    found: list[str] = []
    for block in blocks(node):
        for index, statement in enumerate(block):
            if isinstance(statement, ast.Assign) and is_sum(statement.value):
                found += rewrite_pair(block, index, norms, len(found))
    inline = Inline(norms)
    inline.visit(node)
    return [*found, *inline.found]


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements."""
    for part in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(part, name, None)
            if isinstance(block, list):
                yield block


def is_sum(node: ast.expr) -> bool:
    """Whether an expression is ``a + b``."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def name_of(target: ast.expr | None) -> str | None:
    """The variable that an expression is."""
    return target.id if isinstance(target, ast.Name) else None


def is_copy(node: ast.stmt) -> bool:
    """Whether a statement gives the value of a variable to others."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name):
        return False
    return all(isinstance(target, ast.Name) for target in node.targets)


def norm_call(node: ast.expr | None, norms: Collection[str]) -> tuple[str, ast.expr] | None:
    """The name and the argument of a call ``self.name(argument)`` of one of the norms."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    path = ast.unparse(node.func)
    is_own = path.startswith("self.") and path.removeprefix("self.") in norms
    return (path.removeprefix("self."), node.args[0]) if is_own else None


def rewrite_pair(
    block: list[ast.stmt], index: int, norms: Collection[str], count: int
) -> list[str]:
    """Rewrite ``x = a + b`` and a following ``y = self.norm(x)``, with copies of x between."""
    first = block[index]
    assert isinstance(first, ast.Assign)
    assert isinstance(first.value, ast.BinOp)
    total = name_of(first.targets[0])
    if total is None or len(first.targets) != 1:
        return []
    for second in block[index + 1 :]:
        if not isinstance(second, (ast.Assign, ast.AnnAssign, ast.Return)):
            return []
        call = norm_call(second.value, norms)
        if call is not None and name_of(call[1]) == total:
            assert isinstance(second.value, ast.Call)
            kept = f"_kiln_normed_{count}"
            sum_call = helper_call(second.value.func, first.value)
            names = [ast.Name(name, ast.Store()) for name in (kept, total)]
            first.targets = [ast.Tuple(list(names), ast.Store())]
            first.value = sum_call
            second.value = ast.copy_location(ast.Name(kept, ast.Load()), second)
            ast.fix_missing_locations(first)
            return [call[0]]
        if not is_copy(second) or total in map(name_of, getattr(second, "targets", ())):
            return []
    return []


def helper_call(norm: ast.expr, total: ast.BinOp) -> ast.Call:
    """``_kiln_add_norm(norm, a, b)``."""
    helper = ast.Name(ADD_NORM, ast.Load())
    return ast.copy_location(ast.Call(helper, [norm, total.left, total.right], []), total)


class Inline(ast.NodeTransformer):
    """Rewrites ``self.norm(a + b)``."""

    def __init__(self, norms: Collection[str]) -> None:
        self.norms = norms
        self.found: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        call = norm_call(node, self.norms)
        if call is None or not isinstance(call[1], ast.BinOp) or not is_sum(call[1]):
            return node
        self.found.append(call[0])
        first = ast.Subscript(helper_call(node.func, call[1]), ast.Constant(0), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(first, node))
