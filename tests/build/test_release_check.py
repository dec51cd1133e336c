"""`nox -s release_check` on copies of the sources: one can be released, the others have a fault."""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import check_release
import pytest
from sandbox import ROOT

TODAY = dt.date(2030, 5, 17)
VERSION = check_release.project_of(ROOT)["version"]
MINOR = VERSION.rpartition(".")[0]
COPIED = ("README.md", "CHANGELOG.md", "LICENSE", "THIRD_PARTY_NOTICES.txt", "pyproject.toml")
FOLDERS = ("docs", "tests/consumer", "src/torchkiln_command", ".github")


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "commit.gpgsign=no")
    subprocess.run(["git", "-C", root, *who, *words], check=True, capture_output=True)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed copy with a dated changelog and an address, which can be released."""
    root = tmp_path_factory.mktemp("ready")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED:
        shutil.copy(ROOT / name, root)
    for target in ("cpp", "cuda", "tests", "src"):  # targets of links on pages
        for path in (ROOT / target).rglob("*"):
            place = root / path.relative_to(ROOT)
            if not place.exists() and path.is_file() and "__pycache__" not in path.parts:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
    for page in check_release.pages(root):
        text = check_release.PLACEHOLDER.sub("https://example.org/it", page.read_text("utf-8"))
        page.write_text(text, encoding="utf-8")
    log = root / "CHANGELOG.md"
    first = next(line for line in log.read_text("utf-8").splitlines() if line.startswith("## "))
    version = check_release.project_of(root)["version"]
    change(log, first, f"## [{version}] - 2030-05-17")
    text = log.read_text("utf-8").replace("will be the first release", "is the first release")
    log.write_text(text, encoding="utf-8")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=All")
    return root


@pytest.fixture
def root(ready: Path, tmp_path: Path) -> Path:
    """A copy of ``ready`` that a test may change."""
    return shutil.copytree(ready, tmp_path / "copy")


@pytest.fixture
def wheel(root: Path) -> Path:
    """A wheel with the files and metadata that the check compares."""
    project = check_release.project_of(root)
    info = f"torchkiln-{project['version']}.dist-info"
    path = root.parent / f"torchkiln-{project['version']}-cp311-cp311-linux_x86_64.whl"
    fields = ("name", "Name"), ("version", "Version"), ("requires-python", "Requires-Python")
    metadata = "".join(f"{field}: {project[key]}\n" for key, field in fields)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        for name in project["license-files"]:
            archive.write(root / name, f"{info}/licenses/{name}")
        for source in (root / "src").rglob("*.py"):
            archive.write(source, source.relative_to(root / "src"))
    return path


def test_all_is_ready(root: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = check_release.check(root, [wheel], TODAY)
    printed = capsys.readouterr().out
    assert ready, printed
    assert printed.count("ok     ") == 8
    assert not check_release.check(root, [], TODAY)  # at least one wheel is required


def test_another_number_in_the_readme(root: Path) -> None:
    number = re.search(r"\| (\d+\.\d us) \|", (root / "README.md").read_text())
    assert number is not None
    change(root / "README.md", f"| {number[1]} |", "| 0.1 us |")
    (problem,) = check_release.number_problems(root)
    assert problem.startswith("README.md differs from what is generated")


def dated(words: str) -> Callable[[Path], None]:
    return lambda root: change(root / "CHANGELOG.md", "2030-05-17", words)


def tagged(name: str) -> Callable[[Path], None]:
    def tag(root: Path) -> None:
        git(root, "tag", name)
        git(root, "commit", "--quiet", "--allow-empty", "--message=More")

    return tag


def changelog(root: Path) -> Iterable[str]:
    return check_release.changelog_problems(root, TODAY)


FAULTS: dict[str, tuple[Callable[[Path], object], Callable[[Path], Iterable[str]], str]] = {
    "version": (
        lambda root: change(
            root / "pyproject.toml", f'version = "{VERSION}"', 'version = "99.2.0"'
        ),
        check_release.version_problems,
        f"README.md: found find_package(torchkiln {MINOR}), expected 99.2",
    ),
    "date": (dated("soon"), changelog, "as the first entry"),
    "day to come": (dated("2030-05-18"), changelog, "found the day 2030-05-18, which is after"),
    "length": (
        lambda root: change(root / "CHANGELOG.md", "\n", "\n" * 30),
        changelog,
        "lines, expected at most 40",
    ),
    "tag": (tagged(f"v{VERSION}"), check_release.tag_problems, f"v{VERSION} at another commit"),
    "newer tag": (tagged("v99.1.1"), check_release.tag_problems, "v99.1.1, which is newer than"),
    "change": (
        lambda root: (root / "LICENSE").write_text("BSD 3-Clause License"),
        check_release.tag_problems,
        "not committed: LICENSE",
    ),
    "license": (
        lambda root: (root / "THIRD_PARTY_NOTICES.txt").unlink(),
        check_release.license_problems,
        "found no THIRD_PARTY_NOTICES.txt",
    ),
    "link": (
        lambda root: change(root / "README.md", "(docs/install.md)", "(docs/instal.md)"),
        check_release.link_problems,
        "README.md: found docs/instal.md, expected a file",
    ),
    "heading": (
        lambda root: change(root / "docs" / "cpp.md", "(sdk.md#the-package)", "(sdk.md#package)"),
        check_release.link_problems,
        "docs/cpp.md: found sdk.md#package, expected a heading of sdk.md",
    ),
    "external link": (
        lambda root: change(root / "CHANGELOG.md", "https://keep", "http:/keep"),
        check_release.link_problems,
        "CHANGELOG.md: found http:/keep",
    ),
    "address": (
        lambda root: change(root / "README.md", "https://example.org/it", "<the address of it>"),
        check_release.link_problems,
        "README.md: found <the address of it>",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(root: Path, name: str) -> None:
    plant, check, words = FAULTS[name]
    assert list(check(root)) == []
    plant(root)
    assert [problem for problem in check(root) if words in problem], list(check(root))


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("METADATA", f"Version: found None, expected {VERSION}"),
        ("licenses/LICENSE", "is not the LICENSE of the sources"),
        ("torchkiln_command/__init__.py", "is not the file of the sources"),
    ],
)
def test_a_wheel_of_other_sources(root: Path, wheel: Path, inside: str, words: str) -> None:
    assert list(check_release.wheel_problems(root, wheel)) == []
    other = wheel.with_name("other.whl")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"Name: x\n" if name.endswith(inside) else old.read(name))
    problems = list(check_release.wheel_problems(root, other))
    assert any(words in problem for problem in problems), problems
