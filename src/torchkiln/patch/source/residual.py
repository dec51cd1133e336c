"""Residual sums and the norms after them as one op, in the forward of a module.

``x = residual + y``, and the next use of ``x`` by a norm of the module, become one call. If an
``if`` lies between the two, sum and norm are moved into both branches. All other statements of the
forward are unchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from torchkiln.nn.plain import has_hooks
from torchkiln.ops.dropout import dropout_add
from torchkiln.ops.pointwise import add
from torchkiln.patch.fed import Place, added, feeds, norm_for, op_name
from torchkiln.patch.formula.linear import is_plain, is_tracing
from torchkiln.patch.formula.norm import Norm
from torchkiln.patch.formula.torch_modules import TorchModule
from torchkiln.patch.plan import Plan, plan_of
from torchkiln.patch.source.code import GUARDS, blocks
from torchkiln.patch.source.dropout import drops
from torchkiln.patch.source.layer import OwnScope, call_of, captured, helper_call, named, read
from torchkiln.patch.table import stays

ADD_NORM = "_kiln_add_norm"
"""The helper in rewritten source: ``(norm(a + b), a + b)``, with a dropout of ``a`` or ``b``."""

PLUS = "_kiln_plus"
"""The helper in rewritten source: ``a + b``."""

TRANSPOSING = ("cuda",)
"""Devices on which torch adds tensors of different strides element by element."""

NORMED = "_kiln_normed"
"""The variable that holds the result of a norm between two statements."""

OP_OF = {"rms_norm": "add_rms_norm", "layer_norm": "add_layer_norm"}


def op_of(plan: Plan) -> str | None:
    """The name of the op for a sum and the norm of a plan."""
    return OP_OF.get(op_name(plan)) if plan.kind == "norm" else None


def is_kept(plan: Plan, a: Tensor) -> bool:
    """Whether to use the op in this call: always, or by measured times under ``torch.compile``."""
    return not is_compiling() or stays(op_of(plan) or "", a)


def add_norm(
    *,
    a: Any,
    b: Any,
    norm: Any,
    owner: Any = None,
    left: Any = ...,
    right: Any = ...,
    to: str = "",
    at: Place = None,
) -> tuple[Any, Any]:
    """``(norm(a + b), a + b)``, computed by one op if it takes the call.

    ``left`` is a dropout of ``a``, ``right`` one of ``b``. If a dropout drops elements, dropout and
    sum are one op, and the norm is another. Ellipsis means no dropout, because an attribute may be
    None. With an owner, ``norm`` is the name of the owner's norm, which is read after the sum, and
    ``to`` may be the name of the module that reads the norm, as argument ``at``.
    """
    if left is not ... and drops(left, a, b):
        total = dropout_add(a, b, left.p)
    elif right is not ... and drops(right, b, a):
        total = dropout_add(b, a, right.p)
    else:
        a = a if left is ... else left(a)
        b = b if right is ... else right(b)
        found: Any = read(owner, norm) if is_sum_of_op(a, b) else None
        plan = plan_of(found)
        if (
            isinstance(plan, (Norm, TorchModule))
            and plan.fits(found, a)
            and not has_hooks(found)
            and is_kept(plan, a)
        ):
            quantized = bool(to) and feeds(found, a, owner, to, at)
            return added(plan, found, a, b, quantized=quantized)
        total = plus(a, b)
    found = read(owner, norm)
    if to:
        return norm_for(norm=found, x=total, owner=owner, to=to, at=at), total
    return found(total), total


def plus(a: Any, b: Any) -> Any:
    """``a + b``; by the op, which transposes in shared memory, if only one is contiguous."""
    return add(a, b) if is_crossed(a, b) else a + b


def is_crossed(a: Any, b: Any) -> bool:
    """Whether both are plain tensors of one shape and dtype, of which one is contiguous."""
    if type(a) is not Tensor or type(b) is not Tensor or is_compiling():
        return False
    if not is_plain(a) or not is_plain(b) or a.is_contiguous() == b.is_contiguous():
        return False
    if not is_filled(b if a.is_contiguous() else a):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.device.type in TRANSPOSING and not is_tracing()


def is_filled(x: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_sum_of_op(a: Any, b: Any) -> bool:
    """Whether the sum of the op equals torch's, also in layout: ``a`` is contiguous."""
    if not is_plain(a) or not is_plain(b) or not a.is_contiguous():
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def rewrite_sums(node: ast.FunctionDef, norms: Collection[str]) -> list[str]:
    """Rewrite sums followed by one of these norms; returns the names of the norms."""
    found: list[str] = []
    arguments = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    closed = captured(node)
    for block in blocks(node, but=GUARDS):
        split_sums(block, norms, arguments)
    for block in blocks(node, but=GUARDS):
        for statement in list(block):
            if isinstance(statement, ast.Assign) and is_sum(statement.value):
                found += rewrite_pair(block, block.index(statement), norms, closed)
    inline = Inline(norms)
    inline.generic_visit(node)
    return list(dict.fromkeys([*found, *inline.found]))


def is_sum(node: ast.expr) -> bool:
    """Whether an expression is ``a + b``."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def name_of(target: ast.expr | None) -> str | None:
    """The name of the variable, if the expression is one."""
    return target.id if isinstance(target, ast.Name) else None


def is_copy(node: ast.stmt) -> bool:
    """Whether a statement assigns a variable to other variables."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name):
        return False
    return all(isinstance(target, ast.Name) for target in node.targets)


def rewrite_pair(
    block: list[ast.stmt], index: int, norms: Collection[str], closed: Collection[str]
) -> list[str]:
    """Rewrite ``x = a + b`` and a following ``y = self.norm(x)``, with copies of x between."""
    first = block[index]
    assert isinstance(first, ast.Assign)
    assert isinstance(first.value, ast.BinOp)
    total = name_of(first.targets[0])
    if total is None or len(first.targets) != 1 or total in closed:
        return []
    for at, second in enumerate(block[index + 1 :], index + 1):
        if not isinstance(second, (ast.Assign, ast.AnnAssign, ast.Return)):
            return []
        call = call_of(second.value, norms)
        if call is not None and name_of(call[1]) == total:
            a, b = first.value.left, first.value.right
            value = helper_call(ADD_NORM, a=a, b=b, **named(norm=call[0]))
            first.targets = [
                ast.Tuple([ast.Name(name, ast.Store()) for name in (NORMED, total)], ast.Store())
            ]
            first.value = ast.copy_location(value, first)
            second.value = ast.Name(NORMED, ast.Load())
            if not isinstance(second, ast.Return):  # frees the norm's result as before
                block.insert(at + 1, ast.Delete([ast.Name(NORMED, ast.Del())]))
                ast.copy_location(block[at + 1], second)
            for statement in block[index : at + 2]:
                ast.fix_missing_locations(statement)
            return [call[0]]
        if not is_copy(second) or total in map(name_of, getattr(second, "targets", ())):
            return []
    return []


def split_sums(block: list[ast.stmt], norms: Collection[str], arguments: Collection[str]) -> None:
    """Move a sum before an ``if``, and the norm after it, into both branches.

    ``x = a + b; if c is not None: ...; y = self.norm(x)`` becomes ``if c is not None: x = a + b;
    ...; y = self.norm(x)`` and ``else: x = a + b; y = self.norm(x)``, if ``c`` is an argument that
    the statements before do not set.
    """
    for index in reversed(range(len(block))):
        first = block[index]
        if not isinstance(first, ast.Assign) or not is_sum(first.value):
            continue
        at = after_copies(block, index + 1)
        branch = block[at] if at < len(block) else None
        if not isinstance(branch, ast.If) or branch.orelse:
            continue
        last = after_copies(block, at + 1)
        call = call_of(getattr(block[last], "value", None), norms) if last < len(block) else None
        total = name_of(first.targets[0])
        if call is None or total is None or name_of(call[1]) != total:
            continue
        before, behind = block[index:at], block[at + 1 : last + 1]
        if tested(branch.test) in set(arguments) - set(stored(before)):
            branch.body = [*deepcopy(before), *branch.body, *deepcopy(behind)]
            branch.orelse = [*before, *behind]
            block[index : last + 1] = [branch]


def after_copies(block: list[ast.stmt], index: int) -> int:
    """The index of the next statement that is no copy of a variable."""
    while index < len(block) and is_copy(block[index]):
        index += 1
    return index


def stored(block: list[ast.stmt]) -> Iterator[str]:
    """The variables that statements set."""
    for statement in block:
        for part in ast.walk(statement):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


def tested(node: ast.expr) -> str | None:
    """The variable of the condition ``x is None`` or ``x is not None``."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        return None
    right = node.comparators[0]
    is_none = isinstance(right, ast.Constant) and right.value is None
    return name_of(node.left) if is_none and len(node.ops) == 1 else None


class Inline(OwnScope, ast.NodeTransformer):
    """Rewrites ``self.norm(a + b)``."""

    def __init__(self, norms: Collection[str]) -> None:
        self.norms = norms
        self.found: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrites a call of a norm of a sum."""
        self.generic_visit(node)
        call = call_of(node, self.norms)
        if call is None or not isinstance(call[1], ast.BinOp) or not is_sum(call[1]):
            return node
        self.found.append(call[0])
        made = helper_call(ADD_NORM, norm=node.func, a=call[1].left, b=call[1].right)
        first = ast.Subscript(made, ast.Constant(0), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(first, node))


def rewrite_others(node: ast.FunctionDef) -> None:
    """Rewrite the sums of two variables that are left, such as those at the end of a layer."""
    Plus().generic_visit(node)


class Plus(OwnScope, ast.NodeTransformer):
    """Rewrites ``a + b`` of two variables."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Rewrites a sum; its parts may be sums, too."""
        self.generic_visit(node)
        if not is_sum(node) or not (name_of(node.left) and name_of(node.right)):
            return node
        call = ast.Call(ast.Name(PLUS, ast.Load()), [node.left, node.right], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))
