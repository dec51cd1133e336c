"""The README's code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())


def blocks(language: str) -> list[str]:
    """The code of one language, in order."""
    return [code for name, code in BLOCKS if name == language]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n")[0])
def test_python_block(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_readme_has_python() -> None:
    assert len(blocks("python")) >= 1


def lines(text: str) -> list[str]:
    """The lines of code without indentation and blank ones."""
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("language", "pattern"), [("cpp", "*.cpp"), ("cmake", "CMakeLists.txt")])
def test_block_is_a_part_of_the_consumer(language: str, pattern: str) -> None:
    """The consumer project, which is compiled and run, has the very lines, in this order."""
    sources = [lines(p.read_text()) for p in (ROOT / "tests" / "consumer").glob(pattern)]
    assert blocks(language)
    for code in blocks(language):
        wanted = lines(code)
        assert any(
            source[i : i + len(wanted)] == wanted
            for source in sources
            for i in range(len(source) - len(wanted) + 1)
        ), code


def test_commands_exist() -> None:
    """Every nox session that the README names is in the noxfile."""
    sessions = set(re.findall(r"nox -s (\w+)", (ROOT / "README.md").read_text()))
    assert {"demo", "tests"} <= sessions
    noxfile = (ROOT / "noxfile.py").read_text()
    for session in sessions:
        assert re.search(rf"^def {session}\(", noxfile, re.MULTILINE), session
