"""Forwards whose masks are made without the positions they count, and forwards not rewritten."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from torchkiln.patch.source.positions import rewrite_positions

masking_utils = pytest.importorskip("transformers.masking_utils")

SCOPE: dict[str, Any] = {
    "torch": torch,
    "create_causal_mask": masking_utils.create_causal_mask,
    "create_sliding_window_causal_mask": masking_utils.create_sliding_window_causal_mask,
    "other": lambda **_: None,
}
COUNT = """
    if position_ids is None:
        past = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(x.shape[1], device=x.device) + past
        position_ids = position_ids.unsqueeze(0)
"""
MASK = """
    mask = create_causal_mask(config=self.config, position_ids=position_ids)
"""
DICT = """
    options = {"config": self.config, "position_ids": position_ids}
"""
MASKS = """
    masks = {"full": create_causal_mask(**options)}
"""


def rewritten(body: str, scope: dict[str, Any] = SCOPE) -> str:
    """The rewritten source of a forward; "" if it is not rewritten."""
    source = f"def forward(self, x, position_ids=None, cache=None):{body}    return x, position_ids"
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    before = ast.unparse(node)
    is_rewritten = rewrite_positions(node, scope)
    after = ast.unparse(node)
    assert is_rewritten == (after != before)
    return after if is_rewritten else ""


@pytest.mark.parametrize(
    "body",
    [
        COUNT + MASK,
        COUNT + DICT + MASKS,
        COUNT + DICT + "    options['a'] = 1\n" + MASKS,
        COUNT + DICT + "    more = options.copy()\n    mask = create_causal_mask(**more)\n" + MASKS,
        COUNT
        + "    make = create_causal_mask if x else create_sliding_window_causal_mask\n"
        + MASK.replace("create_causal_mask", "make"),
        COUNT.replace(" + past", "") + MASK,
        "\n    if position_ids is None:\n"
        "        position_ids = torch.arange(x.shape[1]).unsqueeze(0)\n" + MASK,
    ],
)
def test_positions_that_are_counted(body: str) -> None:
    found = rewritten(body)
    assert "_kiln_positions = None\n    else:\n        _kiln_positions = position_ids" in found
    assert found.count("_kiln_positions") == 3
    assert found.endswith("return (x, position_ids)")


@pytest.mark.parametrize(
    "body",
    [
        COUNT,
        MASK,
        MASK + COUNT,
        COUNT + COUNT + MASK,
        COUNT + "    position_ids = position_ids[0]\n" + MASK,
        COUNT + "    (position_ids := x)\n" + MASK,
        COUNT + "    for position_ids in x: pass\n" + MASK,
        COUNT + "    torch = x\n" + MASK,
        COUNT + "    create_causal_mask = x\n" + MASK,
        COUNT + "    past = x\n" + MASK,
        COUNT + "    f = lambda position_ids: create_causal_mask(position_ids=position_ids)\n",
        COUNT.replace("torch.arange(x.shape[1], device=x.device)", "x.cumsum(-1)") + MASK,
        COUNT.replace("torch.arange(x.shape[1],", "torch.arange(0, x.shape[1], 2,") + MASK,
        COUNT.replace(".unsqueeze(0)", ".unsqueeze(-1)") + MASK,
        COUNT.replace(".unsqueeze(0)", ".flip(0)") + MASK,
        COUNT.replace("cache.get_seq_length()", "x") + MASK,
        COUNT.replace("else 0", "else x") + MASK,
        COUNT.replace("position_ids is None", "x is None") + MASK,
        COUNT + "    else:\n        position_ids = x\n" + MASK,
        COUNT + MASK.replace("create_causal_mask", "other"),
        COUNT + MASK.replace("create_causal_mask", "self.create_causal_mask"),
        COUNT + DICT + MASKS.replace("create_causal_mask", "other"),
        COUNT + DICT + MASKS + "    y = options\n",
        COUNT + DICT + MASKS + "    y = options['position_ids']\n",
        COUNT + DICT + "    more = options.copy()\n    y = more\n" + MASKS,
        COUNT + DICT + "    options = options.copy()\n" + "    y = options\n" + MASKS,
    ],
)
def test_positions_that_may_be_others(body: str) -> None:
    assert not rewritten(body)


def test_names_that_are_not_torchs_and_not_transformers() -> None:
    assert not rewritten(COUNT + MASK, {**SCOPE, "torch": None})
    assert not rewritten(COUNT + MASK, {**SCOPE, "create_causal_mask": rewritten})
