"""Usage: check_release.py [--root FOLDER] [WHEEL...]

Checks that the sources can be released, and that each WHEEL was built from them: version, date and
length of the changelog, tags, licences, links, the numbers of README.md and the contents of wheels.
Prints a line per check, and fails at the end if one failed. External links are not opened.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from checks import Checks

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG_LINES = 40

CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# Text in angle brackets in place of the address or owner of the repository.
PLACEHOLDER = re.compile(r"<(?:the address of [^>]*|owner)>")


def project_of(root: Path) -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return found


def version_problems(root: Path) -> Iterable[str]:
    """Where users copy the minor version, it must be that of pyproject.toml."""
    version = project_of(root)["version"]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"pyproject.toml: found version {version}, expected three numbers"
    minor = version.rpartition(".")[0]
    for path in [*pages(root), *sorted((root / "tests" / "consumer").rglob("CMakeLists.txt"))]:
        for found in re.findall(r"find_package\(torchkiln ([\d.]+)", path.read_text("utf-8")):
            if found != minor:
                name = path.relative_to(root)
                yield f"{name}: found find_package(torchkiln {found}), expected {minor}"


def changelog_problems(root: Path, today: dt.date) -> Iterable[str]:
    """The newest entry must be this version with a date; the file must be short."""
    version = project_of(root)["version"]
    text = (root / "CHANGELOG.md").read_text("utf-8")
    first = next(iter(re.findall(r"^## (.*)$", text, re.MULTILINE)), "no entry")
    dated = re.fullmatch(r"\[([^\]]+)\] - (\d{4}-\d\d-\d\d)", first)
    if dated is None or dated[1] != version:
        yield f"found {first!r}, expected '[{version}] - <year>-<month>-<day>' as the first entry"
    elif dt.date.fromisoformat(dated[2]) > today:
        yield f"found the day {dated[2]}, which is after today, {today}"
    elif "will be the first release" in text:
        yield "found 'will be the first release' in an entry with a day"
    if (lines := len(text.splitlines())) > CHANGELOG_LINES:
        yield f"found {lines} lines, expected at most {CHANGELOG_LINES}"


def git(root: Path, *words: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def tag_problems(root: Path) -> Iterable[str]:
    """This version's tag must be unused or at HEAD, others older, and all files committed."""
    version = project_of(root)["version"]
    numbers = [int(number) for number in version.split(".")]
    for tag in git(root, "tag", "--list", "v*"):
        if tag == f"v{version}":
            if git(root, "rev-list", "-1", tag) != git(root, "rev-parse", "HEAD"):
                yield f"found the tag {tag} at another commit: raise the version"
        elif not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
            yield f"found the tag {tag}, expected v and three numbers"
        elif [int(number) for number in tag[1:].split(".")] > numbers:
            yield f"found the tag {tag}, which is newer than {version}"
    yield from (f"not committed: {line[3:]}" for line in git(root, "status", "--porcelain"))


def license_problems(root: Path) -> Iterable[str]:
    """The license files that pyproject.toml names must exist."""
    for name in project_of(root)["license-files"]:
        if not (root / name).is_file():
            yield f"found no {name}, which pyproject.toml names"
    if not (root / "LICENSE").read_text("utf-8").startswith("BSD 3-Clause License"):
        yield "LICENSE: found another license than BSD 3-Clause, which the metadata has"


def pages(root: Path) -> list[Path]:
    """The Markdown files that users read."""
    named = (root / "README.md", root / "CHANGELOG.md", root / ".github" / "CONTRIBUTING.md")
    return [*(path for path in named if path.is_file()), *sorted((root / "docs").rglob("*.md"))]


def places(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site generate them."""
    found: set[str] = set()
    for heading in HEADING.findall(
        re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def link_problems(root: Path) -> Iterable[str]:
    """Links must lead to a file and a heading; addresses must be complete, without placeholders."""
    texts = {path.resolve(): path.read_text("utf-8") for path in pages(root)}
    for path, text in texts.items():
        name = path.relative_to(root.resolve())
        yield from (f"{name}: found {word}" for word in PLACEHOLDER.findall(text))
        for link in LINK.findall(CODE.sub("", text)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme != "https" or "." not in parts.netloc:
                    yield f"{name}: found {link}, expected https:// and a host"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{name}: found {link}, expected a file of the repository"
            elif parts.fragment and target in texts and parts.fragment not in places(texts[target]):
                yield f"{name}: found {link}, expected a heading of {target.name}"


def number_problems(root: Path) -> Iterable[str]:
    """Generated parts of README.md and docs/ must agree with docs/results."""
    command = [sys.executable, str(root / "docs" / "figures.py"), "--check", f"--root={root}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        yield from done.stderr.strip().splitlines() or [f"figures.py: exit {done.returncode}"]


def wheel_problems(root: Path, wheel: Path) -> Iterable[str]:
    """A wheel must have this version and its licenses; `nox -s abi` checks the other contents."""
    project = project_of(root)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata.removesuffix("METADATA")
        found = Parser().parsestr(archive.read(metadata).decode())
        for field, expected in (
            ("Name", project["name"]),
            ("Version", project["version"]),
            ("Requires-Python", project["requires-python"]),
        ):
            if found[field] != expected:
                yield f"{field}: found {found[field]}, expected {expected}"
        for name in project["license-files"]:
            inside = f"{info}licenses/{name}"
            if inside not in names or archive.read(inside) != (root / name).read_bytes():
                yield f"{inside}: is missing, or is not the {name} of the sources"
        for path in sorted((root / "src").rglob("*.py")):
            inside = str(path.relative_to(root / "src"))
            if inside not in names:
                yield f"{inside}: is missing"
            elif archive.read(inside) != path.read_bytes():
                yield f"{inside}: is not the file of the sources"


def check(root: Path, wheels: Sequence[Path], today: dt.date) -> bool:
    """Runs all checks; returns whether all have passed."""
    checks = Checks()
    checks.none("one version", version_problems(root))
    checks.none(
        "the changelog has the version, its day and few lines", changelog_problems(root, today)
    )
    checks.none("the tag is free, and all is committed", tag_problems(root))
    checks.none("licenses", license_problems(root))
    checks.none("links, and no address to fill in", link_problems(root))
    checks.none("the numbers of the pages are those of docs/results", number_problems(root))
    checks.none("there is a wheel", [] if wheels else ["name it after --, or type nox -s wheel"])
    for wheel in wheels:
        checks.none(f"{wheel.name} was built from these sources", wheel_problems(root, wheel))
    return not checks.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("wheels", nargs="*", type=Path)
    options = parser.parse_args()
    if not check(options.root, options.wheels, dt.datetime.now(dt.UTC).date()):
        raise SystemExit("not ready for a release")


if __name__ == "__main__":
    main()
