"""The Python code of a call: its side effects, calls and branches, apart from ops of torch.

A trace of ops does not show a counter, a list, a branch on a shape, or a number drawn by Python. So
this module reads the bytecode of each user function that runs, and checks each function it calls.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import math
import operator
import sys
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from torchkiln.patch.formula.bytecode import PURE, branches, fault_of
from torchkiln.patch.formula.terms import NoFormulaError

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[2]}/"
STANDARD = f"{Path(functools.__file__).parent}/"

REFUSED = (
    *("autograd/", "utils/_contextlib.py", "utils/checkpoint.py", "amp/", "random.py"),
    *("_dynamo/", "_functorch/", "func/", "jit/", "cuda/", "distributed/", "serialization.py"),
    "compiler/",
)
"""Parts of torch whose functions have effects besides ops, or hide their calls."""

PASSED = ("nn/modules/", "fx/", "_compile.py", "_dynamo/eval_frame.py")
"""Parts of torch that call modules and functions of users."""

STATES = (
    *("is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled"),
    *("get_autocast_dtype", "is_autocast_cpu_enabled", "get_default_dtype"),
)
"""Functions of torch whose results change between calls."""

EFFECTS = ("backward", "register_hook", "retain_grad", "requires_grad_", "set_", "share_memory_")
READS = ("item", "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "cpu", "cuda")
"""Methods of tensors that a formula does not call."""

PURE_MODULES = (math, operator)
IMMUTABLE = (str, bytes, int, float, bool, tuple, frozenset, range, torch.Size, torch.dtype)
PURE_METHODS: dict[type, tuple[str, ...]] = {
    dict: ("get", "keys", "values", "items", "copy"),
    list: ("copy",),
}


class Watch:
    """Collects the functions that run in a ``with`` block, and refuses calls with effects."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        """The functions, with their globals."""
        self.inside: FrameType | None = None
        """The function that waits for a C function to return."""
        self.library: FrameType | None = None
        """The outermost function of a library that runs."""
        self.reason = ""
        self.containers: list[tuple[Any, list[int]]] = []
        """Containers that functions can reach as globals, with the ids of their elements."""

    def __enter__(self) -> Self:
        self.before: Any = sys.getprofile()
        self.collects = gc.isenabled()
        gc.disable()  # a finalizer would seem to be called by the forward
        sys.setprofile(self.event)
        return self

    def __exit__(self, *_: object) -> None:
        # the forward has set another profile function, or event() raised
        if sys.getprofile() != self.event:
            self.reason = self.reason or "its calls cannot be watched"
        if self.before is None or callable(self.before):
            sys.setprofile(self.before)
        else:  # a profiler such as cProfile, up to Python 3.11
            self.before.enable()
        if self.collects:
            gc.enable()
        self.inside = self.library = None

    def event(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handles a profile event. Calls inside of libraries are not checked."""
        code, file = frame.f_code, frame.f_code.co_filename
        if self.library is not None:
            if event == "return" and frame is self.library:
                self.library = None
            elif event == "call" and is_users(file) and not is_package(file):
                self.refuse(f"{self.library.f_code.co_qualname} calls {code.co_qualname}")
        elif event == "call":
            if is_users(file):
                self.see(code, frame.f_globals)
                self.refuse(fault_of(code))
                return
            if frame.f_back and self.is_calling(frame.f_back):
                is_refused = not is_known(file) or code.co_name in (*EFFECTS, *READS)
                self.refuse(f"it calls {code.co_qualname}" if is_refused else "")
            if not is_passed(file) or code.co_qualname.startswith("Held"):
                self.library = frame
        elif event != "return" and is_users(file):
            self.inside = frame if event == "c_call" else None
            if event == "c_call" and not is_pure(arg):
                self.refuse(f"it calls {name_of(arg)}")

    def see(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Record a function, and the contents of the containers among its globals."""
        if code not in self.codes:
            self.codes[code] = scope
            values = [scope.get(name) for name in code.co_names]
            self.containers += [(v, inside(v)) for v in values if isinstance(v, (list, dict, set))]

    @property
    def globals(self) -> dict[tuple[str, str], Any]:
        """The globals that functions can read, by module and name."""
        return {
            (scope.get("__name__", ""), name): scope[name]
            for code, scope in self.codes.items()
            for name in code.co_names
            if name in scope
        }

    def is_calling(self, frame: FrameType) -> bool:
        """Whether a user's function makes the call itself, not by an operator or a C function."""
        if not is_users(frame.f_code.co_filename) or self.inside is frame:
            return False
        code, at = code_bytes(frame.f_code), frame.f_lasti
        while at > 0 and dis.opname[code[at]] == "CACHE":  # CACHE entries follow the instruction
            at -= 2
        return "CALL" in dis.opname[code[at]]

    def refuse(self, reason: str) -> None:
        """Record a reason and raise, which ends the forward before the effect; nothing for ""."""
        if reason:
            self.reason = self.reason or reason
            raise NoFormulaError(reason)

    def check(self, *, variables: bool = True) -> None:
        """Refuse effects that were seen, and functions with branches that were not tried.

        ``variables`` is whether to refuse a branch on a variable. It is False under ``torch.fx``,
        where a branch on a tensor or a shape raises.
        """
        for code, scope in self.codes.items():
            names = branches(code, scope, variables=variables)
            self.reason = self.reason or next((f"it branches on {name}" for name in names), "")
        if any(inside(value) != before for value, before in self.containers):
            self.reason = self.reason or "it changes a global"
        if self.reason:
            raise NoFormulaError(self.reason)


def inside(value: Any) -> list[int]:
    """The ids of the elements of a container."""
    return [
        id(part) for part in (itertools.chain(*value.items()) if isinstance(value, dict) else value)
    ]


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether the functions of a file are neither torch's nor ours, nor of the standard library."""
    is_standard = file.startswith(STANDARD) and "site-packages" not in file
    return not file.startswith((TORCH, OURS, "<frozen")) and not is_standard


def is_package(file: str) -> bool:
    """Whether a file is of an installed package. A library may call and import such files."""
    return "site-packages" in file or not Path(file).is_file()


@functools.lru_cache(maxsize=4096)
def is_passed(file: str) -> bool:
    """Whether functions of a file call functions of users."""
    passed = (*(TORCH + part for part in PASSED), f"{OURS}patch/")
    return file.startswith(passed)


@functools.lru_cache(maxsize=4096)
def is_known(file: str) -> bool:
    """Whether functions of a file have no side effects except those of ops."""
    refused = tuple(TORCH + part for part in REFUSED)
    return file.startswith(OURS) or (file.startswith(TORCH) and not file.startswith(refused))


@functools.lru_cache(maxsize=4096)
def code_bytes(code: CodeType) -> bytes:
    """The instructions; cached, because each read of ``co_code`` copies them."""
    return code.co_code


def is_pure(function: Any) -> bool:
    """Whether a C function has no side effects except those of ops."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if owner is None or isinstance(owner, ModuleType):
        module = getattr(function, "__module__", None) or ""
        if name in STATES:
            return False
        is_torchs = module.startswith("torch") and not name.startswith("_set")
        is_torchs = is_torchs or getattr(torch, name, None) is function
        is_pure_module = any(getattr(m, name, None) is function for m in PURE_MODULES)
        return is_torchs or is_pure_module or function in PURE
    if isinstance(owner, Tensor):
        return name not in (*EFFECTS, *READS)
    if isinstance(owner, type):
        return owner in IMMUTABLE or owner.__module__.startswith("torch")
    if type(owner).__module__.startswith("torch"):
        return True
    methods = next((names for cls, names in PURE_METHODS.items() if isinstance(owner, cls)), ())
    return isinstance(owner, IMMUTABLE) or name in methods


def name_of(function: Any) -> str:
    """The name of a C function."""
    return str(getattr(function, "__qualname__", function))
