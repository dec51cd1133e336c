"""The Dockerfiles, as run_dockerfile.py reads them, which runs their steps without an engine."""

from __future__ import annotations

import re

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


def test_images_and_downloads_are_pinned() -> None:
    for path in DOCKER.glob("*.Dockerfile"):
        text = path.read_text().replace("\\\n", " ")
        stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE)
        for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
            assert image in stages or re.search(r"@sha256:[0-9a-f]{64}$", image), image
        for words in re.findall(r"^ADD +(.*)", text, re.MULTILINE):
            assert re.match(r"--checksum=sha256:[0-9a-f]{64} ", words), words


def test_the_wheel_is_installed_by_its_file() -> None:
    """The wheel is installed by its path; with --find-links pip may prefer one of an index."""
    text = (DOCKER / "user.Dockerfile").read_text()
    (installed,) = re.findall(r"pip install (.*?) *\\\n", text)
    assert "/torchkiln-*.whl" in installed
    assert "--find-links" not in installed


def test_copied_files_are_there() -> None:
    for path in DOCKER.glob("*.Dockerfile"):
        copied = [line.split()[1] for line in path.read_text().splitlines() if line[:4] == "COPY"]
        for name in copied:
            assert name.startswith("dist/") or (ROOT / name).is_file(), name
