"""Write a package with an operator of your own, or add an operator to a checkout of torchkiln."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchkiln.new.addition import add_op
from torchkiln.new.template import TEMPLATES
from torchkiln.new.write import write_package

NEXT = """
cd {folder}
python -m pip install scikit-build-core cmake ninja pytest hypothesis expecttest numpy
python -m pip install --no-build-isolation --no-deps .
python -m pytest -m "not slow"     # or nox -s tests, in an environment of its own
"""

NEXT_OP = """
nox -s tests -- tests/contract/test_contract.py tests/contract/test_coverage.py -k {name}
Write your formula, its contract and a line of CHANGELOG.md; nox -s figures updates docs/ops.md.
"""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    lines = [f"  {name:<12} {words}" for name, words in TEMPLATES.items()]
    parser = argparse.ArgumentParser(
        prog="torchkiln new",
        description=__doc__,
        epilog="\n".join(["templates:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="of the package and its operator: small letters")
    add("--template", choices=TEMPLATES, default="elementwise", help="default: elementwise")
    add("--op", action="store_true", help="add the operator to this checkout of torchkiln")
    add(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="a new folder (default: NAME), or with --op the checkout (default: .)",
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Writes the files, prints their paths and the next commands."""
    options = arguments(given)
    into = options.into or Path() if options.op else options.into or Path(options.name)
    write = add_op if options.op else write_package
    try:
        written = write(options.name, options.template, into)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        refused = f"torchkiln.new: --into: got {into} ({error.strerror}), expected a folder that "
        # Errors of torchkiln have a message, those of the system a number.
        print(f"{refused}can be written" if error.strerror else error, file=sys.stderr)
        return 2
    for path in written:
        print(path)
    then = NEXT_OP if options.op else NEXT
    print(then.format(name=options.name, folder=into), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
