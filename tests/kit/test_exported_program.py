"""Files of ``torch.export`` contain helper ops, and load in the same minor version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported_program import FILE, example, model

HELPERS = Path(__file__).parents[1] / "data" / "exported.txt"
WRITTEN_BY = (2, 13)
"""The version of torch that wrote the file; earlier ones do not read it."""

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < WRITTEN_BY,
    reason=f"torch {torch.__version__} reads no file of torch {WRITTEN_BY[0]}.{WRITTEN_BY[1]}",
)


def test_a_file_of_this_minor_version_loads() -> None:
    program = torch.export.load(FILE)
    results, expected = program.module()(*example()), model()(*example())
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_helper_ops_of_the_file_are_listed() -> None:
    """Helper ops in the file are among those that docs/stability.md promises to keep."""
    program = torch.export.load(FILE)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    helpers = {name for name in names if name.startswith("torchkiln._")}
    assert len(helpers) == 3
    assert helpers <= set(HELPERS.read_text(encoding="utf-8").split())
