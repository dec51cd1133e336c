"""Shapes that a spec names, sweeps of row lengths, their picture, and memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchkiln import bench
from torchkiln.bench import __main__ as command
from torchkiln.bench import charts, plan, sweeps
from torchkiln.bench.case import BACKWARD, FORWARD, cases
from torchkiln.bench.clock import Call, cpu_clock
from torchkiln.bench.measure import SMALL_SHAPES, CudaGauge, Settings, peaks, time_case
from torchkiln.bench.plan import Plan
from torchkiln.bench.report import tables
from torchkiln.bench.result import OURS, Skipped
from torchkiln.testing import OpSpec, Sample, Traffic
from torchkiln.testing.environment import environment
from torchkiln.testing.specs.pointwise import ADD

DIRECTIONS = (FORWARD, BACKWARD)
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SOFTMAX = dataclasses.replace(
    ADD,
    name="softmax",
    op=F.softmax,
    composite=F.softmax,
    bench=lambda device, dtype, shape: Sample(
        "bench", (torch.randn(shape, device=device, dtype=dtype), -1)
    ),
    traffic=lambda sample: Traffic(8 * sample.numel, 0),
    backward_traffic=lambda sample: Traffic(12 * sample.numel, 0),
    differentiable=(0,),
    bench_shapes=((8, 16), (4, 32)),
    small_shapes=((1, 64), (2, 64)),
)


def settings(*names: str) -> Settings:
    return Settings(cpu_clock, names, budget=0.0)


def test_an_op_may_name_its_shapes() -> None:
    """Shapes of a spec apply on GPUs. A CPU, with less memory, gets the default."""
    assert plan.shapes_of(SOFTMAX, GPU) == ((8, 16), (4, 32))
    assert plan.shapes_of(ADD, GPU) == ((16384, 8192),)
    assert plan.shapes_of(SOFTMAX, CPU) == ((4096, 4096),)


def rows_of(chosen: Plan) -> list[bench.Measurement]:
    found = [entry for _, entries in chosen.pieces() for entry in entries]
    assert not any(isinstance(entry, Skipped) for entry in found)
    return [entry for entry in found if isinstance(entry, bench.Measurement)]


def test_shapes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "default_shape", lambda _: (2, 8))
    chosen = Plan((SOFTMAX,), CPU, settings(), dtypes=(torch.float32,))
    assert {row.shape for row in rows_of(chosen)} == {(2, 8)}
    monkeypatch.setattr(plan, "shapes_of", lambda spec, _: spec.bench_shapes)
    assert [row.shape for row in rows_of(chosen)] == [(8, 16), (8, 16), (4, 32), (4, 32)]
    given = dataclasses.replace(chosen, shapes=((3, 5),))
    assert {row.shape for row in rows_of(given)} == {(3, 5)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(SOFTMAX, SOFTMAX.small_shapes), (ADD, SMALL_SHAPES)],
    ids=["own", "default"],
)
def test_small_shapes_of_a_run(
    spec: OpSpec,
    expected: tuple[plan.Shape, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def time_small(*_: object, shape: plan.Shape, direction: str) -> None:
        seen.append((shape, direction))

    monkeypatch.setattr(plan, "time_small", time_small)
    chosen = Plan((spec,), GPU, settings(), dtypes=(torch.float32,), kinds=("small",))
    assert rows_of(chosen) == []
    assert seen == [(shape, d) for shape in expected for d in (FORWARD, BACKWARD)]


def test_row_lengths() -> None:
    """Lengths include sizes of models; shapes have the asked elements, to within half a row."""
    shapes = plan.sweep_shapes(2**27)
    lengths = [columns for _, columns in shapes]
    assert lengths == sorted(lengths)
    assert {256, 3584, 5120, 12288, 50257, 151936} <= set(lengths)
    assert {2880, 6656, 11008, 18944, 28672, 262143} <= set(lengths)
    assert all(abs(rows * columns - 2**27) <= columns / 2 for rows, columns in shapes)
    assert plan.sweep_shapes(1000)[-1] == (1, 262143)


def swept(monkeypatch: pytest.MonkeyPatch) -> list[bench.Measurement]:
    monkeypatch.setattr(plan, "sweep_shapes", lambda _: [(8, 16), (2, 64)])
    chosen = Plan((SOFTMAX,), CPU, settings("eager"), kinds=("sweep",), threads=(1,))
    return rows_of(chosen)


def test_rows_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = swept(monkeypatch)
    one = [(shape, d) for shape in ((8, 16), (2, 64)) for d in (FORWARD, BACKWARD)]
    assert [(row.shape, row.direction) for row in rows] == 2 * one
    assert {row.kind for row in rows} == {"sweep"}
    (table,) = tables(rows)
    assert table.title.startswith("Median time of one call, as many elements in rows of every")


def test_the_picture_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dtype and direction has a panel with a line for our op and points for each peer."""
    monkeypatch.setattr(plan, "sweep_shapes", lambda _: [(8, 16), (5, 24), (2, 64)])
    chosen = Plan((SOFTMAX,), CPU, settings("eager"), kinds=("sweep",), threads=(1,))
    rows = rows_of(chosen)
    narrow = [row for row in rows if row.dtype == "float32"]
    for direction in (FORWARD, BACKWARD):
        found = sweeps.shares(narrow, direction, lambda row: row.shape[1])
        ours = {row.shape[1]: row.share for row in narrow if row.direction == direction}
        assert set(found) == {OURS, "eager"}
        assert found[OURS] == sorted(ours.items())
        assert [length for length, _ in found["eager"]] == [16, 24, 64]
    pytest.importorskip("matplotlib")
    figure = sweeps.draw_sweep(rows, "here")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"softmax {t} {d}" for t in ("float32", "bfloat16") for d in DIRECTIONS]
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_marker() != "None"]
        lengths = [np.ravel(line.get_xdata()).tolist() for line in lines]
        assert lengths == [[16, 24, 64], [16, 64], [24]]
        assert [line.get_linestyle() for line in lines] == ["None", "-", "None"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["eager", "torchkiln", "torchkiln, no powers of two"]


def test_peers_that_compute_something_else_have_no_points(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dataclasses.replace(row, remarks={"eager": "more"}) for row in swept(monkeypatch)]
    assert set(sweeps.shares(rows, FORWARD, lambda row: row.shape[1])) == {OURS}


def test_numbers_of_rows() -> None:
    """Shapes have 1 to 2^20 rows of 1,024 elements, at most 8 times those of a usual call."""
    assert plan.row_shapes(2**27) == [(8**k, 1024) for k in range(7)] + [(2**20, 1024)]
    assert plan.row_shapes(2**24)[-1] == (32768, 1024)


def test_rows_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "row_shapes", lambda _: [(1, 16), (8, 16)])
    chosen = Plan((SOFTMAX,), CPU, settings("eager"), kinds=("rows",), threads=(1,))
    rows = rows_of(chosen)
    assert {(row.kind, row.shape) for row in rows} == {("rows", (1, 16)), ("rows", (8, 16))}
    (table,) = tables(rows)
    assert table.title.startswith("Median time of one call on 1 to 1 M rows")
    pytest.importorskip("matplotlib")
    figure = dict(charts.charts(bench.Record(environment(CPU), tuple(rows))))["rows"]
    assert [np.ravel(line.get_xdata()).tolist() for line in figure.axes[0].lines[:2]] == 2 * [
        [1, 8]
    ]


def test_the_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plan, "sweep_shapes", lambda _: [(8, 16), (2, 64)])
    given = ["square", "--device=cpu", "--sweep", "--peers=eager", "--dtype=float32"]
    assert command.main([*given, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "bench.png").read_bytes()[1:4] == b"PNG"


def test_peaks_are_of_a_whole_step() -> None:
    """The gauge measures a forward without gradients, and a forward with its backward."""
    sums: list[int] = []

    def gauge(call: Call) -> int:
        result = call()
        tensors = result if isinstance(result, tuple) else (result,)
        assert not any(tensor.requires_grad for tensor in tensors)
        sums.append(len(tensors))
        return 1000 * len(sums)

    case = next(cases(SOFTMAX, CPU, torch.float32, (2, 4)))
    chosen = dataclasses.replace(settings("eager", "liger"), gauge=gauge)
    assert time_case(case, FORWARD, chosen, 1) is not None
    row = time_case(case, BACKWARD, chosen, 1)
    assert row is not None
    assert set(row.peaks) == {OURS, "eager"}
    assert sums == [1, 1, 1, 1]
    (table,) = tables([row])
    words = dict(zip(table.headings, table.rows[0], strict=True))
    assert words["torchkiln peak"] == "3 kB"
    assert words["eager peak"] == "4 kB"
    assert bench.Measurement.from_dict(row.as_dict()) == row


def test_no_peaks_where_none_are_wanted() -> None:
    case = next(cases(SOFTMAX, CPU, torch.float32, (2, 4)))
    row = time_case(case, FORWARD, settings("eager"), 1)
    assert row is not None
    assert row.peaks == {}
    assert not any("peak" in heading for heading in tables([row])[0].headings)


@pytest.mark.cuda
def test_the_gauge_counts_what_a_call_holds() -> None:
    """Softmax holds one tensor in forward, and three in backward, within 2 MiB."""
    size = 4 * 2**24
    case = next(cases(SOFTMAX, GPU, torch.float32, (2048, 8192)))
    for direction, tensors in ((FORWARD, 1), (BACKWARD, 3)):
        found = peaks(case, direction, ("eager", "compile"), CudaGauge(GPU))
        assert set(found) == {OURS, "eager", "compile"}
        assert abs(found[OURS] - tensors * size) <= 2**21
