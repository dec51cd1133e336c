"""Forwards that may pass the result of a norm to the next module as FP8, and others."""

from __future__ import annotations

import ast
from textwrap import indent

import pytest

from torchkiln.patch.source.feeds import fed_parameter, rewrite_feeds

BEFORE = "y = self.norm(x)\n"
LOOP = f"for z in (1, 2):\n{indent(BEFORE, '    ')}    x = x + self.reader(y)\n"


def function(body: str, arguments: str = "self, x") -> ast.FunctionDef:
    """The syntax tree of a forward with these statements."""
    (node,) = ast.parse(f"def forward({arguments}):\n{indent(body, '    ')}").body
    assert isinstance(node, ast.FunctionDef)
    return node


@pytest.mark.parametrize(
    "body",
    [
        BEFORE + "return self.reader(y)",
        BEFORE + "y, _ = self.reader(y)\nreturn x + y",
        BEFORE + "z = self.reader(y)\ny: Tensor = x + z\nreturn y",
        LOOP + "    y = x\nreturn y",
    ],
)
def test_results_that_one_call_reads(body: str) -> None:
    assert rewrite_feeds(function(body), {"norm"}, {"reader"}) == [("norm", "reader")]


@pytest.mark.parametrize(
    "body",
    [
        LOOP + "    if z == 1:\n        break\n    y = x\nreturn x, y",
        LOOP + "    if z == 1:\n        continue\n    y = x\nreturn x, y",
        BEFORE + "x[y.sum()] = self.reader(y)\nreturn x",
        BEFORE + "y[...] = self.reader(y)\nreturn x",
        BEFORE + "y.tag = self.reader(y)\nreturn x",
        BEFORE + "z = self.reader(y)\nn = [0 for y in x]\nreturn z + y",
        BEFORE + "z = self.reader(y)\ny += z\nreturn z",
    ],
)
def test_results_that_more_may_read(body: str) -> None:
    assert rewrite_feeds(function(body), {"norm"}, {"reader"}) == []


def test_parameters_that_come_first() -> None:
    body = "return x * 2 + self.q(z)"
    fed = fed_parameter(function(body, "self, x, /, a, z"))
    assert fed is not None
    assert (fed.parameter, fed.is_first) == ("z", False)
    first = fed_parameter(function("return self.q(z)", "self, z, /, a"))
    assert first is not None
    assert first.is_first
