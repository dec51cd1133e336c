"""Print what Hugging Face's hub requires of a kernel and a folder does not meet."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchkiln.hub_check import check_hub


def main(given: Sequence[str] | None = None) -> int:
    """The exit status is 1 if there are problems, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="torchkiln check-hub", description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="with build.toml, builds in build/, or both"
    )
    options = parser.parse_args(given)
    try:
        problems = check_hub(options.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(problem)
    builds = len([path for path in (options.folder / "build").glob("*") if path.is_dir()])
    sources = "sources and " if (options.folder / "build.toml").is_file() else ""
    print(f"{len(problems)} problems in {sources}{builds} builds")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
