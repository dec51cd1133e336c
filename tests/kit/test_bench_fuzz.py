"""Times of random calls: the same seed draws the same calls, and slow ops are reported."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchkiln
from torchkiln.bench import __main__ as command
from torchkiln.bench import draws, fuzz
from torchkiln.testing import SPECS, Sample
from torchkiln.testing.specs.pointwise import MULADD
from torchkiln.testing.specs.spmm import SPMM_CSR

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits calls to 4 KiB, and repeats of a slow one to 5."""
    monkeypatch.setattr(draws, "MOST_BYTES_ON_CPU", 1 << 12)
    monkeypatch.setattr(fuzz, "AGAIN", 5)


def test_a_seed_draws_the_same_calls_of_all_ops() -> None:
    first, second = ([draws.drawn(SPECS, CPU, 5, i) for i in range(300)] for _ in range(2))
    texts = [[draws.text(draw) for draw in calls if draw] for calls in (first, second)]
    assert texts[0] == texts[1]
    other = [draws.drawn(SPECS, CPU, 6, i) for i in range(20)]
    assert texts[0][:20] != [draws.text(draw) for draw in other if draw]
    found = [draw for draw in first if draw]
    assert {draw.case.spec.name for draw in found} == {spec.name for spec in SPECS}
    assert {draw.layout for draw in found} == set(draws.LAYOUTS)
    assert {draw.direction for draw in found} == {"forward", "backward"}


class Arguments:
    """Replaces a module: records the arguments of calls that a function's signature accepts."""

    def __init__(self, module: Any, seen: list[Any]) -> None:
        self.module = module
        self.seen = seen

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "quantize_weight":  # makes an argument
            return torchkiln.quantize_weight
        accepted = inspect.signature(getattr(self.module, name))

        def call(*args: Any, **kwargs: Any) -> None:
            accepted.bind(*args, **kwargs)
            self.seen.extend((*args, *kwargs.values()))

        return call


def test_a_call_can_be_pasted() -> None:
    places = {"torchkiln": torchkiln, "ops_torchkiln": torch.ops.torchkiln}
    for number in range(120):
        draw = draws.drawn(SPECS, CPU, 7, number)
        if draw is None:
            continue
        given = draw.case.sample
        seen: list[Any] = []
        modules = {name: Arguments(module, seen) for name, module in places.items()}
        eval(draws.text(draw).replace("torch.ops.", "ops_"), {"torch": torch, **modules})
        for one, other in zip(seen, (*given.args, *given.kwargs.values()), strict=True):
            if isinstance(other, Tensor):
                assert one.shape == other.shape
                assert one.stride() == other.stride()
                assert one.dtype == other.dtype
            elif isinstance(other, torchkiln.QuantizedWeight):
                assert [part.shape for part in one] == [part.shape for part in other]
            else:
                assert one == other


def slow_muladd(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    time.sleep(2e-3)
    return torchkiln.muladd(a, b, c)


def test_a_slow_op_is_found_and_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SPECS", (replace(MULADD, op=slow_muladd, differentiable=()),))
    # Git may take too long on a busy machine, so the commit is fixed.
    monkeypatch.setattr("torchkiln.testing.environment.commit", lambda: "abc")
    file = tmp_path / "fuzz.jsonl"
    options = ["--device", "cpu", "--seed", "1", "--out", str(tmp_path)]
    assert command.main(["--fuzz", "2", *options]) == 1
    written = file.read_text()
    assert written.count("\n") == 3  # one for the machine, two for calls
    *slower, counts = capsys.readouterr().out.splitlines()[1:]
    assert counts.startswith("2 of 2 calls are below 0.95 x the speed of eager torch")
    assert all("torchkiln.slow_muladd(torch.randn(" in line for line in slower)
    assert command.main(["--fuzz", "3", *options]) == 1
    assert file.read_text().startswith(written)  # the first two calls are not measured again
    assert file.read_text().count("\n") == 4
    summary = fuzz.Summary.read(tmp_path / "fuzz_summary.jsonl")
    assert (summary.total.calls, summary.total.slower, len(summary.slower)) == (3, 3, 3)
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([first.replace('"torch": "', '"torch": "9.'), *rest]))
    assert command.main(["--fuzz", "3", *options]) == 2
    assert "--out: got the calls of torch 9." in capsys.readouterr().err
    assert command.main(["--fuzz", "1", *options[:-2], "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "torchkiln.fuzz/1"
    assert [row["is_slower"] for row in found["rows"]] == [True]


def refusing(*_: Tensor) -> Tensor:
    raise ValueError("torchkiln.refusing: a: got nothing, expected something")


def test_a_call_that_is_refused_is_counted() -> None:
    run = fuzz.fuzz([replace(MULADD, op=refusing, differentiable=())], CPU, count=2, seed=1)
    assert not run.timed
    assert list(run.refused) == ["1:0", "1:1"]
    assert run.summary()[0].startswith("left out 1:0: torchkiln.refusing: a: got nothing")


def raising(*tensors: Tensor) -> Tensor:
    """Raises an error, except for meta tensors, with which a draw counts the bytes of results."""
    if not tensors[0].is_meta:
        raise ZeroDivisionError("no number")
    return torch.empty_like(tensors[0])


def raising_backward(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = a * b + c
    if y.requires_grad:
        y.register_hook(raising)
    return y


def test_what_eager_torch_refuses_is_left_out_and_the_run_goes_on() -> None:
    for refuses in (raising, raising_backward):
        run = fuzz.fuzz([replace(MULADD, composite=refuses)], CPU, count=8, seed=1)
        backward = [draw for i in range(8) if (draw := draws.drawn([MULADD], CPU, 1, i))]
        expected = [one for one in backward if refuses is raising or one.direction == "backward"]
        assert list(run.refused) == [one.key for one in expected]
        assert set(run.refused.values()) == {"eager torch raised: ZeroDivisionError: no number"}
        assert len(run.timed) == 8 - len(expected)
        assert not run.failed


def test_an_error_of_an_op_is_a_failure_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "loses", lambda *_: False)
    specs = [replace(MULADD, op=raising, differentiable=()), MULADD]
    monkeypatch.setattr(command, "SPECS", specs)
    assert command.main(["--fuzz", "8", "--device", "cpu", "--seed", "1"]) == 1
    *failed, counts = capsys.readouterr().out.splitlines()[1:]
    assert 0 < len(failed) < 8
    start = r"failed 1:\d: ZeroDivisionError: no number  forward  \S+\.raising\(torch\.randn\("
    assert all(re.match(start, line) for line in failed)
    assert counts.startswith(f"0 of {8 - len(failed)} calls are below")
    assert counts.endswith(f"0 left out, {len(failed)} failed")
    found = fuzz.fuzz(specs, CPU, count=8, seed=1).as_dict()
    assert [one["key"] for one in found["failed"]] == [line[7:10] for line in failed]


def test_an_error_of_a_draw_is_a_failure() -> None:
    def bench(*_: Any) -> Sample:
        raise ZeroDivisionError("no sample")

    run = fuzz.fuzz([replace(MULADD, bench=bench)], CPU, count=1, seed=1)
    assert run.failed == {"1:0": "ZeroDivisionError: no sample"}


@pytest.mark.parametrize("shape", [(2404751, 3), (3, 1 << 13), (1 << 27, 1), (1, 1 << 27)])
def test_no_tensor_of_a_draw_is_larger_than_the_limit(shape: tuple[int, int]) -> None:
    """Draws for a GPU, checked with fake tensors, which need neither a GPU nor memory."""
    cuda, most = torch.device("cuda"), draws.MOST_BYTES
    for spec in SPECS:
        if spec.drawn is not None:
            continue
        wanted = (shape[0], min(shape[1], 1 << 13)) if spec.threads_matter else shape
        found = draws.fitting(spec, cuda, torch.float16, wanted, most)
        with FakeTensorMode():
            sizes = [spec.bench(cuda, torch.float16, one) for one in (found, wanted)]
        largest, before = (max(t.nbytes for t in one.tensors) for one in sizes)
        assert largest <= most
        assert found == wanted or before > most


def test_a_drawn_sparse_matrix_has_no_entry_twice() -> None:
    for seed in range(20):
        sample = SPMM_CSR.drawn(CPU, torch.float32, Random(seed), 1 << 12)  # type: ignore[misc]
        crow, col = sample.kwargs["crow"], sample.kwargs["col"]
        sample.substitute(0, sample.args[0]).call(partial(SPMM_CSR.op, check=True))
        assert crow[-1] == col.numel() == sample.args[0].numel() > 0


def test_no_time_left_is_said() -> None:
    run = fuzz.fuzz(SPECS, CPU, count=5, seed=1, seconds=0.0)
    assert run.timed == []
    assert not run.is_whole
