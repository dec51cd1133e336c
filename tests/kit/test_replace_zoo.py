"""``torchkiln.replace`` and ``torchkiln.fuse`` never change what a model computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from replace_zoo import mutants
from replace_zoo.cases import CASES


@pytest.mark.rotates("name", 3)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_changed_model_computes_the_same(name: str) -> None:
    """Results, gradients, strides, dtypes, effects, random states are equal, also after undo()."""
    if CASES[name].alone:
        command = [sys.executable, "-m", "replace_zoo", name]
        ran = subprocess.run(
            command, cwd=Path(__file__).parent, check=False, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return
    problems = CASES[name].problems()
    assert not problems, f"{len(problems)}: " + "\n".join(problems[:5])


@pytest.mark.rotates("index", 10)
@pytest.mark.parametrize("index", range(100))
def test_mutants_compute_the_same_or_stay(index: int, tmp_path: Path) -> None:
    """Two thousand mutants; a day's sample has 200."""
    chunk = mutants.chunk(index)
    module = mutants.written(chunk, tmp_path)
    wrong = []
    for number, mutant in enumerate(chunk):
        notes: list[str] = []
        problems = mutants.problems(mutant, getattr(module, f"M{number}"), notes)
        if problems:
            wrong.append(f"{mutant.kind} {notes}: {problems[0]}\n{mutant.body}\n")
    assert not wrong, f"{len(wrong)} mutants:\n" + "\n".join(wrong)


def test_forwards_without_a_mutation_are_recognised(tmp_path: Path) -> None:
    """The unchanged forwards are replaced; otherwise their mutants would test nothing."""
    found = mutants.originals()
    module = mutants.written(found, tmp_path)
    for number, original in enumerate(found):
        notes: list[str] = []
        problems = mutants.problems(original, getattr(module, f"M{number}"), notes)
        assert not problems, original.body
        assert notes, original.body
