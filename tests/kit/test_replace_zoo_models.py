"""``torchkiln.replace`` does not change what the models of Hugging Face compute."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from replace_zoo.count import FILE, counts

import torchkiln

pytest.importorskip("transformers")
COUNTED = json.loads(FILE.read_text())


@pytest.mark.rotates("kind", 27)
@pytest.mark.parametrize("kind", COUNTED["models"])
def test_a_model_of_transformers_computes_the_same(kind: str) -> None:
    """Loss, results, gradients and calls of hooks are the same. A day's sample has eight models."""
    from replace_zoo import models  # noqa: PLC0415  imports transformers

    is_counted = COUNTED["transformers"] == importlib.metadata.version("transformers")
    try:
        problems, report = models.problems(kind, torchkiln.replace)
    except Exception as error:
        if is_counted:
            raise
        pytest.skip(f"this version of transformers does not make a small one: {error}")
    assert not problems, f"{len(problems)}: " + "\n".join(problems[:5])
    if is_counted:  # write counts.json: python -m replace_zoo.count
        assert counts(report) == COUNTED["models"][kind]
