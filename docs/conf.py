"""Sphinx configuration of the documentation site: `nox -s docs`.

Pages are plain Markdown, readable on GitHub too. The word after a block's language, which selects
how tests/kit/test_pages.py runs the block, becomes its caption.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util.logging import getLogger

import torchkiln

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "torchkiln"
author = "The torchkiln authors"
project_copyright = author
release = torchkiln.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples"]

html_theme = "furo"
html_title = f"torchkiln {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|functools|nn|pathlib|types)\b.*"),  # of other packages
    (r"py:class", r"Path|Tensor|Argument|Binary|Files|FormulaKernel|Node|Operations|Signature"),
    (r"py:class", r"Random|Written"),
    (r"py:class", r"tuple\[str"),  # half a type of a signature with <factory>
    (r"py:class", r"torchkiln(\.\w+){3,}"),  # in signatures, but not in the reference
]

# Base address of files that are not pages, such as https://example.org/torchkiln/blob/main
REPOSITORY = os.environ.get("TORCHKILN_REPOSITORY", "").rstrip("/")

FENCE = re.compile(r"^```(\w+) (\S+)\n", re.MULTILINE)
CAPTIONS = {"gpu": "needs a GPU", "shown": "not run by the tests", "patch": ""}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
log = getLogger(__name__)


def captioned(block: str) -> str:
    """A block of code whose second word is its caption."""

    def head(match: re.Match[str]) -> str:
        caption = CAPTIONS.get(match[2], match[2])
        option = f":caption: {caption}\n" if caption else ""
        return f"```{{code-block}} {match[1]}\n{option}\n"

    return FENCE.sub(head, block)


def linked(page: str, text: str) -> str:
    """Text whose links to files that are no pages lead to the repository, or are none."""

    def link(match: re.Match[str]) -> str:
        target = (DOCS / page).parent / match[2]
        if not target.exists():
            log.warning("%s links to %s, which is not there", page, match[2])
        target = target.resolve()
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            return match[0]
        if not REPOSITORY:
            return match[1]
        return f"[{match[1]}]({REPOSITORY}/{target.relative_to(ROOT)}{match[3] or ''})"

    return LINK.sub(link, text)


def read(_: Sphinx, page: str, source: list[str]) -> None:
    """Prepare the Markdown of a page."""
    parts = CODE.split(source[0])
    source[0] = "".join(
        captioned(part) if part.startswith("```") else linked(page, part) for part in parts
    )


def keep_whole(_: Sphinx, what: str, *rest: list[str]) -> None:
    """Hide colons in docstrings of attributes, which do not separate a type from a description.

    Napoleon searches the first line for a type, so the first line gets an empty one.
    """
    if what in ("attribute", "data", "property"):
        rest[-1].insert(0, "\\ ")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_whole, priority=400)  # before napoleon
    app.connect("source-read", read)
