"""Write a package with an operator of your own, or add an operator to a checkout of torchkiln."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchkiln.cli.status import Status, refused
from torchkiln.new.addition import add_op
from torchkiln.new.template import TEMPLATES
from torchkiln.new.write import write_hub_kernel, write_package

NEXT = """
cd {folder}
python -m pip install scikit-build-core cmake ninja pytest hypothesis expecttest numpy
python -m pip install --no-build-isolation --no-deps .
python -m pytest -m "not slow"     # or nox -s tests, in an environment of its own
"""

NEXT_HUB = """
cd {folder}
python -m pip install kernels pytest
python build_local.py
torchkiln check-hub .
python -m pytest tests
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
    add("--template", choices=TEMPLATES, help="default: elementwise")
    add("--for", dest="purpose", choices=["hub"], help="a kernel for Hugging Face's hub")
    add("--op", action="store_true", help="add the operator to this checkout of torchkiln")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="a new folder (default: NAME), or with --op the checkout (default: .)",
    )
    options = parser.parse_args(given)
    if options.purpose and (options.op or options.template):
        parser.error("--for: got hub beside --op or --template, expected it alone")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Writes the files, prints their paths and the next commands."""
    options = arguments(given)
    into = options.out or Path() if options.op else options.out or Path(options.name)
    write = add_op if options.op else write_package
    try:
        if options.purpose:
            written = write_hub_kernel(options.name, into)
        else:
            written = write(options.name, options.template or "elementwise", into)
    except ValueError as error:
        return refused(error)
    except OSError as error:
        if error.strerror is None:  # torchkiln raised it, not the system
            return refused(error)
        words = f"got {into} ({error.strerror}), expected a folder that can be written"
        return refused(ValueError(f"torchkiln.new: --out: {words}"))
    for path in written:
        print(path)
    then = NEXT_HUB if options.purpose else NEXT_OP if options.op else NEXT
    print(then.format(name=options.name, folder=into), end="")
    return Status.DONE


if __name__ == "__main__":
    sys.exit(main())
