"""The least time of a call, tested alone: no cheat of the corpus returns right values so fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchkiln.judge.least_time import ARITHMETIC, MEMORY, LeastTime, needed_operations
from torchkiln.judge.problem import Problem, kernel_problem

SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16))

    def forward(self, x):
        return {}

def get_inputs():
    return [torch.randn(8, 24)]
"""
CPU = torch.device("cpu")
ALL = 2 * 8 * 24 * 16


@pytest.fixture
def problem_of(tmp_path: Path) -> Callable[[str], Problem]:
    def made(formula: str) -> Problem:
        file = tmp_path / "reference.py"
        file.write_text(SOURCE.format(formula))
        return kernel_problem(file, CPU)

    return made


@pytest.mark.parametrize(
    ("formula", "least", "most"),
    [
        ("x @ self.weight", ALL, ALL),
        ("nn.functional.linear(x, self.weight.T).exp()", ALL, ALL),
        ("(x @ self.weight).relu()", 0.3 * ALL, 0.7 * ALL),
        ("x @ self.weight.triu()", 0, 0),  # triu() is no parameter: its zeros may be skipped
        ("(x @ self.weight).sum(1)", 0, 0),  # equals x @ self.weight.sum(1)
        ("x.expand(9, 8, 24) @ self.weight.expand(9, 24, 16)", 0, 0),  # nine equal products
        ("x[:, :16] * self.weight[0]", 0, 0),
    ],
)
def test_operations_that_no_other_formula_saves(
    formula: str, least: float, most: float, problem_of: Callable[[str], Problem]
) -> None:
    problem = problem_of(formula)
    assert least <= needed_operations(problem, problem.given(1, 1)) <= most


def test_factors_of_zero_do_not_count(problem_of: Callable[[str], Problem]) -> None:
    problem = problem_of("x @ self.weight")
    sample = problem.given(1, 1)

    def half(x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[-1]) % 2)

    sample = replace(sample, args=(half(sample.args[0]), *sample.args[1:]))
    assert needed_operations(problem, sample) == ALL / 2


@pytest.mark.parametrize(
    ("seconds", "tricks"),
    [(1e-3, {MEMORY, ARITHMETIC}), (3e-3, {ARITHMETIC}), (5e-3, set())],
)
def test_candidates_faster_than_the_work(seconds: float, tricks: set[str]) -> None:
    least = LeastTime(10, 20, copy=0.01, product=0.01, ceiling=0.02, device=CPU)
    found = dict(least.findings(seconds))
    assert set(found) == tricks
    assert ("20 operations" in found.get(ARITHMETIC, "")) == (ARITHMETIC in tricks)


def test_the_shortest_copy_counts_and_a_long_product_is_the_ceiling(
    problem_of: Callable[[str], Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of("x @ self.weight")
    times = {"copy": [1.0, 3.0, 3.0, 3.0], "product f32": [8.0, 9.0, 9.0], "product": [7.0, 9.0]}
    monkeypatch.setattr("torchkiln.judge.least_time.in_turns", lambda *_: times)
    least = LeastTime.of(problem, problem.given(1, 1))
    assert (least.copy, least.product, least.ceiling) == (1.0, 7.0, 9.0)
    assert least.operations == ALL
