"""The instructions of a function: stores outside of it, and names that it branches on."""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import logging
import sys
from collections.abc import Iterator
from enum import EnumType
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

CHANGES = (
    *("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"),
    *("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"),
)
"""Instructions with an effect outside of the function."""

PURE: tuple[object, ...] = (
    *(len, isinstance, issubclass, getattr, hasattr, callable, abs, sum, iter, any, all, pow),
)
"""Functions of Python that read their arguments and change nothing."""

LITERALS = ("BUILD_LIST", "BUILD_SET", "BUILD_MAP", "BUILD_TUPLE", "LIST_EXTEND", "SET_UPDATE")
"""The last instruction of a list, set, dict or tuple that the code writes out."""

UNSEEN = (
    *("__dict__", "__class__", "requires_grad", "is_leaf", "grad_fn", "grad", "_version", "_base"),
    *("retains_grad", "output_nr", "is_inference", "is_contiguous", "storage_offset"),
    *("is_meta", "get_device"),
)
"""Attributes whose changes no trace shows: a forward that reads them is not replaced."""

FACTS = ("dtype", "ndim", "dim", "is_floating_point", "is_complex")
"""Properties of a tensor that a forward may branch on: the recorded calls vary them."""


@functools.lru_cache(maxsize=4096)
def fault_of(code: CodeType) -> str:
    """The reason if a function has stores or reads that no trace shows; empty if it has none."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for step, after in itertools.pairwise(steps):
        if found := hidden(step, after):
            return found
    for step in steps:
        is_outer = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        is_import = step.opname == "IMPORT_NAME" and step.argval not in sys.modules
        if step.opname in CHANGES or is_outer or is_import:
            return (
                f"it sets {step.argval}" if isinstance(step.argval, str) else "it sets an element"
            )
    return ""


def hidden(step: dis.Instruction, after: dis.Instruction) -> str:
    """What two instructions change or read that no trace shows; empty if nothing."""
    name = step.argval
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in UNSEEN:
        return f"it reads {name}"
    if step.opname == "LOAD_GLOBAL" and name == "type":
        return "it looks at a class"
    is_look = step.opname == "LOAD_GLOBAL" and name in ("getattr", "hasattr")
    if is_look and after.opname.startswith("LOAD_FAST") and after.argval != "self":
        return "it looks for an attribute of an argument"
    if step.opname in LITERALS and after.opname == "BINARY_OP" and "=" in after.argrepr:
        return "it adds to a list"
    if step.opname == "PUSH_EXC_INFO" and after.opname != "WITH_EXCEPT_START":
        return "it catches exceptions"
    return ""


def branches(code: CodeType, scope: dict[str, Any], *, variables: bool) -> Iterator[str]:
    """The names that a function branches on, except attributes of the module and :data:`FACTS`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    known = {*code.co_varnames[: min(code.co_argcount, 1)], *facts(steps)}
    known |= set() if variables else {*code.co_varnames}
    for step, after in itertools.pairwise(steps):
        if step.opname == "LOAD_GLOBAL" and is_changing(scope.get(str(step.argval)), after):
            yield str(step.argval)
    for at, step in enumerate(steps):
        name = step.opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            yield from conditions(condition(steps, at), scope, known)
        elif "JUMP" in name and "_NONE" in name:
            yield from conditions(condition(steps, at), scope, known, is_identity=True)
        elif name in ("COMPARE_OP", "CONTAINS_OP", "IS_OP"):
            yield from conditions(condition(steps, at + 1), scope, known)
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "get":
            yield from conditions(steps[at + 1 : at + 2], scope, known)
        elif name in ("GET_ITER", "BINARY_SUBSCR") or step.argrepr == "[]":
            yield from conditions(condition(steps, at), scope, known)


def is_changing(value: object, after: dis.Instruction) -> bool:
    """Whether a global is a cache, or an object whose attribute the next instruction reads."""
    if isinstance(value, functools._lru_cache_wrapper):
        return True
    if value is None or isinstance(value, (ModuleType, FunctionType, EnumType, logging.Logger)):
        return False
    owner = value if isinstance(value, type) else type(value)
    is_read = after.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return is_read and not owner.__module__.startswith(("torch.", "builtins"))


def facts(steps: list[dis.Instruction]) -> Iterator[str]:
    """The variables that are set exactly once, to one of :data:`FACTS`."""
    stores = [step.argval for step in steps if "STORE_FAST" in step.opname]
    names = [n for value in stores for n in (value if isinstance(value, tuple) else (value,))]
    for fact, store in itertools.pairwise(steps):
        is_fact = fact.opname == "LOAD_ATTR" and fact.argval in FACTS
        if is_fact and store.opname == "STORE_FAST" and names.count(str(store.argval)) == 1:
            yield str(store.argval)


def condition(steps: list[dis.Instruction], at: int) -> list[dis.Instruction]:
    """The instructions that compute the operand of a jump."""
    needed, first = 1, at
    while needed > 0 and first > 0:
        first -= 1
        step = steps[first]
        if "JUMP" in step.opname:
            break
        needed -= dis.stack_effect(step.opcode, step.arg, jump=False)
    return steps[first:at]


def conditions(
    steps: list[dis.Instruction],
    scope: dict[str, Any],
    known: set[str],
    *,
    is_identity: bool = False,
) -> Iterator[str]:
    """Names in a condition except attributes of the module, constants and :data:`FACTS`.

    ``known`` contains the variable of the module and the variables of facts.
    """
    is_rank = [str(step.argval) for step in steps if step.opname.startswith("LOAD_G")] == ["len"]
    is_rank = is_rank and not any(step.opname == "BINARY_SUBSCR" for step in steps)
    is_identity = is_identity or any(step.opname == "IS_OP" for step in steps)
    for before, step, after in zip([None, *steps[:-1]], steps, [*steps[1:], None], strict=True):
        is_check = before is not None and before.argval == "isinstance"
        is_whole = after is None or after.opname.startswith(("LOAD_CONST", *NAMED, "IS_OP"))
        name = str(step.argval)
        if "JUMP" in step.opname:
            yield "a condition"
        elif step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            value = scope.get(name, getattr(builtins, name, None))
            if not is_fixed(value) and not (after is not None and is_torchs(value, after)):
                yield name
        elif step.opname.startswith("LOAD_FAST") and name not in known:
            is_fact = after is not None and after.argval in (*FACTS, *["shape"] * is_rank)
            if not (is_fact or (is_whole and (is_identity or is_check))):
                yield name
        elif step.opname.startswith(("LOAD_DEREF", "LOAD_CLOSURE")):
            yield name


NAMED = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


def is_fixed(value: object) -> bool:
    """Whether a global is a class, a dtype, or a function in ``PURE``."""
    return isinstance(value, (type, torch.dtype)) or value in PURE


def is_torchs(value: object, attribute: dis.Instruction) -> bool:
    """Whether an attribute of torch is a dtype, a class, or ``torch.jit`` for ``is_scripting``."""
    found = getattr(torch, str(attribute.argval), None) if value is torch else None
    return isinstance(found, (type, torch.dtype)) or found is torch.jit
