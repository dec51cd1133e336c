"""Every planted cheat of the corpus is caught under its name, and every honest candidate passes.

Candidates run in processes that one zygote forks, so torch is imported once.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from torchkiln.judge import judge
from torchkiln.judge.zygote import Zygote

FOLDER = Path(__file__).parent
ROUNDS = 5


def words_of(path: Path) -> list[str]:
    """The parts of a docstring: problem, trick and description; without trick if honest."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None, path
    return text.removesuffix(".").split(": ")


def files(folder: str) -> list[Path]:
    return sorted((FOLDER / folder).glob("*.py"))


def by_name(folder: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [path.name for path in files(folder)])


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as made:
        yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the corpus, as a judge would report that other workers open the original."""
    folder = tmp_path_factory.mktemp("corpus")
    return Path(shutil.copytree(FOLDER, folder / "judge"))


def require_caught(path: Path, device: str, zygote: Zygote) -> None:
    problem, trick, _ = words_of(path)
    reference = path.parents[1] / "problems" / f"{problem}.py"
    verdict = judge(path, reference, device=device, zygote=zygote, rounds=ROUNDS, budget=0.0)
    assert trick in verdict.tricks, str(verdict)
    assert verdict.status == 1


def require_accepted(path: Path, device: str, zygote: Zygote) -> None:
    reference = path.parents[1] / "problems" / f"{words_of(path)[0]}.py"
    verdict = judge(path, reference, device=device, zygote=zygote, rounds=ROUNDS, budget=0.0)
    assert verdict.accepted, str(verdict)
    assert verdict.status == 0
    assert {"candidate", "eager", "ceiling"} <= verdict.seconds.keys()


@by_name("cheats")
def test_cheats_are_caught_by_name(name: str, corpus: Path, zygote: Zygote) -> None:
    require_caught(corpus / "cheats" / name, "cpu", zygote)


@by_name("honest")
def test_no_honest_candidate_is_refused(name: str, corpus: Path, zygote: Zygote) -> None:
    require_accepted(corpus / "honest" / name, "cpu", zygote)


@pytest.mark.cuda
@by_name("cheats_cuda")
def test_cheats_on_a_gpu_are_caught_by_name(name: str, corpus: Path, zygote: Zygote) -> None:
    require_caught(corpus / "cheats_cuda" / name, "cuda", zygote)


@pytest.mark.cuda
@by_name("honest_cuda")
def test_no_honest_candidate_on_a_gpu_is_refused(name: str, corpus: Path, zygote: Zygote) -> None:
    if "Triton" in words_of(FOLDER / "honest_cuda" / name)[-1] and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    require_accepted(corpus / "honest_cuda" / name, "cuda", zygote)


@by_name("weak")
def test_weak_problems_are_not_judged(name: str, corpus: Path) -> None:
    path = corpus / "weak" / name
    verdict = judge(path, path)
    assert any(": ".join(words_of(path)) in words for words in verdict.void), verdict.void
    assert verdict.status == 2
    assert not verdict.accepted


@pytest.mark.parametrize("path", files("problems"), ids=lambda path: path.stem)
def test_problems_of_the_corpus_can_be_judged(path: Path, zygote: Zygote, corpus: Path) -> None:
    copy = corpus / "problems" / f"{path.stem}_itself.py"
    copy.write_text(path.read_text().replace("class Model(", "class ModelNew("))
    verdict = judge(copy, path, zygote=zygote, rounds=0)
    assert verdict.accepted, str(verdict)
    assert not verdict.void


def test_the_corpus_is_large() -> None:
    assert len(files("cheats")) >= 40
    assert len(files("honest")) >= 20
    assert torch.get_default_dtype() == torch.float32
