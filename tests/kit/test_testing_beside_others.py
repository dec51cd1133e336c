"""Checks of memory and of waits do not fail because of other work in the process or machine."""

from __future__ import annotations

import ctypes
import dataclasses
from itertools import chain, count, repeat
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from torchkiln.testing.contract import CHECKS, bad_input, cuda, state
from torchkiln.testing.specs.pointwise import ADD

OBJECTS, BYTES, ON_GPU = "Python objects", "bytes of the C library", "bytes on cuda:0"
NOTHING = {OBJECTS: 0, BYTES: 0, ON_GPU: 0}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What each try keeps, as readings of memory in use will show it."""
    tries: list[dict[str, int]] = []

    def readings() -> Any:
        yield NOTHING
        for one in tries:
            yield from (NOTHING, NOTHING | one)

    reading = readings()
    monkeypatch.setattr(state, "in_use", lambda _: next(reading))
    monkeypatch.setattr(state, "forward_and_backward", lambda *_: ())
    monkeypatch.setattr(state, "torch_keeps_bytes", lambda _: False)
    return tries


def check(name: str) -> None:
    CHECKS[name].run(ADD, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "tries",
    [
        [{BYTES: 64_512}] * 4,
        [{OBJECTS: 900}, {ON_GPU: 512}, {BYTES: 1 << 20}],
        [{ON_GPU: 512, BYTES: 1 << 20}, {ON_GPU: 512}, {BYTES: 1 << 20}],
        [{OBJECTS: 125, BYTES: 4_000}],
    ],
    ids=["a cache", "one kind a try", "no kind in all tries", "what is allowed"],
)
def test_what_is_no_leak(kept: list[dict[str, int]], tries: list[dict[str, int]]) -> None:
    kept += tries
    check("no_memory_growth")


@pytest.mark.parametrize(
    ("kind", "a_call"), [(OBJECTS, 1), (BYTES, 32), (ON_GPU, 512)], ids=["object", "bytes", "GPU"]
)
def test_a_leak_of_each_call(kept: list[dict[str, int]], kind: str, a_call: int) -> None:
    kept += [{kind: calls * a_call} for calls in (250, 1000, 3000, 9000)]
    with pytest.raises(AssertionError, match=rf"9000 calls kept {9000 * a_call} {kind}$"):
        check("no_memory_growth")


def test_what_torch_keeps_is_left_out(
    kept: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try suffices if torch's op keeps bytes, too, and nothing else grows."""
    monkeypatch.setattr(state, "torch_keeps_bytes", lambda _: True)
    kept += [{BYTES: 8_000}]
    check("no_memory_growth")


def test_beside_what_torch_keeps_others_are_judged(
    kept: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "torch_keeps_bytes", lambda _: True)
    kept += [{BYTES: calls * 32, OBJECTS: calls} for calls in (250, 1000, 3000, 9000)]
    with pytest.raises(AssertionError, match=rf"9000 calls kept 9000 {OBJECTS}$"):
        check("no_memory_growth")


def keeps_bytes(x: Tensor, other: Tensor) -> Tensor:
    """A sum that allocates 32 bytes by malloc() and does not free them."""
    take = ctypes.CDLL(None).malloc
    take.restype = ctypes.c_void_p
    assert take(ctypes.c_size_t(32))
    return x.add(other)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("torch_keeps", [False, True])
def test_bytes_that_each_call_keeps(*, torch_keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same leak is reported, or left out if torch's own op has it.

    Two of the four tries are enough for that; test_a_leak_of_each_call has all.
    """
    monkeypatch.setattr(state, "TRIES", state.TRIES[:2])
    leaking = dataclasses.replace(ADD, op=keeps_bytes)
    if torch_keeps:
        monkeypatch.setattr(torch, "add", keeps_bytes)
        CHECKS["no_memory_growth"].run(leaking, torch.device("cpu"), torch.float32)
    else:
        with pytest.raises(AssertionError, match=rf"1000 calls kept \d+ {BYTES}$"):
            CHECKS["no_memory_growth"].run(leaking, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["side_stream", "no_synchronisation"])
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_call_that_waits_does_so_in_each_try(
    name: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported only if all three tries return after the delay: a busy host may delay some."""
    answers = chain([True] * late, repeat(False))
    event = MagicMock()
    event.return_value.query = lambda: next(answers)
    for part in ("Event", "Stream", "stream", "current_stream", "synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, part, event if part == "Event" else MagicMock())
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", MagicMock())
    assert len(cuda.DELAYS) == 3
    if late < 3:
        check(name)
    else:
        with pytest.raises(AssertionError, match="the call waited for the"):
            check(name)


@pytest.mark.parametrize("step", [-512, 512])
def test_memory_may_be_released_during_a_refused_call(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = count(1 << 30, step)
    monkeypatch.setattr(bad_input, "allocated", lambda _: next(readings))
    if step < 0:
        check("bad_input")
    else:
        with pytest.raises(AssertionError, match="the refused call changed something"):
            check("bad_input")
