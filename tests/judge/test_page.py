"""The table of the corpus in docs/judge.md. ``python tests/judge/test_page.py`` writes it."""

from __future__ import annotations

from pathlib import Path

from test_corpus import files, words_of

PAGE = Path(__file__).parents[2] / "docs" / "judge.md"
BEGIN, END = "<!-- corpus -->\n", "<!-- end -->"


def table() -> str:
    """Rows of all candidates, cheats by trick."""
    cheats = [(p, *words_of(p)) for name in ("cheats", "cheats_cuda") for p in files(name)]
    honest = [(p, *words_of(p)) for name in ("honest", "honest_cuda") for p in files(name)]
    rows = ["| trick | cheat | device |", "|---|---|---|"]
    rows += [
        f"| {trick} | {words} (`{path.stem}`) | {device(path)} |"
        for path, _, trick, words in sorted(cheats, key=lambda row: (row[2], row[0].name))
    ]
    rows += ["", "| honest candidate | problem | device |", "|---|---|---|"]
    rows += [f"| {words} (`{path.stem}`) | {p} | {device(path)} |" for path, p, words in honest]
    return "\n".join(rows) + "\n"


def device(path: Path) -> str:
    """Where a candidate runs."""
    return "GPU" if path.parent.name.endswith("_cuda") else "CPU"


def written(page: str) -> str:
    """The page with the table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == written(page), "type: python tests/judge/test_page.py"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
