"""The Dockerfiles as the script reads that does their steps without an engine."""

from __future__ import annotations

import pytest
from run_dockerfile import read_steps
from sandbox import ROOT

DOCKER = ROOT / "docs" / "docker"


@pytest.mark.parametrize(("name", "target"), [("user", None), ("development", "development")])
def test_steps(name: str, target: str | None) -> None:
    steps = read_steps((DOCKER / f"{name}.Dockerfile").read_text(), target)
    assert steps[0].name == "FROM"
    assert steps[-1].name == "CMD"
    assert sum(step.name == "RUN" for step in steps) >= 3
    assert not any("\\" in step.words or "#" in step.words for step in steps)
    users = [step.words for step in steps if step.name == "USER"]
    assert users
    assert users[-1] != "root"


def test_stages_and_lines() -> None:
    text = "FROM a AS b\nRUN one \\\n    # why\n    && two\nFROM b AS c\nADD x y\n"
    assert [step.words for step in read_steps(text, "b")] == ["a AS b", "one && two"]
    with pytest.raises(SystemExit, match="got ADD, expected one of FROM, RUN, COPY"):
        read_steps(text)
    with pytest.raises(SystemExit, match="found no stage d"):
        read_steps("FROM a AS b\n", "d")


def test_copied_files_are_there() -> None:
    for path in DOCKER.glob("*.Dockerfile"):
        copied = [line.split()[1] for line in path.read_text().splitlines() if line[:4] == "COPY"]
        for name in copied:
            assert name.startswith("dist/") or (ROOT / name).is_file(), name
