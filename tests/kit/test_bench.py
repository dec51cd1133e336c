"""Clocks, measured rows and tables of the benchmark."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchkiln import bench
from torchkiln.bench import report
from torchkiln.bench.case import BACKWARD, FORWARD, RECORDED, STEP, BenchCase, call_of, cases
from torchkiln.bench.clock import (
    FEWEST,
    CudaClock,
    HostClock,
    Times,
    cpu_clock,
    device_clock,
    in_turns,
)
from torchkiln.bench.measure import Settings, time_case, time_host, time_small
from torchkiln.bench.plan import Plan
from torchkiln.bench.report import duration, markdown, plain, size, tables
from torchkiln.bench.result import OURS
from torchkiln.bench.roofline import INTENSE, Work, ceilings, written
from torchkiln.testing import SPECS, OpSpec, Sample, Traffic
from torchkiln.testing.compare import outputs
from torchkiln.testing.environment import environment
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
FUSED = next(spec for spec in SPECS if spec.helpers)
"""An op with a backward kernel."""
SHAPE = (8, 16)
DIRECTIONS = (FORWARD, BACKWARD)


def some_traffic(_: Sample) -> Traffic:
    return Traffic(1024, 1024)


def a_case(spec: OpSpec = FUSED) -> BenchCase:
    return next(cases(spec, CPU, torch.float32, SHAPE))


def settings(*names: str) -> Settings:
    return Settings(cpu_clock, names, budget=0.0)


def a_row(direction: str = FORWARD, *names: str) -> bench.Measurement:
    row = time_case(a_case(), direction, settings(*names or ("eager",)), 1)
    assert row is not None
    return row


def test_the_cpu_clock_measures_a_sleep() -> None:
    """The clock makes two calls and times the second. An upper bound is the time around both."""
    start = time.perf_counter()
    seconds = cpu_clock(lambda: time.sleep(0.02))
    assert 0.02 <= seconds <= time.perf_counter() - start - 0.02


def test_the_host_clock_measures_one_call_of_many() -> None:
    start = time.perf_counter()
    seconds = HostClock(CPU, calls=10)(lambda: time.sleep(0.002))
    assert 0.002 <= seconds <= (time.perf_counter() - start) / 10


@pytest.mark.cuda
def test_the_cuda_clock_measures_the_device_and_not_the_host() -> None:
    """The clock grows in proportion to a sleep on the GPU, and not with a sleep on the host."""
    clock = CudaClock(torch.device("cuda:0"))

    def shortest(call: Callable[[], object]) -> float:
        """The shortest of nine times, because other processes may use the GPU."""
        return min(clock(call) for _ in range(9))

    def asleep(cycles: int) -> float:
        return shortest(lambda: torch.cuda._sleep(cycles))

    assert 3 < asleep(8_000_000) / asleep(2_000_000) < 5
    x = torch.ones(1024, device="cuda")

    def slow_on_the_host() -> None:
        time.sleep(0.002)
        x.add(x)

    assert shortest(slow_on_the_host) < 0.001


def test_calls_take_turns() -> None:
    order = []

    def clock(call: object) -> float:
        order.append(call)
        return 1.0

    calls = {"a": lambda: None, "b": lambda: None, "c": lambda: None}
    measured = in_turns(clock, calls, budget=60.0, rounds=9)
    forth = list(calls.values())
    assert order == forth + (forth + forth[::-1]) * 4 + forth
    assert {name: len(values) for name, values in measured.items()} == {"a": 9, "b": 9, "c": 9}


def test_a_spent_budget_ends_the_turns() -> None:
    measured = in_turns(lambda _: 1.0, {"a": lambda: None}, budget=0.0)
    assert len(measured["a"]) == FEWEST


def test_times() -> None:
    measured = [5.0, 1.0, 2.0, 4.0, 3.0]
    times = Times.of(measured)
    assert times == Times(seconds=3.0, low=2.0, high=4.0, rounds=5)
    assert times.spread == pytest.approx(2 / 3)
    assert Times.of(measured, best=True).seconds == 1.0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_timed_is_the_op(spec: OpSpec, direction: str) -> None:
    """The timed call returns exactly the results or the gradients of the op."""
    if direction == BACKWARD and not spec.differentiable:
        pytest.skip("has no gradients")
    for case in cases(spec, CPU, torch.float32, SHAPE):
        sample = case.sample if direction == FORWARD else spec.leaves(case.sample)
        seed = getattr(sample, "seed", None) or 0
        torch.manual_seed(seed)
        expected = outputs(sample.call(spec.op))
        grads = None
        if direction == BACKWARD:
            grads = [torch.randn_like(output) for output in expected]
            inputs = [sample.args[i] for i in case.wanted]
            expected = torch.autograd.grad(expected, inputs, grads)
        torch.manual_seed(seed)
        result: Any = call_of(case, spec.op, direction, grads)()
        found = outputs(result)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_are_complete(spec: OpSpec) -> None:
    """Every op has rows, and each derived figure follows from the measured times."""
    for direction in DIRECTIONS[: 1 + bool(spec.differentiable)]:
        for case in cases(spec, CPU, torch.float32, SHAPE):
            row = time_case(case, direction, settings("eager"), 1)
            if row is None:
                assert spec.backward_traffic(case.sample).bytes == 0
                continue
            assert (row.op, row.dtype, row.shape) == (spec.name, "float32", SHAPE)
            assert (row.direction, row.threads, row.variant) == (direction, 1, case.variant)
            assert set(row.times) == {OURS, "eager"}
            assert row.missing == {}
            assert row.references["copy"].rounds == row.ours.rounds == FEWEST
            assert row.bytes == case.moved(direction) > 0
            assert row.ceiling is not None
            assert row.share == row.ceiling / row.ours.seconds > 0
            assert row.rate == row.bytes / row.ours.seconds / 1e9
            assert row.best_peer == "eager"
            assert row.speedup == row.times["eager"].seconds / row.ours.seconds


def sum_and_product(a: Tensor, b: Tensor) -> Any:
    return a + b, a * b


SEVERAL = dataclasses.replace(
    ADD, op=sum_and_product, composite=sum_and_product, backward_traffic=some_traffic
)
"""An op with two results."""


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_several_results(direction: str) -> None:
    """A forward call returns both results; a backward call takes a gradient for each of them."""
    case = a_case(SEVERAL)
    grads = [torch.randn(SHAPE), torch.randn(SHAPE)]
    found = call_of(case, SEVERAL.op, direction, grads)()
    a, b = case.sample.args
    expected = (
        (a + b, a * b)
        if direction == FORWARD
        else (grads[0] + b * grads[1], grads[0] + a * grads[1])
    )
    torch.testing.assert_close(found, expected)
    row = time_case(case, direction, settings("eager", "compile"), 1)
    assert row is not None
    assert set(row.times) == {OURS, "eager", "compile"}, row.missing


def test_a_step_is_forward_and_backward() -> None:
    """A step returns the same gradients as backward, also when it is repeated."""
    case = a_case(SEVERAL)
    grads = [torch.randn(SHAPE), torch.randn(SHAPE)]
    expected = call_of(case, SEVERAL.op, BACKWARD, grads)()
    call = call_of(case, SEVERAL.op, STEP, grads)
    for _ in range(2):
        torch.testing.assert_close(call(), expected, rtol=0, atol=0)


def test_gradients_come_in_the_dtype_of_the_result() -> None:
    """Gradients of a peer's float64 result are float64, though ours would be float32."""

    def wide(a: Tensor, b: Tensor) -> Tensor:
        return (a + b).double()

    call = call_of(a_case(ADD), wide, BACKWARD, [torch.ones(SHAPE)])
    assert isinstance(call, functools.partial)
    assert [grad.dtype for grad in call.args[2]] == [torch.float64]


def test_class_indices_have_no_gradient() -> None:
    def bench_of_losses(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
        target = torch.randint(shape[1], shape[:1], device=device)
        return Sample("bench", (torch.randn(shape, device=device, dtype=dtype), target))

    loss = F.cross_entropy
    spec = dataclasses.replace(
        ADD,
        op=loss,
        composite=loss,
        bench=bench_of_losses,
        traffic=some_traffic,
        backward_traffic=some_traffic,
    )
    row = time_case(a_case(spec), BACKWARD, settings("eager", "compile"), 1)
    assert row is not None
    assert set(row.times) == {OURS, "eager", "compile"}, row.missing


def test_a_gradient_of_forward_is_timed_in_a_step() -> None:
    """Forward and step are timed, for op and peer; a step moves the bytes of both directions."""
    spec = dataclasses.replace(ADD, gradient_in_forward=True)
    chosen = Plan((spec,), CPU, settings("eager"), shapes=(SHAPE,), dtypes=(torch.float32,))
    rows = [
        row for _, piece in chosen.pieces() for row in piece if isinstance(row, bench.Measurement)
    ]
    assert [row.direction for row in rows] == [FORWARD, STEP]
    case = a_case(spec)
    assert [row.bytes for row in rows] == [case.moved(FORWARD), case.moved(STEP)]
    assert case.moved(STEP) == case.moved(FORWARD) + case.moved(BACKWARD)
    assert case.computed(STEP) == case.computed(FORWARD) + case.computed(BACKWARD)
    assert all(row.best_peer == "eager" for row in rows)


def test_the_ceiling_is_what_the_bytes_take() -> None:
    """A large addition takes 0.1 to 10 times as long as a copy of as many bytes.

    A call is much shorter than the pauses of a process on a busy machine, so that few calls are
    interrupted and the median does not contain them.
    """
    case = next(cases(ADD, CPU, torch.float32, (512, 512)))
    row = time_case(case, FORWARD, Settings(cpu_clock, (), budget=2.0), 1)
    assert row is not None
    assert row.ceiling is not None
    assert 0.1 < row.ceiling / row.ours.seconds < 10
    assert row.best_peer is None
    assert row.speedup is None


def test_what_is_mostly_read_has_two_ceilings() -> None:
    assert set(ceilings(Work(4000, 0, torch.float32), 2000, CPU)) == {"copy"}
    both = ceilings(Work(4000, 0, torch.float32), 4, CPU)
    assert set(both) == {"copy", "read"}
    copied, read = both["copy"](), both["read"]()
    assert isinstance(copied, Tensor)
    assert 2 * copied.nbytes == 4000
    assert isinstance(read, Tensor)
    assert read.item() == 1000


def test_arithmetic_has_a_ceiling_of_its_own() -> None:
    """A call of many operations has two ceilings, a copy and a product; the slower one counts."""
    work = Work(3 * 64 * 64 * 4, 2 * 64**3, torch.float32)
    assert work.operations >= INTENSE * work.bytes
    found = ceilings(work, 64 * 64 * 4, CPU)
    assert set(found) == {"copy", "product"}
    product = found["product"]()
    assert isinstance(product, Tensor)
    assert product.shape == (64, 64)
    row = a_row()
    times = dict.fromkeys(("copy", "read"), Times(1.0, 1.0, 1.0, 5))
    slow = {**times, "product": Times(3.0, 3.0, 3.0, 5)}
    assert dataclasses.replace(row, references=times).ceiling == 1.0
    assert dataclasses.replace(row, references=slow).ceiling == 3.0


def test_views_are_not_written() -> None:
    x = torch.ones(4, 4)
    assert written((x.t(), x + 1, x.sum().expand(4)), [x]) == 64 + 4
    assert written(x.new_zeros(3), [x]) == 12


def test_one_gradient_of_two_inputs_is_written_once() -> None:
    grad = torch.ones(4, 4)
    assert written((grad, grad, grad[0].clone()), []) == 64 + 16


def test_peers_take_part_in_turns() -> None:
    """In every turn the clock measures our op, then the peers, then the ceilings."""
    seen: list[object] = []

    def clock(call: object) -> float:
        seen.append(call)
        return float(1 + len(seen) % 3)

    chosen = Settings(clock, ("eager",), budget=0.0)
    row = time_case(a_case(), FORWARD, chosen, 1)
    assert row is not None
    assert len(seen) == 3 * (1 + FEWEST)
    assert seen[:3] == seen[3:6]
    assert len({id(call) for call in seen}) == 3


def test_an_op_that_fails_is_an_error() -> None:
    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("wrong")

    case = a_case(dataclasses.replace(FUSED, op=broken))
    with pytest.raises(RuntimeError, match="wrong"):
        time_case(case, FORWARD, settings("eager"))


def test_nothing_moved_is_no_row() -> None:
    spec = dataclasses.replace(ADD, backward_traffic=lambda _: Traffic(0, 0))
    assert time_case(a_case(spec), BACKWARD, settings("eager")) is None


def test_host_rows() -> None:
    rows = list(time_host(FUSED, CPU, torch.float32, ("eager",), clock=HostClock(CPU, calls=3)))
    assert [row.direction for row in rows] == [FORWARD, RECORDED]
    for row in rows:
        assert row.shape == (4, 64)
        assert set(row.references) == {"torch.add", "F.layer_norm"}
        assert row.ceiling is row.share is None
        assert row.ours.seconds <= row.ours.low
        assert row.ours.seconds < 0.01
    (table,) = tables(rows)
    assert {"torch.add", "F.layer_norm", "eager"} <= set(table.headings)
    assert not {"bytes", "ceiling", "GB/s"} & set(table.headings)


@pytest.mark.cuda
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_rows(direction: str) -> None:
    """A call of 1,024 elements in a CUDA graph takes 0.1 to 20 us."""
    device = torch.device("cuda:0")
    chosen = Settings(device_clock(device), budget=0.5)
    row = time_small(FUSED, device, torch.float32, chosen, shape=(4, 256), direction=direction)
    assert row is not None
    assert set(row.times) == {OURS, "eager", "compile"}, row.missing
    assert 1e-7 < row.ours.seconds < 2e-5


def variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    sample = ADD.bench(device, dtype, shape)
    yield "transposed", sample.map(lambda t: t.t().contiguous().t())


def test_variants_have_rows_of_their_own() -> None:
    spec = dataclasses.replace(ADD, bench_variants=variants)
    found = list(cases(spec, CPU, torch.float32, SHAPE))
    assert [case.variant for case in found] == ["", "transposed"]
    assert [case.sample.args[0].stride() for case in found] == [(16, 1), (1, 8)]


def test_a_record_reads_back(tmp_path: Path) -> None:
    rows = (a_row(FORWARD), a_row(BACKWARD))
    record = bench.Record(environment(CPU), rows)
    path = tmp_path / "folder" / "bench.json"
    record.write(path)
    assert bench.Record.read(path) == record
    content = json.loads(path.read_text())
    assert content["schema"] == "torchkiln.bench/1"
    assert set(content["environment"]) == {
        *("date", "device", "driver", "torch", "cuda", "torchkiln", "commit")
    }
    for entry, row in zip(content["rows"], rows, strict=True):
        assert entry["ceiling"] == pytest.approx(row.ceiling, rel=1e-3)
        assert entry["speedup"] == pytest.approx(row.speedup, rel=1e-3)
    assert len(path.read_text().splitlines()) == 9 + len(rows)
    path.write_text(json.dumps({**content, "schema": "torchkiln.bench/2"}))
    expected = r"got 'torchkiln\.bench/2', expected 'torchkiln\.bench/1'"
    with pytest.raises(ValueError, match=expected):
        bench.Record.read(path)


def test_commit_is_that_of_our_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment(CPU).commit is None


def test_markdown_has_every_row() -> None:
    rows = [a_row(FORWARD), a_row(BACKWARD)]
    text = markdown(bench.Record(environment(CPU), tuple(rows)))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    assert duration(rows[0].ours.seconds) in lines[2]
    assert "8 x 16, CPU threads: 1." in text


def test_figures_have_units() -> None:
    assert [duration(s) for s in (1.5e-6, 2.565e-4, 0.0348)] == ["1.5 us", "256.5 us", "34.8 ms"]
    assert [size(n) for n in (12, 4200, 6_290_000, 1_074_000_000)] == [
        *("12 B", "4.2 kB", "6.29 MB", "1.07 GB")
    ]


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    row = a_row()
    report.show(tables([row]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("op ")
    assert lines[2].startswith(FUSED.name)
    assert plain(tables([row])[0]).splitlines() == [line for line in lines if line]
