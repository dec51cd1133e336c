"""Launch plans of all kernels for five GPUs, computed without a GPU by the programs of plans.h."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import choosing
import pytest
from choosing import Launch

from torchkiln.bench.plan import row_shapes, sweep_shapes

ELEMENTS = 16384 * 8192
"""Elements of a call on a GPU, as in the sweeps of ``torchkiln bench``."""
LONG = [(2, 1 << 21), (3, (1 << 22) + 5), (1, 1 << 26)]
SHAPES = [*sweep_shapes(ELEMENTS), *row_shapes(ELEMENTS), *LONG, (4097, 80), (131, 1000)]
GPUS = ("A100", "RTX 4090", "H100", "H200", "B200")
REGISTERS = 64 << 10
"""32-bit registers per multiprocessor, on all five GPUs."""
RESERVED = 1 << 10
"""Bytes of shared memory that the system reserves per block."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that prints launch plans."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    return choosing.compiled(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def launches(program: Path) -> list[Launch]:
    """The launch plans of all families."""
    return list(choosing.plans(program, SHAPES))


def misfits(plan: Launch) -> Iterator[str]:
    """Reasons why a GPU cannot run a plan, or not with the intended occupancy."""
    blocks = plan.blocks_per_multiprocessor
    if not 1 <= plan.threads <= min(plan.most_threads, 1024):
        yield f"{plan.threads} threads, {plan.most_threads} in the launch bounds"
    if plan.threads % 32 != 0 and plan.threads > 32:
        yield f"{plan.threads} threads are no whole warps"
    if plan.most_threads * blocks > plan.threads_of_multiprocessor:
        yield f"{blocks} blocks of {plan.most_threads} threads on an SM"
    if REGISTERS // (plan.most_threads * blocks) < 32:
        yield f"{REGISTERS // (plan.most_threads * blocks)} registers per thread"
    if plan.shared_bytes > plan.most_shared_bytes:
        yield f"{plan.shared_bytes} bytes of shared memory in a block"
    if blocks * (plan.shared_bytes + RESERVED) > plan.shared_of_multiprocessor:
        yield f"{blocks} blocks with {plan.shared_bytes} bytes of shared memory on an SM"
    if not 1 <= plan.blocks_x < 2**31 or not 1 <= plan.blocks_y <= 65535:
        yield f"a grid of {plan.blocks_x} x {plan.blocks_y}"
    if plan.cluster > 1 and not plan.runs_90_code:
        yield "a cluster before 9.0"
    if plan.cluster not in {1, 2, 4, 8, 16} or plan.blocks_x % plan.cluster != 0:
        yield f"{plan.blocks_x} blocks in clusters of {plan.cluster}"
    count, resident = plan.blocks_x * plan.blocks_y, plan.multiprocessors * blocks
    if plan.is_cooperative and count > resident:
        yield f"{count} blocks that wait for each other, {resident} resident"


def test_plans_fit(launches: list[Launch]) -> None:
    found = [(plan, list(misfits(plan))) for plan in launches]
    assert not [(plan, reasons) for plan, reasons in found if reasons][:5]


def test_every_gpu_has_a_plan_for_every_call(launches: list[Launch]) -> None:
    assert {plan.gpu for plan in launches} == set(GPUS)
    calls = sorted((plan[1:7], plan.gpu) for plan in launches)
    for call, plans in groupby(calls, lambda entry: entry[0]):
        assert len({gpu for _, gpu in plans}) == len(GPUS), call


FITTING = Launch(
    *("H100", "norm forward", "rms_norm", "bfloat16", "vector", 64, 4096, "one pass", "why"),
    *(128, 1, 512, 512, 2, 2, 8192, 0, 132, 1, 232448, 233472, 2048),
)


@pytest.mark.parametrize(
    "fault",
    [
        {"threads": 1024},
        {"threads": 48},
        {"most_threads": 1024, "blocks_per_multiprocessor": 3},
        {"shared_bytes": 240000},
        {"shared_bytes": 120000},
        {"blocks_x": 0},
        {"blocks_x": 2**31},
        {"blocks_y": 65536},
        {"runs_90_code": 0},
        {"cluster": 3},
        {"blocks_x": 127},
        {"is_cooperative": 1, "blocks_y": 3},
    ],
    ids=str,
)
def test_the_checks_find(fault: dict[str, Any]) -> None:
    assert list(misfits(FITTING)) == []
    assert list(misfits(FITTING._replace(**fault))) != []


@pytest.mark.parametrize(
    ("gpu", "op", "alignment", "columns", "kernel"),
    [
        ("H100", "norm forward", "vector", 8192, "one pass"),
        ("H100", "norm forward", "shared_offset", 262143, "slabs"),
        ("A100", "norm forward", "shared_offset", 262143, "parts"),
        ("H100", "norm in E4M3", "vector", 4096, "fp8 pass"),
        ("A100", "norm in E4M3", "vector", 8192, "fp8 pass"),
        ("H100", "norm in E4M3", "vector", 1 << 21, "two kernels"),
        ("H100", "norm backward", "vector", 8192, "bulk"),
        ("A100", "norm backward", "vector", 8192, "stream"),
        ("RTX 4090", "norm backward", "vector", 8192, "split"),
        ("B200", "norm backward", "shared_offset", 50257, "slabs"),
    ],
)
def test_choices(
    launches: list[Launch], gpu: str, op: str, alignment: str, columns: int, kernel: str
) -> None:
    """Calls get the kernels that the documentation names."""
    call = (gpu, op, "layer_norm", "bfloat16", alignment)
    found = {plan.kernel for plan in launches if plan[:5] == call and plan.columns == columns}
    assert found == {kernel}


WITHOUT_PIXELS = "channels without a spatial size"
CONVOLUTION = "convolution before batch norm"
GRADIENTS = "gradients of a bias"
SEVEN_PIXELS = "adjacent channels of 7 pixels"


@pytest.mark.parametrize(
    ("gpu", "op", "operands", "alignment", "shape", "kernel"),
    [
        ("H100", "softmax forward", "softmax", "vector", (16384, 8192), "registers"),
        ("A100", "softmax forward", "softmax", "vector", (1, 1 << 26), "parts"),
        ("H100", "cross_entropy forward", "cross_entropy", "vector", (64, 2048), "few rows"),
        ("A100", "cross_entropy forward", "cross_entropy", "shared_offset", (131, 1001), "inner"),
        ("H100", "norm backward", "layer_norm", "shared_offset", (131, 1001), "few rows"),
        ("H100", "norm backward", "layer_norm", "scalar", (4097, 81), "split"),
        ("H100", "norm backward", "layer_norm", "vector", (4096, 80), "few rows"),
        ("H100", "norm backward", "layer_norm", "vector", (16384, 80), "stream"),
        ("H100", "batch norm forward", "adjacent channels", "vector", (4097, 80), "resident"),
        ("A100", "batch norm forward", "adjacent channels", "vector", (4097, 80), "rows"),
        ("H100", "softmax forward", "transposed softmax", "vector", (18602, 1519), "tile"),
        ("H100", "group norm backward", WITHOUT_PIXELS, "vector", (64, 312960), "parts"),
        (*("H100", "group norm forward", SEVEN_PIXELS, "scalar"), (64, 32777), "pixels"),
        (*("H100", "group norm forward", SEVEN_PIXELS, "vector"), (1, 32768), "rows"),
        ("H100", "group norm backward", "planes of 64 channels", "vector", (64, 8192), "planes"),
        ("H100", "product beside cuBLAS", "relu", "vector", (16384, 512), "sm90"),
        ("H100", "product beside cuBLAS", "gelu", "vector", (16384, 512), "library"),
        ("H100", "product beside cuBLAS", "a residual", "vector", (256, 4096), "library"),
        ("B200", "product beside cuBLAS", "relu", "vector", (16384, 512), "library"),
        ("B200", "product without cuBLAS", "relu", "vector", (16384, 512), "tensor_core"),
        ("H100", "product without cuBLAS", "gelu", "shared_offset", (64, 513), "tensor_core"),
        ("H200", "product and gate", "gated_mlp", "vector", (8192, 1024), "sm90"),
        ("H200", "gradient through a gate", "gated_mlp", "vector", (8192, 1024), "two kernels"),
        ("H100", "convolution and moments", "pixels to 64 channels", "vector", (64, 64), "sm90"),
        (*("H100", CONVOLUTION, "pixels to 256 channels", "vector"), (16384, 64), "sm90"),
        (*("H100", CONVOLUTION, "pixels to 64 channels", "vector"), (16384, 64), "other ops"),
        ("A100", "sparse product", "16 entries a row", "shared_offset", (16384, 129), "spaced"),
        ("A100", "sparse product", "1 entry a row, transposed", "vector", (64, 128), "columns"),
        ("A100", "gradient of sparse values", "1 entry a row", "vector", (64, 4096), "entries"),
        ("A100", "transposed sparse product", "8 columns", "vector", (2424, 6144), "few columns"),
        ("H100", GRADIENTS, "bias_dropout_add", "shared_offset", (1, (1 << 18) + 1), "one row"),
        ("H100", GRADIENTS, "bias_act with gelu", "vector", (1, 1 << 20), "one row"),
        ("H100", GRADIENTS, "bias_act with relu", "vector", (2, 1 << 20), "vectors"),
        ("H100", GRADIENTS, "bias_act with relu", "vector", (1, 1 << 17), "vectors"),
    ],
)
def test_choices_of_other_families(
    program: Path,
    gpu: str,
    op: str,
    operands: str,
    alignment: str,
    shape: tuple[int, int],
    kernel: str,
) -> None:
    """Each choice that depends on the GPU or the alignment gets its kernel."""
    call = (gpu, op, operands, "bfloat16", alignment)
    found = {plan.kernel for plan in choosing.plans(program, [shape], op) if plan[:5] == call}
    assert found == {kernel}


def test_short_rows_share_a_warp(program: Path) -> None:
    """For rows of three elements, a thread per row is planned, not a warp."""
    for plan in choosing.plans(program, [(415219, 3)]):
        if plan.op in ("norm forward", "gated_norm forward") and plan.alignment != "vector":
            assert plan.blocks_x * plan.threads < 2 * plan.rows


@pytest.mark.parametrize("op", ["softmax forward", "softmax backward"])
def test_threads_have_several_of_many_short_rows(program: Path, op: str) -> None:
    """One row of 6 bytes per thread would leave the memory idle."""
    for rows, of_thread in ((1024, 1), (1 << 22, 4)):
        plans = list(choosing.plans(program, [(rows, 3)], op))
        short = [plan for plan in plans if plan.kernel == "short" and plan.alignment != "vector"]
        assert {plan.gpu for plan in short} == set(GPUS)
        for plan in short:
            assert plan.blocks_x * plan.threads * of_thread == rows


@pytest.mark.parametrize("op", ["softmax forward", "softmax backward"])
@pytest.mark.parametrize(("columns", "lanes", "of_thread"), [(31, 8, 4), (33, 8, 2), (47, 8, 2)])
def test_few_threads_share_a_short_row(
    program: Path, op: str, columns: int, lanes: int, of_thread: int
) -> None:
    """With 16 threads for 33 elements, half of their loads would have no element."""
    call = ("softmax", "bfloat16", "shared_offset", 1 << 20, columns)
    plans = choosing.plans(program, [(1 << 20, columns)], op)
    short = [plan for plan in plans if plan[2:7] == call and plan.kernel == "short"]
    assert {plan.gpu for plan in short} == set(GPUS)
    for plan in short:
        assert plan.blocks_x * plan.threads * of_thread == plan.rows * lanes


def test_rows_of_few_columns_are_not_cut(program: Path) -> None:
    """The matrix has 256 columns: a warp for each of 64 rows, and none for chunks."""
    call = ("16 entries a row", "bfloat16", "vector")
    plans = choosing.plans(program, [(64, 32)], "sparse product")
    assert {plan.blocks_x for plan in plans if plan[2:5] == call} == {64 * 32 // 128}


def test_few_columns_leave_few_sums(program: Path) -> None:
    """One block adds the sums of all blocks: 32 of each for every column."""
    call = ("sum", "sum over the first dimension", "bfloat16", "shared_offset")
    for rows, blocks in ((3000, 1), (555008, 90), (1 << 25, 0)):
        plans = [plan for plan in choosing.plans(program, [(rows, 5)], "sum") if plan[1:5] == call]
        assert {plan.kernel for plan in plans} == {"columns" if rows == 3000 else "folded columns"}
        for plan in plans:
            wave = plan.multiprocessors * plan.blocks_per_multiprocessor
            assert plan.blocks_y == (blocks or wave)


@pytest.mark.parametrize(
    ("rows", "columns", "threads"), [(110989, 597, 128), (110989, 701, 64), (64, 597, 64)]
)
def test_warps_have_rows_that_fill_little_of_a_second(
    program: Path, rows: int, columns: int, threads: int
) -> None:
    """Blocks of four warps, a row each, or of two warps that share a row."""
    call = ("softmax forward", "softmax", "float32", "shared_offset")
    for plan in choosing.plans(program, [(rows, columns)], "softmax forward"):
        if plan[1:5] == call:
            assert plan.kernel == "registers"
            assert plan.threads == threads


def test_sums_of_few_tokens_take_few_threads(program: Path) -> None:
    """Not 32 threads for each element of the weight, 31 of which would add nothing."""
    op = "gradients of weights of qkv_norm_rope"
    plans = list(choosing.plans(program, [(2, 1 << 17), (16384, 1024)], op))
    assert {plan.rows for plan in plans} == {2, 16384}
    for plan in plans:
        threads = 2 if plan.rows == 2 else 32
        assert plan.blocks_x * plan.threads == threads * plan.columns // 128 * 128


def test_the_page_is_up_to_date(program: Path) -> None:
    page = choosing.PAGE.read_text(encoding="utf-8")
    assert choosing.written(page, program) == page
