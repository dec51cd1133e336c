"""Functions that call several ops compute what torch does, and are timed beside it."""

from __future__ import annotations

import pytest
import torch

from torchkiln import bench
from torchkiln.bench import layers
from torchkiln.bench.case import cases
from torchkiln.bench.clock import cpu_clock
from torchkiln.bench.measure import Settings
from torchkiln.bench.plan import Plan
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
