"""Pages, examples and generated packages use only public names."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from test_pages import ALL

import torchkiln
from torchkiln.new.template import FOLDER

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ROOT / "tests" / "foreign_package"
CHAIN = re.compile(r"\w+(\.\w+)+")
PUBLIC = {"torchkiln", "torchkiln.nn", *(f"torchkiln.{name}" for name in torchkiln.SUBMODULES)}


def sources() -> Iterator[tuple[str, str]]:
    """Python code that users copy, each with its page or path."""
    for block in ALL:
        if block.language == "python":
            yield str(block), textwrap.dedent(block.code)
    for folder in (FOLDER, ROOT / "docs" / "examples", FOREIGN):
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(folder.parent)), path.read_text(encoding="utf-8")


def names_in(code: str) -> Iterator[str]:
    """Dotted names of modules and attributes that code imports or reads."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # an excerpt that is no complete statement
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and CHAIN.fullmatch(text := ast.unparse(node)):
            yield text


def is_public(name: str) -> bool:
    """Whether every module along a dotted name lists the next part as public."""
    first, *parts = name.split(".")
    found: object = importlib.import_module(first)
    for part in parts:
        if not isinstance(found, ModuleType):
            return True  # attributes of classes and functions are not listed
        listed = part in found.__all__ or f"{found.__name__}.{part}" in PUBLIC
        if not listed or not found.__name__.startswith("torchkiln"):
            return listed
        found = getattr(found, part)
    return True


def private_names(code: str) -> set[str]:
    """The names below torchkiln that code uses and that are not public."""
    found = {name for name in names_in(code) if name.split(".")[0] == "torchkiln"}
    return {name for name in found if not is_public(name)}


SOURCES = dict(sources())


def test_sources_are_found() -> None:
    names = {name for code in SOURCES.values() for name in names_in(code)}
    assert {"torchkiln.extend.eager", "torchkiln.testing.plans", "torchkiln.hub.mapping"} <= names


@pytest.mark.parametrize("place", SOURCES)
def test_code_for_users_has_public_names_only(place: str) -> None:
    assert private_names(SOURCES[place]) == set()


@pytest.mark.parametrize(
    "code",
    [
        "from torchkiln.ops.eager import eager",
        "from torchkiln.testing.fuzz import plans",
        "from torchkiln import aoti",
        "import torchkiln.patch.plan",
        "import torchkiln\ntorchkiln.ops.norm.rms_norm(x)",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert private_names(code)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    for entry in module.__all__:
        assert getattr(module, entry, None) is not None, entry


@pytest.mark.parametrize("name", sorted(torchkiln.__all__))
def test_pickles_name_public_places(name: str) -> None:
    """A pickle of a public function names torchkiln, so that models may hold it as an attribute."""
    thing = getattr(torchkiln, name)
    if isinstance(thing, FunctionType | type):
        text = pickle.dumps(thing, protocol=0)
        assert text.startswith(b"ctorchkiln\n%s\n" % name.encode())
        assert pickle.loads(text) is thing


def test_submodules_are_attributes() -> None:
    """Submodules are imported at the first access; dir() lists exactly the public names."""
    code = (
        "import torchkiln, sys\n"
        "assert 'torchkiln.jit' not in sys.modules\n"
        "torchkiln.jit.elementwise, torchkiln.hub.mapping, torchkiln.testing.OpSpec\n"
        "names = {*torchkiln.__all__, *torchkiln.SUBMODULES}\n"
        "assert set(dir(torchkiln)) == names, set(dir(torchkiln)) ^ names\n"
        "assert not hasattr(torchkiln, 'nonsense')\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
