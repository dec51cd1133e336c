"""docs/model_times.py runs its models, and its processes print lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_times
import pytest
import timed_steps
import torch
from timed_models import MODELS, loss_of
from timed_steps import MEASURES, Loss, Skip, gradients, to_torchao
from torch._dynamo.utils import compilation_time_metrics, counters

from torchkiln.patch import fp8

pytest.importorskip("transformers")

SCRIPT = Path(model_times.__file__)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_models_run(name: str) -> None:
    model = MODELS[name].build(CPU, tiny=True)
    given = MODELS[name].inputs(CPU, tiny=True)
    result = loss_of(model(**given))
    assert result.isfinite()
    assert result.dim() == 0
    found = gradients(Loss(model, tuple(given)), tuple(given.values()))
    assert len(found) > len(list(model.parameters())) / 2
    full = MODELS[name].build(torch.device("meta"))
    assert sum(p.numel() for p in full.parameters()) > 2e7


def test_own_blocks_compile_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_steps, "LEAST_STAGE", 0.01)  # a cached graph takes 0.2 s
    counters.clear()
    compilation_time_metrics.clear()
    (row,) = measured("models", model="blocks", column="compile")
    assert counters["stats"]["unique_graphs"] == 1
    (eager,) = measured("models", model="blocks", column="eager")
    assert row["loss"] == pytest.approx(eager["loss"], rel=1e-2)
    stages = row["compiling"]
    assert 0 < stages["_compile.compile_inner"] <= row["start_seconds"] + 0.01  # both are rounded
    assert not row["replaced"]


def test_names_are_those_of_models() -> None:
    names = [name for task in model_times.DEFAULT_ROWS.values() for name in task.split(",")]
    assert sorted(names) == sorted(MODELS)


def lines(*words: str) -> list[Any]:
    """The JSON lines of a run on the CPU, which its output file contains, too."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--tiny", "--device", "cpu", "--commit", "abc"],
        check=True,
        capture_output=True,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_lines(tmp_path: Path) -> None:
    file = tmp_path / "models.jsonl"
    words = ("--rows", "convnext", "--columns", "replace", "--attention", "library")
    (row,) = found = lines("models", *words, "--out", str(file))
    assert found == [json.loads(line) for line in file.read_text().splitlines()]
    assert row["attention"] == "library"
    assert 0 < row["least"] <= row["seconds"] <= row["most"]
    assert row["environment"]["commit"] == "abc"
    assert row["replaced"]


def test_a_process_says_why_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (given,) = model_times.rows_of(
        Namespace(task="models", rows="convnext", columns="replace", attention="causal")
    )
    row = {**given, "tiny": True, "device": "cpu", "commit": "abc"}
    monkeypatch.setattr(sys, "stdin", StringIO("go\n"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    model_times.worker(row)
    (skipped,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert skipped["attention"] == "causal"
    assert skipped["skipped"].startswith("attention is the library's")
    assert skipped["environment"]["commit"] == "abc"


def test_a_model_without_causal_attention_is_skipped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's other columns are skipped for the same reason, and their processes are killed."""
    asked, ended = [], []

    def start(row: Any, *_: Any) -> Any:
        return SimpleNamespace(kill=lambda: ended.append(row), wait=lambda: None)

    def outcome(row: Any, *_: Any) -> list[Any]:
        asked.append(row)
        return [{**row, "skipped": f"attention is the library's in {row['model']}"}]

    monkeypatch.setattr(model_times, "start", start)
    monkeypatch.setattr(model_times, "outcome", outcome)
    rows = [
        {"model": model, "column": column, "attention": kind}
        for kind in ("causal", "library")
        for model in ("convnext", "vits")
        for column in ("eager", "replace")
    ]
    found = list(model_times.measured(rows, None, 0.0, tmp_path))
    assert [one["skipped"].split()[-1] for one in found] == [row["model"] for row in rows]
    assert asked == [rows[0], rows[2], *rows[4:]]
    assert ended == rows


def measured(task: str, **row: Any) -> list[Any]:
    """The measurements of a task, computed in this process."""
    return list(MEASURES[task]({"tiny": True, "attention": "causal", **row}, CPU))


@pytest.mark.parametrize("attention", ["causal", "library"])
def test_attention_of_a_column(attention: str) -> None:
    rows = [
        *measured("models", model="gpt2", column="eager", attention=attention),
        *measured("models", model="gpt2", column="replace", attention=attention),
    ]
    assert ["attention" in row["replaced"] for row in rows] == [False, attention == "causal"]
    assert [bool(row["replaced"]) for row in rows] == [False, True]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-2)


def test_lengths_and_small_batches() -> None:
    (row,) = measured("lengths", model="llama2layers", column="replace")
    assert len(row["lengths"]) + 1 == len(row["finished"])
    assert row["finished"] == sorted(row["finished"])
    assert row["seconds"] == row["finished"][-1]
    rows = measured("small", model="vits", column="host", batch=1)
    assert [row["column"] for row in rows] == ["eager", "replace"]
    assert all(row["host"] > 0 for row in rows)
    with pytest.raises(Skip, match="CUDA graphs need a GPU"):
        measured("small", model="vits", column="graphs", batch=1)


def test_no_time_is_left() -> None:
    (row,) = lines(
        "models", "--rows", "gpt2", "--columns", "eager", "--attention", "library", "--within", "0"
    )
    assert row["skipped"] == "no time was left"


def test_columns_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    (eager,) = measured("models", model="blocks", column="eager")
    (blocks,) = measured("models", model="blocks", column="fp8")
    (head,) = measured("models", model="blocks", column="fp8 head")
    assert len({eager["loss"], blocks["loss"], head["loss"]}) == 3
    for row in (blocks, head):
        assert row["loss"] == pytest.approx(eager["loss"], rel=1e-2)
    with pytest.raises(Skip, match=r"FP8 needs a GPU of compute capability 9\.0, got cpu"):
        measured("models", model="llama", column="fp8")
    monkeypatch.setattr(fp8, "missing", lambda *_: "")
    monkeypatch.setattr(fp8, "LEAST", 1)
    (eager,) = measured("models", model="llama", column="eager")
    for column, heads in (("fp8", 0), ("fp8 fused head", 1)):
        (row,) = measured("models", model="llama", column=column)
        # Each of the two blocks has seven linear layers of 32 or 64 features.
        assert row["replaced"]["fp8"] == 14
        assert row["replaced"].get("head", 0) == heads
        assert row["loss"] == pytest.approx(eager["loss"], rel=2e-2)


def test_columns_of_torchao() -> None:
    with pytest.raises(Skip, match="do not call their projections"):
        measured("models", model="blocks", column="torchao rowwise")
    if find_spec("torchao") is None:
        with pytest.raises(Skip, match="torchao is not installed"):
            measured("models", model="llama", column="torchao tensorwise")
        return
    model = MODELS["llama"].build(CPU, tiny=True)
    assert to_torchao(model, "rowwise") == 14
    assert type(model.get_submodule("lm_head")) is torch.nn.Linear
