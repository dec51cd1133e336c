"""The page of the contract agrees with the files of results, which contain no failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torchkiln import testing
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.matrix import Run, page, written
from torchkiln.testing.result import Outcome, write

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILES = sorted((DOCS / "contract").glob("*.json"))


def cell(status: str, reason: str = "") -> dict[str, Any]:
    return {"status": status, "reason": reason, "dtypes": ["float32"]}


def a_run(**ops: dict[str, Any]) -> Run:
    here = {"device": "a chip", "torch": "2.13", "cuda": "13.0", "torchkiln": "1.0"}
    return Run({**here, "commit": "a" * 40, "date": "2026-01-02"}, ops)


def test_the_page_is_that_of_the_files() -> None:
    text = (DOCS / "contract.md").read_text()
    assert written(text, [Run.read(file) for file in FILES]) == text


def test_every_op_was_tried_and_nothing_failed() -> None:
    tried = {op for file in FILES if file.stem.startswith("cpu") for op in Run.read(file).ops}
    forms = {form.name for spec in testing.SPECS for form in spec.forms}
    assert tried - forms == {spec.name for spec in testing.SPECS}
    for file in FILES:
        found = Run.read(file)
        assert "dirty" not in (found.environment["commit"] or "")
        for op, cells in found.ops.items():
            for check, one in cells.items():
                assert check in CHECKS
                assert one["status"] in ("passed", "excluded", "unavailable"), f"{op} {check}"
                assert (one["status"] == "passed") != bool(one["reason"])


def test_a_cell_is_a_pass_a_reason_or_a_failure() -> None:
    text = page(
        [
            a_run(
                mine={"values": cell("passed"), "vmap": cell("excluded", "not for mine: it draws")},
                other={"values": cell("failed", "wrong"), "vmap": cell("unavailable", "it draws")},
            )
        ]
    )
    number = {name: i for i, name in enumerate(CHECKS, 1)}
    head = "a chip, torch 2.13 with CUDA 13.0, torchkiln 1.0, commit aaaaaaaaaa, 2026-01-02"
    assert f"{head}: 1 of 4 passed, **1 failed**." in text
    assert f"| | {number['values']} | {number['vmap']} |" in text
    assert "| `mine` | + | (1) |" in text
    assert "| `other` | **FAILED** | (1) |" in text
    assert text.count("(1) it draws") == 1


def test_a_file_has_a_line_for_checks_with_one_result(tmp_path: Path) -> None:
    """A check that fails in one dtype is listed as failed, with the reason and all dtypes."""
    half, single = "float16", "float32"
    found = [
        Outcome("mine", "values", "cpu", single, "passed", "", 1.0),
        Outcome("mine", "values", "cpu", half, "failed", "wrong", 1.0),
        Outcome("mine", "vmap", "cpu", half, "passed", "", 1.0),
        Outcome("mine", "strides", "cpu", half, "passed", "", 2.0),
    ]
    path = tmp_path / "folder" / "results.json"
    write(found, {"device": "a chip"}, path)
    failed = {"op": "mine", "status": "failed", "reason": "wrong", "dtypes": [half, single]}
    passed = {"op": "mine", "status": "passed", "reason": "", "dtypes": [half]}
    lines = [line.rstrip(",") for line in path.read_text().splitlines()]
    assert [json.loads(line) for line in lines if line.startswith('{"op"')] == [
        passed | {"checks": ["strides", "vmap"]},
        failed | {"checks": ["values"]},
    ]
    ops = Run.read(path).ops
    statuses = {check: cell["status"] for check, cell in ops["mine"].items()}
    assert statuses == {"strides": "passed", "vmap": "passed", "values": "failed"}


def test_every_check_says_what_it_promises() -> None:
    for check in CHECKS.values():
        assert len(check.promise) > 20, check.name
        assert check.promise.endswith("."), check.name


def test_results_count_no_check_twice() -> None:
    cases = list(testing.cases(testing.SPECS, torch.device("cpu")))
    found = Run.read(DOCS / "contract" / "cpu.json").ops
    promised = {(case.spec.name, case.check.name) for case in cases if case.spec.name in found}
    assert {(op, check) for op, cells in found.items() for check in cells} <= promised
