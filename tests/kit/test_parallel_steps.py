"""docs/parallel_steps.py, docs/collectives.py: equal losses, no more collectives than torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import forked, launched, processes_on

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(device: torch.device, processes: int, folder: Path, *options: str) -> list[Any]:
    """The JSON lines of a run with small sizes."""
    words = ("--tiny", "--commit", "abc", *options)
    said = launched(DOCS / "parallel_steps.py", device, processes, folder, *words)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_losses_of_all_engines_are_those_of_one_process(
    device: torch.device, tmp_path: Path
) -> None:
    modules = ("--modules", "torch,torchkiln,blocks")
    options = ("llama", "--dtype", "float64", "--scaling", "strong", *modules)
    alone = rows(device, 1, tmp_path, *options)
    found = rows(device, processes_on(device, 4), tmp_path, *options)
    assert {row["engine"] for row in alone} == {"one"}
    assert {row["engine"] for row in found} == {"ddp", "fsdp", "tp", "fsdp+tp"}
    (expected,) = {row["loss"] for row in alone if row["modules"] == "torch"}
    for row in (*alone, *found):
        # The tables of RoPE are in float64 in torchkiln's modules, rounded to float32 in torch's.
        assert row["loss"] == pytest.approx(expected, rel=1e-9), row
        assert 0 < row["least"] <= row["seconds"]
    blocks = {row["engine"] for row in found if row["modules"] == "blocks"}
    assert blocks == {"ddp", "fsdp"}


def test_losses_of_eight_processes(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 8:
        pytest.skip("needs 8 GPUs")
    options = ["llama", "--dtype", "float64", "--scaling", "strong", "--modules", "torchkiln"]
    options += ["--tiny", "8"]
    (alone,) = rows(device, 1, tmp_path, *options)
    found = rows(device, 8, tmp_path, *options, "--engines", "tp,fsdp+tp", "--tensor", "4")
    assert [row["engine"] for row in found] == ["tp", "fsdp+tp"]
    assert {row["processes"] for row in found} == {8}
    for row in found:
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-9), row


def test_losses_in_fp8_are_those_of_one_process(device: torch.device, tmp_path: Path) -> None:
    """Parallel losses differ from one process's by less than 10 % of what FP8 changes."""
    options = ("llama", "--dtype", "float32", "--scaling", "strong", "--modules")
    (plain,) = rows(device, 1, tmp_path, *options, "torchkiln")
    alone = rows(device, 1, tmp_path, *options, "fp8,blocks fp8")
    found = rows(device, processes_on(device, 4), tmp_path, *options, "fp8,blocks fp8")
    expected = {row["modules"]: row["loss"] for row in alone}
    assert set(expected) == {"fp8", "blocks fp8"}
    assert {row["engine"] for row in found} == {"ddp", "fsdp", "tp", "fsdp+tp"}
    for row in (*alone, *found):
        off = abs(expected[row["modules"]] - plain["loss"])
        assert abs(row["loss"] - expected[row["modules"]]) < 0.1 * off, row


@pytest.mark.parametrize("graph", [False, True])
def test_batch_norms_of_several_processes(
    device: torch.device, tmp_path: Path, *, graph: bool
) -> None:
    if graph and device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    # On a CPU, DDP does not accept torch's SyncBatchNorm.
    names = ["torchkiln", "local"]
    if device.type == "cuda":
        names = ["torch", *names, "fuse"]
    options = ("resnet", "--batch-norms", ",".join(names), *(["--graph"] if graph else ()))
    found = rows(device, processes_on(device, 2), tmp_path, *options)
    losses = {row["batch norms"]: row["loss"] for row in found}
    assert list(losses) == names
    assert {row["graph"] for row in found} == {graph}
    for loss in losses.values():  # all processes have the same images
        assert loss == pytest.approx(losses["local"], rel=0.02)


def test_host_times_of_a_layer(device: torch.device, tmp_path: Path) -> None:
    options = ("layer", "--batch-norms", "torchkiln,local")
    found = rows(device, processes_on(device, 2), tmp_path, *options)
    forward, backward = (
        {row["batch norms"]: row[f"{name}_seconds"] for row in found}
        for name in ("forward", "backward")
    )
    assert list(forward) == ["torchkiln", "local"]
    assert list(backward) == list(forward)
    assert min(*forward.values(), *backward.values()) > 0


IN_DOCS = f"import sys\nsys.path.insert(0, {str(DOCS)!r})\n"

COUNT = """
import json
from collectives import counted
from parallel_models import MODULES, TINY
found = {
    engine: {m: counted(engine, size, m, tensor=4, sizes=TINY).calls for m in MODULES}
    for engine, size in (("fsdp", 64), ("tp", 4), ("fsdp+tp", 64))
}
print(json.dumps(found))
"""


def test_no_op_adds_a_collective() -> None:
    """Collectives are counted in a new process, as they need process groups."""
    done = forked(IN_DOCS + COUNT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    gathers = {"fsdp": 0, "tp": 1, "fsdp+tp": 1}  # the loss gathers once, not 3 sums
    for engine, calls in found.items():
        torchs, ours = calls["torch"], calls["torchkiln"]
        assert ours["gather"] == torchs["gather"] + gathers[engine]
        assert ours["scattered sum"] == torchs["scattered sum"]
        assert ours.get("sum", 0) == torchs.get("sum", 0) - 3 * gathers[engine]


ROW = """
from collectives import PAGE, row
line = row("fsdp+tp", 4096)
assert line in PAGE.read_text(), f"type: python docs/collectives.py --write\\n{line}"
"""


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="engines differ between versions of torch"
)
def test_the_page_has_the_counts() -> None:
    done = forked(IN_DOCS + ROW)
    assert done.returncode == 0, done.stderr[-3000:]
