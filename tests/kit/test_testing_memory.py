"""The check of memory growth, shown readings of what is in use before and after its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchkiln.testing.contract import CHECKS, state
from torchkiln.testing.specs.pointwise import ADD

OBJECTS, BYTES, ON_GPU = "Python objects", "bytes of the C library", "bytes on cuda:0"
NOTHING = {OBJECTS: 0, BYTES: 0, ON_GPU: 0}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What each try seems to keep."""
    tries: list[dict[str, int]] = []

    def readings() -> Any:
        yield NOTHING
        for one in tries:
            yield from (NOTHING, NOTHING | one)

    reading = readings()
    monkeypatch.setattr(state, "in_use", lambda _: next(reading))
    monkeypatch.setattr(state, "forward_and_backward", lambda *_: ())
    return tries


def check() -> None:
    CHECKS["no_memory_growth"].run(ADD, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "tries",
    [
        [{BYTES: 64_512}, {BYTES: 64_512}, {BYTES: 64_512}],
        [{OBJECTS: 900}, {ON_GPU: 512}, {BYTES: 1 << 20}],
        [{ON_GPU: 512, BYTES: 1 << 20}, {ON_GPU: 512}, {BYTES: 1 << 20}],
        [{OBJECTS: 500, BYTES: 16_000}],
    ],
    ids=["a cache", "one kind a try", "no kind in all tries", "what is allowed"],
)
def test_what_is_no_leak(kept: list[dict[str, int]], tries: list[dict[str, int]]) -> None:
    kept += tries
    check()


@pytest.mark.parametrize(
    ("kind", "a_call"), [(OBJECTS, 1), (BYTES, 32), (ON_GPU, 512)], ids=["object", "bytes", "GPU"]
)
def test_a_leak_of_each_call(kept: list[dict[str, int]], kind: str, a_call: int) -> None:
    kept += [{kind: calls * a_call} for calls in (1000, 3000, 9000)]
    with pytest.raises(AssertionError, match=rf"9000 calls kept {9000 * a_call} {kind}$"):
        check()
