"""The code of README.md and of the pages in docs/ runs.

The word after a block's language selects what the test does with it:

    python           runs, also on the CPU; the blocks of a page share one namespace
    python gpu       runs on a GPU; on other machines it must reach the first launch
    sh               every line runs
    cuda NAME.cu     NVRTC compiles it; later blocks of the page can use the file
    ... PATH         consists of lines of that file of the repository; `...` marks omitted lines
    ... shown        is not run; the test counts these blocks
    ... patch        a change to the sources, which nox -s addition applies

Blocks of text are drawings and output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from commands import served

from torchkiln import jit
from torchkiln.jit.compile import toolkit

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SHOWN = {
    "README.md": 1,
    "docs/abi.md": 2,
    "docs/contract.md": 1,
    "docs/cpp.md": 1,
    "docs/debugging.md": 6,
    "docs/docker.md": 4,
    "docs/distributed.md": 3,
    "docs/examples.md": 6,
    "docs/fp8.md": 1,
    "docs/install.md": 6,
    "docs/learn/ship.md": 1,
    "docs/learn/square.md": 1,
    "docs/models.md": 6,
    "docs/mutation.md": 1,
    "docs/new.md": 4,
    "docs/other-ops.md": 2,
    "docs/post-training.md": 2,
    "docs/profiling.md": 3,
    "docs/quick-start.md": 1,
    "docs/removing-an-op.md": 1,
    "docs/sdk.md": 1,
    "docs/shipping.md": 5,
}
"""Number of blocks marked `shown`, by page."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page: its first line, language, the word behind it, and the code."""

    page: str
    line: int
    language: str
    word: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, match.start()) + 1,
            match[1],
            match[2] or "",
            match[3],
        )
        for match in FENCE.finditer(text)
    ]
    plain = [b for b in re.findall(r"^```+(.*)$", text, re.MULTILINE) if not b.startswith("{")]
    directives = len(re.findall(r"^```+\{", text, re.MULTILINE))
    assert len(plain) == 2 * len(found) + directives, f"{page}: a fence that is not understood"
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def quoted(block: Block) -> Path | None:
    """The file of the repository that a block quotes, if its word is the path of one."""
    path = ROOT / block.word
    return path if "/" in block.word and path.is_file() else None


def is_run(block: Block) -> bool:
    """Whether test_page runs or compiles a block."""
    return block.language in ("python", "sh", "cuda") and (
        block.word in ("", "gpu") or ("/" not in block.word and block.word.endswith(".cu"))
    )


class Runner:
    """Runs the blocks of a page in a folder. ``tools`` comes first on the PATH of the shell."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.folder = folder
        self.names: dict[str, object] = {"__name__": "page"}
        self.left_out: list[str] = []
        try:
            toolkit.find()
            self.nvrtc = ""
        except RuntimeError as error:
            self.nvrtc = str(error).split("\n")[0]
        self.environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def run(self, block: Block) -> None:
        """Runs or compiles a block, according to its language."""
        if self.nvrtc and (block.language == "cuda" or block.word == "gpu"):
            self.left_out.append(str(block))
        elif block.language == "cuda":
            self.compile(block)
        elif block.language == "sh":
            self.shell(block)
        else:
            self.python(block)

    def python(self, block: Block) -> None:
        """Runs a block. Without a GPU a GPU block must reach its first launch, and fail there."""
        lines = "\n" * block.line + block.code  # line numbers in tracebacks are the page's
        code = compile(lines, str(ROOT / block.page), "exec")
        if block.word == "gpu" and not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match=r"torchkiln\.jit: .+: got no GPU"):
                exec(code, self.names)
            return
        try:
            exec(code, self.names)
        except RuntimeError as error:
            if not self.nvrtc or "NVRTC: got none" not in str(error):
                raise
            self.left_out.append(str(block))

    def compile(self, block: Block) -> None:
        """Writes the file and compiles all its kernels; the parameters of templates are float."""
        path = self.folder / block.word
        path.write_text(block.code, encoding="utf-8")
        module = jit.load(path)
        for name, signature in module.signatures.items():
            floats = f"<{', '.join(['float'] * len(signature.template))}>"
            module.binary("sm_90", name + floats * bool(signature.template))

    def shell(self, block: Block) -> None:
        """Runs the lines in bash, which stops at the first error."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def tools() -> Iterator[Path]:
    """A folder with the programs ``torchkiln`` and ``python`` of this environment."""
    # pytest's own folders can have names that are too long for a socket.
    with TemporaryDirectory() as name, served(Path(name)) as folder:
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        yield folder


RUN = [page for page in PAGES if any(map(is_run, blocks(page)))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if page.parent.name == "learn":  # readers of these pages work in a clone
        (tmp_path / "docs").symlink_to(ROOT / "docs")
    runner = Runner(tmp_path, tools)
    for block in filter(is_run, blocks(page)):
        runner.run(block)
    if runner.left_out:
        pytest.skip(f"all but {', '.join(runner.left_out)} were run: {runner.nvrtc}")


def lines(code: str) -> list[str]:
    """The lines of code, without indentation and empty lines."""
    return [line.strip() for line in code.splitlines() if line.strip()]


@pytest.mark.parametrize("block", [block for block in ALL if quoted(block)], ids=str)
def test_quoted(block: Block) -> None:
    """The file contains the lines of the block, in this order."""
    path = quoted(block)
    assert path is not None
    source = lines(path.read_text(encoding="utf-8"))
    begin = 0
    for part in map(lines, re.split(r"^ *(?://|#) \.\.\.\n", block.code, flags=re.MULTILINE)):
        places = range(begin, len(source) - len(part) + 1)
        at = next((i for i in places if source[i : i + len(part)] == part), None)
        assert at is not None, "\n".join(part)
        begin = at + len(part)


def test_every_block_is_accounted_for() -> None:
    known = {"shown", "patch"}
    for block in ALL:
        if block.language == "text":
            assert not block.word, block
        else:
            assert is_run(block) or quoted(block) or block.word in known, block
    assert Counter(block.page for block in ALL if block.word == "shown") == SHOWN


def test_sessions_exist() -> None:
    """Every nox session that a page names is in the noxfile."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    sessions = {name for text in texts for name in re.findall(r"nox -s (\w+)", text)}
    assert {"demo", "tests"} <= sessions
    noxfile = (ROOT / "noxfile.py").read_text()
    for session in sessions:
        assert re.search(rf"^def {session}\(", noxfile, re.MULTILINE), session


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_paths_of_the_architecture_exist() -> None:
    folders = "|".join(("cpp", "cuda", "src", "tests", "docs"))
    paths = set(re.findall(rf"(?<![\w./])(?:{folders})/[\w./-]*\w", ARCHITECTURE))
    assert {"cpp/ops/norm/norm.cpp", "cuda/ops/norm/forward.cu"} <= paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


STEP = re.compile(r"^\| \d \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


@pytest.mark.parametrize(("path", "function"), STEP.findall(ARCHITECTURE))
def test_functions_of_the_architecture_exist(path: str, function: str) -> None:
    words = re.findall(r"\w+", function)
    assert re.search(rf"\b{words[-1]}\b", (ROOT / path).read_text(encoding="utf-8"))


def test_the_navigation_has_every_page() -> None:
    """Each page is in exactly one list of docs/index.md. Sphinx, too, fails for a page in none."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    lists = re.findall(r"^```\{toctree\}\n(?::.*\n)+\n([^`]*)^```$", text, re.MULTILINE)
    named = [name for found in lists for name in found.split()]
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    pages -= {"index"}
    assert sorted(named) == sorted(pages)
