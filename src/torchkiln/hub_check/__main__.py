"""Print the requirements of Hugging Face's hub that the kernel in a folder does not meet."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchkiln._report import Report
from torchkiln.cli.options import STDOUT, add_json, output_json
from torchkiln.cli.status import Status, refused
from torchkiln.hub_check import WHERE, Problem, check_hub


@dataclass(frozen=True)
class Result(Report):
    """The problems of a folder."""

    schema: ClassVar[str] = "torchkiln.check-hub/1"

    has_sources: bool
    builds: tuple[str, ...]
    """Names of the folders in ``build``."""
    problems: tuple[Problem, ...]

    def as_dict(self) -> dict[str, Any]:
        """All fields, in types of JSON."""
        return {
            "schema": self.schema,
            "has_sources": self.has_sources,
            "builds": self.builds,
            "problems": [
                {"path": str(problem.path), "line": problem.line, "words": problem.words}
                for problem in self.problems
            ],
        }

    def __str__(self) -> str:
        """A line for each problem, and their number."""
        sources = "sources and " if self.has_sources else ""
        count = f"{len(self.problems)} problems in {sources}{len(self.builds)} builds"
        return "\n".join([*map(str, self.problems), count])


def check(folder: Path) -> Result:
    """The problems of a folder; ValueError if it has neither sources nor builds."""
    problems = tuple(check_hub(folder))
    builds = sorted(path.name for path in (folder / "build").glob("*") if path.is_dir())
    return Result((folder / "build.toml").is_file(), tuple(builds), problems)


def main(given: Sequence[str] | None = None) -> int:
    """Check a folder and print its problems; returns the exit status."""
    parser = argparse.ArgumentParser(prog="torchkiln check-hub", description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="with build.toml, builds in build/, or both"
    )
    add_json(parser)
    options = parser.parse_args(given)
    try:
        found = check(options.folder)
        output_json(WHERE, options.json, found.to_json(1))
    except ValueError as error:
        return refused(error)
    if options.json != STDOUT:
        print(found)
    return Status.FOUND if found.problems else Status.DONE


if __name__ == "__main__":
    sys.exit(main())
