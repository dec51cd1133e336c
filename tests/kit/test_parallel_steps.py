"""docs/parallel_steps.py and docs/collectives.py: equal losses, no collective beside torch's."""

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
    """The lines of a run with small sizes."""
    words = ("--tiny", "--commit", "abc", *options)
    said = launched(DOCS / "parallel_steps.py", device, processes, folder, *words)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_losses_of_all_engines_are_those_of_one_process(
    device: torch.device, tmp_path: Path
) -> None:
    options = ("llama", "--dtype", "float64", "--scaling", "strong")
    alone = rows(device, 1, tmp_path, *options)
    found = rows(device, processes_on(device, 4), tmp_path, *options)
    assert {row["engine"] for row in alone} == {"one"}
    assert {row["engine"] for row in found} == {"ddp", "fsdp", "tp", "fsdp+tp"}
    (expected,) = {row["loss"] for row in alone if row["modules"] == "torch"}
    for row in (*alone, *found):
        # The table of RoPE has float64 values in one of them, float32 values in the other.
        assert row["loss"] == pytest.approx(expected, rel=1e-9), row
        assert 0 < row["least"] <= row["seconds"]


def test_batch_norms_of_several_processes(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("torch's SyncBatchNorm needs a GPU")
    found = rows(device, processes_on(device, 2), tmp_path, "resnet")
    losses = {row["batch norms"]: row["loss"] for row in found}
    assert list(losses) == ["torch", "torchkiln", "fuse", "local"]
    for name in ("torchkiln", "fuse"):
        assert losses[name] == pytest.approx(losses["torch"], rel=0.02)


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
    """In a process of its own, for its process groups."""
    done = forked(IN_DOCS + COUNT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    gathers = {"fsdp": 0, "tp": 1, "fsdp+tp": 1}  # the loss: one gather in place of three sums
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
