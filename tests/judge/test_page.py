"""The table of the corpus in docs/judge.md; ``python tests/judge/test_page.py`` writes it."""

from __future__ import annotations

from pathlib import Path

from test_corpus import files, words_of

PAGE = Path(__file__).parents[2] / "docs" / "judge.md"
BEGIN, END = "<!-- corpus -->\n", "<!-- end -->"


def table() -> str:
    """The tables of cheats, sorted by trick, and of honest candidates."""
    rows = []
    for path in (*files("cheats"), *files("cheats_cuda")):
        _, trick, words = words_of(path)
        rows.append(f"| {trick} | {words} (`{path.stem}`) | {device(path)} |")
    text = ["| trick | cheat | device |", "|---|---|---|", *sorted(rows), ""]
    text += ["| honest candidate | problem | device |", "|---|---|---|"]
    for path in (*files("honest"), *files("honest_cuda")):
        problem, words = words_of(path)
        text.append(f"| {words} (`{path.stem}`) | {problem} | {device(path)} |")
    return "\n".join(text) + "\n"


def device(path: Path) -> str:
    """The device on which a candidate runs."""
    return "GPU" if path.parent.name.endswith("_cuda") else "CPU"


def written(page: str) -> str:
    """The page with a new table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == written(page), "type: python tests/judge/test_page.py"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
