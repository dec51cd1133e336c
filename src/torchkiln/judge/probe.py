"""Tricks that leave traces in the process of a candidate: replaced functions, switched modes.

They do not change the verdict: results and times are measured in another process. They are named
because they show what the candidate tried.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import pickle
import re
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLOCK, TORCH, JUDGE = "patched clock", "patched torch", "patched judge"
SWITCH = "environment switch"

PLACES: tuple[tuple[str, Any], ...] = (
    (CLOCK, time),
    (CLOCK, statistics),
    (CLOCK, torch.cuda.Event),
    (CLOCK, torch.cuda.Stream),
    (TORCH, torch),
    (TORCH, torch.Tensor),
    (TORCH, torch.autograd),
    (TORCH, torch.cuda),
    (TORCH, torch.random),
    (TORCH, torch.testing),
    (TORCH, F),
    (TORCH, nn.Module),
    (TORCH, nn.Linear),
    (JUDGE, builtins),
    (JUDGE, gc),
    (JUDGE, json),
    (JUDGE, os),
    (JUDGE, pickle),
    (JUDGE, socket),
)
TORCH_FOLDER = str(Path(torch.__file__).parent)
CLOCKS_OF_TORCH = {"synchronize", "Event", "Stream", "current_stream"}

SWITCHES = re.compile(
    r"TF32|PRECISION|ALLOW_|DETERMINISTIC|LAUNCH_BLOCKING|^(OMP|MKL|KMP|ATEN|DNNL|ONEDNN)_"
)
"""Environment variables that change results or times; variables of compilers do not count."""


def flags() -> dict[str, Any]:
    """Modes of torch that change results or times."""
    matmul = torch.backends.cuda.matmul
    return {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.set_flush_denormal()": bool(torch.full((1,), 1e-42).mul(1).eq(0)),
        "torch.is_autocast_enabled()": torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda"),
    }


def switches() -> dict[str, str]:
    """Variables of the environment that change results or times."""
    return {name: value for name, value in os.environ.items() if SWITCHES.search(name)}


def judge_modules() -> list[tuple[str, Any]]:
    """Modules and classes of the judge in this process."""
    worker = sys.modules["__main__"]
    names = ("torchkiln.judge.blocks", "torchkiln.judge.probe", "torchkiln.judge.worker")
    found = [(JUDGE, sys.modules[name]) for name in names if name in sys.modules]
    return [*found, (JUDGE, worker), (JUDGE, worker.Worker)]


def is_wrapper_of_torch(now: Any, before: Any) -> bool:
    """Whether torch's compiler has wrapped a function of torch, as its import does."""
    code = getattr(now, "__code__", None)
    if code is None or not code.co_filename.startswith(TORCH_FOLDER):
        return False
    is_compilers = code.co_filename.startswith(f"{TORCH_FOLDER}/_dynamo/")
    return is_compilers or getattr(now, "__wrapped__", None) is before


class Probe:
    """Functions and modes before the candidate is imported."""

    def __init__(self) -> None:
        self.before = [
            (trick, place, {n: v for n, v in vars(place).items() if callable(v)})
            for trick, place in (*PLACES, *judge_modules())
        ]
        self.flags, self.switches = flags(), switches()

    def findings(self) -> list[tuple[str, str]]:
        """The functions and modes that have changed since then, as findings."""
        found = []
        for trick, place, names in self.before:
            for name, value in names.items():
                now = vars(place).get(name)
                if now is not value and not is_wrapper_of_torch(now, value):
                    is_clock = place is torch.cuda and name in CLOCKS_OF_TORCH
                    where = f"{getattr(place, '__name__', place)}.{name} was replaced"
                    found.append((CLOCK if is_clock else trick, where))
        found += [
            (SWITCH, f"{name} is {mode!r}, was {self.flags[name]!r}")
            for name, mode in flags().items()
            if mode != self.flags[name]
        ]
        after = switches()
        return found + [
            (SWITCH, f"{name} is {after.get(name)!r}, was {self.switches.get(name)!r}")
            for name in sorted(self.switches.keys() | after.keys())
            if after.get(name) != self.switches.get(name)
        ]
