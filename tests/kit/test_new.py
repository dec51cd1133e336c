"""Files that `torchkiln new` writes; `nox -s new` builds them and runs their tests."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import forked

import torchkiln
from torchkiln.new import TEMPLATES, check, write_package
from torchkiln.new.__main__ import main
from torchkiln.new.addition import add_op
from torchkiln.new.edit import Before, Edit, EditError, Listed, applied
from torchkiln.new.template import FOLDER, PLACEHOLDER

ROOT = Path(__file__).resolve().parents[2]
NAME = "gated_scale"


@pytest.fixture(params=TEMPLATES)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A new package, from each template."""
    folder = tmp_path / "made"
    write_package(NAME, request.param, folder)
    return folder


def texts(folder: Path) -> dict[str, str]:
    """The text of every file below a folder, by its relative path."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


def test_a_package_is_complete(package: Path, request: pytest.FixtureRequest) -> None:
    kernels = {f"cpp/cpu/{NAME}.cpp", f"cuda/ops/{NAME}.cu"}
    made = set(texts(package))
    assert made & kernels == (set() if "elementwise" in request.node.name else kernels)
    assert made - kernels == {
        ".github/workflows/tests.yml",
        ".gitignore",
        "CMakeLists.txt",
        "README.md",
        f"cpp/include/{NAME}/torch/ops.h",
        f"cpp/ops/{NAME}.cpp",
        "cpp/python/module.cpp",
        f"cuda/include/{NAME}/kernels/{NAME}.h",
        "noxfile.py",
        "pyproject.toml",
        f"src/{NAME}/_C.pyi",
        f"src/{NAME}/__init__.py",
        f"src/{NAME}/ops.py",
        f"src/{NAME}/py.typed",
        f"src/{NAME}/spec.py",
        "tests/conftest.py",
        f"tests/test_{NAME}.py",
    }


def test_every_placeholder_is_filled_in(package: Path) -> None:
    for path, text in texts(package).items():
        assert not PLACEHOLDER.search(text), path
        assert text.isascii(), path
        if path.endswith((".py", ".pyi")):
            ast.parse(text)


def test_a_package_needs_this_version(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())
    version = ".".join(torchkiln.__version__.split(".")[:2])
    assert project["project"]["name"] == NAME
    assert project["project"]["dependencies"] == [f"torchkiln[torch]=={version}.*"]
    assert f"torchkiln[torch]=={version}.*" in project["build-system"]["requires"]
    assert f"find_package(torchkiln {version} REQUIRED" in (package / "CMakeLists.txt").read_text()


def test_kernels_of_a_package_do_not_include_torch(package: Path) -> None:
    for path, text in texts(package).items():
        if path.startswith(("cuda/", "cpp/cpu/")):
            assert not re.search(r'#include\s*[<"](torch|ATen|c10)/', text), path


@pytest.mark.parametrize("name", ["gate", NAME, "exponential_linear_gate"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_files_are_formatted(
    template: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files pass ruff for names of all lengths; a long name breaks lines of a template."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    if shutil.which("ruff") is None:
        pytest.skip("needs ruff")
    package = tmp_path / "made"
    write_package(name, template, package)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            ["ruff", *command, "--no-cache"],
            cwd=package,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_no_two_templates_have_the_same_file() -> None:
    seen: dict[str, Path] = {}
    for path in FOLDER.rglob("*"):
        if path.is_file() and path.stat().st_size and "__pycache__" not in path.parts:
            text = path.read_text()
            assert text not in seen, f"{path} is {seen[text]}"
            seen[text] = path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Gate",
            "expected lowercase words joined by _, each of letters and digits, such as 'gate'",
        ),
        ("my-gate", "such as 'my_gate'"),
        ("3d", "such as 'd'"),
        ("", "expected lowercase words joined by _, each of letters and digits"),
        ("a__b", "such as 'a_b'"),
        ("lambda", "a word of Python or C++"),
        ("double", "a word of Python or C++"),
        ("random", "a module of Python"),
        ("exp", "a function of C"),
        ("aten", "a name of torch"),
        ("softmax", "a name of torch or torchkiln"),
        ("torchkiln", "a name of torch or torchkiln"),
        ("norm", "a name of torch or torchkiln"),
    ],
)
def test_a_name_that_will_not_do(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check.name(name)
    assert str(caught.value).startswith(f"torchkiln.new: NAME: got {name!r}, ")


def test_a_folder_that_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([NAME, "--out", str(tmp_path)]) == 2
    message = f"torchkiln.new: --out: got {tmp_path}, which is not empty, expected a new folder"
    assert message in capsys.readouterr().err
    assert main([NAME, "--out", str(tmp_path / "file")]) == 2
    assert "a file, expected a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


KILLED = """
import os, sys
from pathlib import Path
from torchkiln.new import write
from torchkiln.new.__main__ import main
count = 0
original = write.store
def store(path, text):
    global count
    count += 1
    if count == 5:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), 9)
        raise OSError(28, "No space left on device")
    return original(path, text)
write.store = store
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("how", ["killed", "full"])
@pytest.mark.parametrize("options", [[], ["--for", "hub"]], ids=["package", "hub"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_that_does_not_end(
    how: str, options: list[str], is_there: bool, tmp_path: Path
) -> None:
    into = tmp_path / "made"
    if is_there:
        into.mkdir()
    words = [NAME, *options, "--out", str(into)]
    done = forked(KILLED, how, *words)
    if how == "killed":
        assert done.returncode == -9
        assert [path.name for path in into.iterdir()] == [check.UNFINISHED]
    else:
        assert done.returncode == 2
        assert "(No space left on device), expected a folder that can be written" in done.stderr
        assert into.exists() == is_there
        assert not is_there or not any(into.iterdir())
    assert main(words) == 0
    assert main([NAME, *options, "--out", str(tmp_path / "other")]) == 0
    assert texts(into) == texts(tmp_path / "other")


def test_an_unknown_template(tmp_path: Path) -> None:
    message = "--template: got 'scan', expected one of elementwise, reduction, custom"
    with pytest.raises(ValueError, match=message):
        write_package(NAME, "scan", tmp_path / "made")


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    """`torchkiln new` works without torch."""
    code = (
        "import sys; sys.modules['torch'] = None; from torchkiln_command import main; "
        f"sys.argv = ['torchkiln', 'new', {NAME!r}]; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(torchkiln.cmake_prefix_path).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{NAME}/pyproject.toml\n" in done.stdout
    assert (tmp_path / NAME / "pyproject.toml").is_file()


FILE = "one\n  two\nfour\n"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Before("f", "  two", "new\n"), "one\nnew\n  two\nfour\n"),
        (Listed("f", r"(\w+)$", "new"), "new\none\n  two\nfour\n"),
        (Listed("f", r"(\w+)$", "zero"), "one\n  two\nfour\nzero\n"),
    ],
)
def test_a_line_finds_its_place(edit: Edit, expected: str) -> None:
    assert applied([edit], {"f": FILE}) == {"f": expected}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Before("f", "three", "new\n"), "f: got 0 lines 'three', expected 1; nothing was written"),
        (Before("f", "two", "new\n"), "f: got 0 lines 'two', expected 1"),
        (Listed("f", r"    (\w+)$", "    new"), "expected a list"),
        (Listed("f", r"(\w+)$", "one"), "got 'one' in the list, expected a new name"),
    ],
)
def test_a_line_that_has_no_place(edit: Edit, message: str) -> None:
    with pytest.raises(EditError, match=re.escape(message)):
        edit.apply(FILE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of cpp, cuda and src, with the files that list their op families."""
    folder = tmp_path / "checkout"
    left_out = shutil.ignore_patterns("__pycache__", "templates", "*.so*")
    for name in ("cpp", "cuda", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in (".clang-format", "CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


# Public functions of new CPU kernels, with the arguments that each passes to its variants. The
# build generates the kernels of elementwise ops, so those have none.
ENTRIES = {
    "elementwise": {},
    "reduction": dict.fromkeys((NAME, f"{NAME}_backward"), "arguments, begin, end"),
    "custom": {NAME: "arguments, begin, end"},
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_op_of_this_repository(template: str, checkout: Path) -> None:
    before = texts(checkout)
    written = add_op(NAME, template, checkout)
    after = texts(checkout)
    new = {path for path in after if path not in before}
    kernels = {f"cpp/cpu/{NAME}.cpp", f"cuda/ops/{NAME}.cu"}
    assert new == (kernels if ENTRIES[template] else set()) | {
        f"cpp/ops/{NAME}.cpp",
        f"cuda/include/torchkiln/kernels/{NAME}.h",
        f"src/torchkiln/ops/{NAME}.py",
        f"src/torchkiln/testing/specs/{NAME}.py",
    }
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {
        "cpp/include/torchkiln/torch/ops.h",
        "cpp/python/module.cpp",
        "src/torchkiln/__init__.py",
    }
    assert {path.relative_to(checkout).as_posix() for path in written} == new | changed
    for path in new | changed:
        assert NAME in after[path] or "GatedScale" in after[path], path
        assert not PLACEHOLDER.search(after[path].replace("TORCHKILN_PACKAGE", "")), path
    for path in changed:  # lines are only added
        rest = iter(after[path].splitlines())
        assert all(line in rest for line in before[path].splitlines()), path
    if ENTRIES[template]:
        text = " ".join(after[f"cpp/cpu/{NAME}.cpp"].split())
        entries = re.findall(r"TORCHKILN_CPU_ENTRY\((\w+), \(.*?\), \((.*?)\)\)", text)
        assert dict(entries) == ENTRIES[template]
    for path in new:
        assert not re.search(rf"(?<!namespace )torchkiln::(?!{NAME}|formulas)", after[path]), path
        assert "using namespace torchkiln" not in after[path], path
    for path in new | changed:
        assert not re.search("^TORCHKILN_VISIBLE", after[path], re.MULTILINE), path


def test_the_price_of_an_elementwise_op(checkout: Path) -> None:
    """A new elementwise op with kernels, gradients, contract and benchmark: 7 files, 120 lines."""
    before = texts(checkout)
    written = add_op("gated_scale", "elementwise", checkout)
    after = texts(checkout)
    lines = sum(
        len(after[path].splitlines()) - len(before.get(path, "").splitlines()) for path in after
    )
    assert len(written) <= 7
    assert lines <= 120


def test_an_op_that_cannot_be_added(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([NAME, "--op", "--out", str(tmp_path)]) == 2
    assert "expected a checkout of torchkiln" in capsys.readouterr().err
    assert main(["swiglu", "--op", "--out", str(checkout)]) == 2
    assert "which is a name of torch or torchkiln" in capsys.readouterr().err
    assert main(["norm", "--op", "--out", str(checkout)]) == 2
    assert "which is a name of torch or torchkiln" in capsys.readouterr().err
    header = checkout / "cpp" / "include" / "torchkiln" / "torch" / "ops.h"
    header.write_text(header.read_text().replace("}  // namespace torchkiln", "}"))
    before = texts(checkout)
    assert main([NAME, "--op", "--out", str(checkout)]) == 2
    assert (
        "torch/ops.h: got 0 lines '}  // namespace torchkiln', expected 1"
        in capsys.readouterr().err
    )
    assert texts(checkout) == before


def commands_of_the_page() -> list[list[str]]:
    """The arguments of each command `torchkiln new` in docs/new.md."""
    page = (ROOT / "docs" / "new.md").read_text()
    blocks = re.findall(r"^```sh shown\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    words = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line[2:] for line in words if line[:2] == ["torchkiln", "new"]]


@pytest.mark.parametrize("command", commands_of_the_page(), ids=" ".join)
def test_a_command_of_the_page(
    command: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_op = "--op" in command
    folder: Path = request.getfixturevalue("checkout" if is_op else "tmp_path")
    monkeypatch.chdir(folder)
    assert main(command) == 0
    if "--for" in command:
        assert (folder / command[0] / "build.toml").is_file()
    elif not is_op:
        (project,) = folder.rglob("pyproject.toml")
        assert tomllib.loads(project.read_text())["project"]["name"] == command[0]


def test_the_page_describes_every_template() -> None:
    page = (ROOT / "docs" / "new.md").read_text()
    for template in TEMPLATES:
        assert f"| `{template}` |" in page
    commands = commands_of_the_page()
    assert len([command for command in commands if "--op" in command]) == 1
    assert ["soft_gate", "--for", "hub"] in commands
    assert len(commands) == len(TEMPLATES) + 2
