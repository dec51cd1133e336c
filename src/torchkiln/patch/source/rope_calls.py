"""Rotary position embeddings in the forward of a module, as calls of :func:`torchkiln.rope`."""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from torchkiln.nn.plain import MISSING
from torchkiln.ops._folding import is_transformed
from torchkiln.patch.compare import Comparison
from torchkiln.patch.formula.linear import is_exporting
from torchkiln.patch.formula.reads import Reads, found
from torchkiln.patch.formula.rotation import Dtypes, Form, Ranks, Rotation
from torchkiln.patch.formula.rotation_proof import Prover, Rotate, compared
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import is_users
from torchkiln.patch.source.angles import factors_of
from torchkiln.patch.source.code import blocks
from torchkiln.patch.source.loss_calls import assigned, known_value
from torchkiln.patch.table import stays

ROPE = "_kiln_rope"
"""The helper in rewritten source: its argument is the called function."""

Constants = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Arguments after queries, keys, cos and sin: by position, and by name."""

Proofs = dict[Constants, dict[Ranks, Rotation] | str]
"""The rotations of a function, or the reason why it has none."""

KNOWN: weakref.WeakKeyDictionary[FunctionType, Proofs] = weakref.WeakKeyDictionary()


class RopeCall(NamedTuple):
    """A call that may be a rotation."""

    factors: frozenset[str] = frozenset()
    """Properties of cos and sin, one of which must be known; empty if none is needed."""
    reason: str = ""
    """The reason not to replace the call."""
    compare: Callable[[Dtypes, torch.device], Comparison | None] | None = None
    """Returns the errors of function and op; None if their results differ in dtype."""


def rope_of(called: Any) -> Any:
    """The op if the value is a proven function; else the value itself."""
    if type(called) is not FunctionType:
        return called
    if is_dynamo_compiling() and not is_exporting():
        return partial(rotated, called)
    if is_compiling() or is_transformed():
        return called
    return partial(rotated, called) if called in KNOWN else called


def rotated(called: FunctionType, *args: Any, **options: Any) -> Any:
    """``called(*args, **options)``, computed by the op if it takes the call."""
    q, k, cos, sin, *constants = args
    if all(type(x) is Tensor and not x.is_nested for x in (q, k, cos, sin)):
        given = tuple(constants), tuple(options.items())
        search = compiled_rotation if is_compiling() else rotation_of
        rotation = search(called, given, (q.dim(), cos.dim()), (q.dtype, cos.dtype))
        is_chosen = not is_compiling() or stays("rope", q)
        if rotation is not None and is_chosen and takes(rotation, q, k, cos, sin):
            return rotation.rotated(q, k, cos, sin)
    return called(*args, **options)


def rotation_of(
    called: FunctionType, constants: Constants, ranks: Ranks, dtypes: Dtypes
) -> Rotation | None:
    """The rotation that a function was proven to compute."""
    proofs = KNOWN.get(called, {}).get(constants)
    rotation = proofs.get(ranks) if isinstance(proofs, dict) else None
    return None if rotation is None or dtypes not in rotation.dtypes else rotation


def settings_of(*call: Any) -> tuple[Any, ...]:
    """The result of :func:`rotation_of` in types of Python, and the globals that it reads."""
    rotation = rotation_of(*call)
    if rotation is None or not rotation.reads.hold(None):
        return ()
    paths = tuple(path for path, _ in rotation.reads.values)
    return tuple(rotation.form), rotation.is_partial, rotation.is_dense, paths


# The mark of torch.compiler.assume_constant_result; torchkiln.patch.table has the reason.
settings_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_rotation(*call: Any) -> Rotation | None:
    """:func:`rotation_of` for Dynamo, which guards the globals that are read here."""
    settings = settings_of(*call)
    if not settings:
        return None
    form, is_partial, is_dense, paths = settings
    if any(found(None, path) is MISSING for path in paths):
        return None
    return Rotation(Form(*form), is_partial, is_dense, frozenset(), Reads((), ()))


def takes(rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the op computes the result of the function, also in dtype and layout."""
    form = rotation.form
    is_alike = q.dtype is k.dtype and cos.dtype is sin.dtype and cos.shape == sin.shape
    if not is_alike or q.dim() != k.dim():
        return False
    if any(x.layout is not torch.strided or x.device != q.device for x in (q, k, cos, sin)):
        return False
    shape, of_keys = list(q.shape), list(k.shape)
    shape[form.heads_dim] = of_keys[form.heads_dim] = 0
    batches = (1, q.shape[0]) if cos.dim() == 3 else cos.shape[:1]
    has_tokens = cos.shape[-2] == shape[-5 - form.heads_dim] and cos.shape[0] in batches
    if shape != of_keys or not has_tokens or not (is_ordered(q) and is_ordered(k)):
        return False
    rotary = cos.shape[-1] * (2 if form.factors == "pairs" else 1)
    if (
        rotary % 2
        or not 0 < rotary <= shape[-1]
        or (rotary < shape[-1] and not rotation.is_partial)
    ):
        return False
    needed = form.factors if form.factors in {"halves", "neighbours"} else ""
    if needed and not factors_of(cos) == factors_of(sin) == needed:
        return False
    return rotation.reads.hold(None)


def is_ordered(x: Tensor) -> bool:
    """Whether elements are adjacent and do not overlap, and the batch is the outermost dimension.

    Heads and tokens may have any order.
    """
    *outer, one, other, last = zip(x.stride(), x.shape, strict=True)
    least = 1
    middle = (one, other) if one[0] <= other[0] else (other, one)
    for stride, size in (last, *middle, *outer):
        if size == 1:
            continue
        if stride < least:
            return False
        least = stride * size
    return x.stride(-1) == 1 or x.shape[-1] == 1


def rewrite_ropes(node: ast.FunctionDef, function: FunctionType) -> list[RopeCall]:
    """Rewrite ``q, k = function(q, k, cos, sin)`` for proven functions; returns the calls."""
    calls: list[RopeCall] = []
    own = set(assigned(node))
    for call in pair_calls(node):
        called = known_value(call.func, function.__globals__, own)
        if not isinstance(called, FunctionType) or not is_users(called.__code__.co_filename):
            continue
        constants = constants_of(call)
        if isinstance(constants, str):
            proof: dict[Ranks, Rotation] | str = constants
        else:
            proof = proof_of(called, constants)
        if isinstance(proof, str):
            if {"cos", "sin"} <= set(inspect.signature(called).parameters):
                calls.append(RopeCall(reason=f"{called.__name__}: {proof}"))
            continue
        assert not isinstance(constants, str)
        needed = {rotation.form.factors for rotation in proof.values()}
        is_free = bool(needed & {"pairs", "first"})
        (ranks, rotation), *_ = proof.items()
        compare = partial(compared, with_constants(called, constants), rotation.form, ranks)
        calls.append(RopeCall(frozenset() if is_free else frozenset(needed), compare=compare))
        made = ast.Call(ast.Name(ROPE, ast.Load()), [call.func], [])
        call.func = ast.fix_missing_locations(ast.copy_location(made, call.func))
    return calls


def pair_calls(node: ast.FunctionDef) -> Iterator[ast.Call]:
    """The calls with at least four arguments whose results are assigned to two targets."""
    for block in blocks(node):
        for statement in block:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                (target, *more), call = statement.targets, statement.value
                is_pair = isinstance(target, ast.Tuple) and len(target.elts) == 2 and not more
                starred = any(isinstance(x, ast.Starred) for x in call.args[:4])
                if is_pair and len(call.args) >= 4 and not starred:
                    yield call


def constants_of(call: ast.Call) -> Constants | str:
    """The constants after the four tensors of a call, or the reason if there are other values."""
    try:
        args = tuple(ast.literal_eval(value) for value in call.args[4:])
        pairs = ((keyword.arg or "", ast.literal_eval(keyword.value)) for keyword in call.keywords)
        options = tuple(pairs)
    except (ValueError, TypeError):
        return "its further arguments are no constants"
    values = (*args, *(value for _, value in options))
    if not all(value is None or type(value) in (int, str) for value in values):
        return "its further arguments are no numbers"
    return args, options


def proof_of(function: FunctionType, constants: Constants) -> dict[Ranks, Rotation] | str:
    """The rotations of a function with these constants, or the reason why it has none."""
    known = KNOWN.setdefault(function, {})
    if constants not in known:
        try:
            known[constants] = Prover(with_constants(function, constants), function).rotations()
        except NoFormulaError as error:
            known[constants] = str(error)
    return known[constants]


def with_constants(function: FunctionType, constants: Constants) -> Rotate:
    """A function of the four tensors that passes these constants on."""
    args, options = constants[0], dict(constants[1])

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return function(q, k, cos, sin, *args, **options)

    return rotate
