"""Benchmarks of layers that call several ops: they agree with torch, and are timed against it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchkiln import bench
from torchkiln.bench import layers, producers
from torchkiln.bench.__main__ import plan
from torchkiln.bench.case import cases
from torchkiln.bench.clock import cpu_clock
from torchkiln.bench.measure import Settings
from torchkiln.bench.plan import Plan
from torchkiln.cli import bench_parser
from torchkiln.testing import OpSpec
from torchkiln.testing.registry import specs_of

CPU = torch.device("cpu")
SHAPES = {
    "conv_bn_act": (2 * layers.PIXELS**2, 8),
    "attention": (64, 32),
    "qkv_norm_rope_cache": (4, 64),
}


@pytest.mark.parametrize("spec", layers.SPECS, ids=lambda spec: spec.name)
def test_both_sides_compute_the_same(spec: OpSpec) -> None:
    found = list(cases(spec, CPU, torch.float32, SHAPES[spec.name]))
    assert {case.variant for case in found} >= {""}
    for case in found:
        ours, theirs = (case.sample.call(f) for f in (spec.op, spec.composite))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_rows_of_layers() -> None:
    specs = specs_of("torchkiln.bench", "--specs", "torchkiln.bench.layers")
    assert specs == layers.SPECS
    for spec in specs:
        chosen = Plan(
            (spec,),
            CPU,
            Settings(cpu_clock, ("eager",), 0.0),
            shapes=(SHAPES[spec.name],),
            dtypes=(torch.float32,),
        )
        rows = [row for _, entries in chosen.pieces() for row in entries]
        assert all(
            isinstance(row, bench.Measurement) and set(row.times) > {"eager"} for row in rows
        )
        directions = {row.direction for row in rows}
        expected = {"forward", "backward"} if spec.differentiable else {"forward"}
        assert directions == expected


@pytest.mark.parametrize("spec", producers.SPECS, ids=lambda spec: spec.name)
def test_ops_that_write_e4m3_compute_the_cast(spec: OpSpec) -> None:
    for case in cases(spec, CPU, torch.float32, (256, 384)):
        ours, theirs = (case.sample.call(f) for f in (spec.op, spec.composite))
        for found, expected in zip(ours, theirs, strict=True):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            # Torch's norms and gates may differ in the last bit, enough to round to another E4M3.
            off = (found.float() - expected.float()).abs() > 2.0**-3 * expected.float().abs()
            assert off.sum() <= 1e-3 * off.numel()
        x = case.sample.tensors
        assert case.moved("forward") == sum(t.nbytes for t in (*x, *ours))


@pytest.mark.parametrize("name", ["rms_norm_fp8", "swiglu_fp8", "quantize"])
def test_rows_of_ops_that_write_e4m3(name: str) -> None:
    arguments = bench_parser.bench([name, "--device", "cpu", "--shape", "32x256"])
    chosen = plan(arguments)
    assert [spec.name for spec in chosen.specs] == [name]
    quick = dataclasses.replace(chosen, settings=Settings(cpu_clock, ("eager",), 0.0))
    rows = [row for _, entries in quick.pieces() for row in entries]
    assert {row.direction for row in rows} == {"forward"}
    assert all(isinstance(row, bench.Measurement) and "eager" in row.times for row in rows)
