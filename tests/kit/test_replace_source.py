"""``torchkiln.replace``: a forward's source must be the running code; registries see no class."""

from __future__ import annotations

import abc
import importlib.util
import linecache
import pickle
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.patch.source import text

NOT_RUNNING = "the source of its forward is not the code that runs"
BY_NAME = "its forward reads its own variables by name"

SOURCE = """
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)


class Block(Base):
    def forward(self, x):
        return self.norm(x + self.mix(x)) * 1
"""


def imported(path: Path, source: str) -> types.ModuleType:
    """A module imported from a new file with this source."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(model: Any, why: str = "") -> None:
    """Replaces a model, and checks results. ``why``: the expected reason, if it is not replaced."""
    x = torch.randn(3, 32)
    expected = model(x)
    report = torchkiln.replace(model)
    row = report[""]
    assert (row.changed, row.reason) == (not why, why)
    assert why or row.now == "add_layer_norm at norm"
    torch.testing.assert_close(model(x), expected)
    report.undo()
    assert torch.equal(model(x), expected)


def test_an_edited_file_is_not_the_running_code(tmp_path: Path) -> None:
    module = imported(tmp_path / "edited.py", SOURCE)
    check(module.Block())
    with_other = SOURCE.replace("* 1", "* 0")
    assert with_other != SOURCE
    module = imported(tmp_path / "edited_later.py", SOURCE)
    (tmp_path / "edited_later.py").write_text(with_other + "# longer\n")
    check(module.Block(), NOT_RUNNING)


@pytest.mark.parametrize("value", ["1.0", "True", "-1"])
def test_constants_are_compared_with_their_types(tmp_path: Path, value: str) -> None:
    module = imported(tmp_path / f"constant_{value}.py", SOURCE)
    (tmp_path / f"constant_{value}.py").write_text(SOURCE.replace("* 1", f"* {value}"))
    check(module.Block(), NOT_RUNNING)


def test_swapped_code_is_not_the_source(tmp_path: Path) -> None:
    module = imported(tmp_path / "swapped.py", SOURCE)
    other = imported(tmp_path / "other.py", SOURCE.replace("* 1", "+ 100"))
    module.Block.forward.__code__ = other.Block.forward.__code__
    check(module.Block())
    code = module.Block.forward.__code__
    module.Block.forward.__code__ = code.replace(
        co_filename=module.Base.__init__.__code__.co_filename
    )
    check(module.Block(), NOT_RUNNING)


def test_instrumented_code_is_not_the_source(tmp_path: Path) -> None:
    """Code that an import hook has changed, as type checkers' hooks do, is not replaced."""
    path = tmp_path / "instrumented.py"
    path.write_text(SOURCE)
    seen: list[int] = []
    scope: dict[str, Any] = {"__name__": "instrumented", "seen": seen}
    changed = SOURCE.replace("return self", "seen.append(1); return self")
    exec(compile(changed, str(path), "exec"), scope)
    model = scope["Block"]()
    check(model, NOT_RUNNING)
    torchkiln.replace(model)
    seen.clear()
    model(torch.randn(2, 32))
    assert seen == [1]


def test_code_without_a_file_is_compared_with_the_lines_of_linecache() -> None:
    """The forward of a notebook's cell is replaced."""
    name = "<cell 1>"
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "cell"}
    exec(compile(SOURCE, name, "exec"), scope)
    check(scope["Block"]())
    del linecache.cache[name]
    check(scope["Block"]())  # this code was compared before
    text.PROVEN.clear()
    assert not [row for row in torchkiln.replace(scope["Block"]()).rows if row.kind == "residual"]


def test_the_source_is_read_once_for_all_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported(tmp_path / "many.py", SOURCE)
    calls: list[Any] = []
    parsed = text.parsed

    def counted(function: Any) -> Any:
        calls.append(function)
        return parsed(function)

    monkeypatch.setattr(text, "parsed", counted)
    model = nn.Sequential(*(module.Block() for _ in range(5)))
    assert sum(row.kind == "residual" for row in torchkiln.replace(model).changed) == 5
    assert len(calls) == 1


FORWARDS = {
    "private attribute": "return self.norm(x + self.mix(x)) * self.__scale()",
    "private global": "return self.norm(x + self.mix(x)) * __half",
    "private variable": "__y = self.norm(x + self.mix(x)); return __y * 1",
    "global of the same name": "return forward(self.norm(x + self.mix(x)))",
    "global with the name of the class": "return self.norm(x + self.mix(x)) * Block.two",
    "a string of several lines": 'return self.norm(x + self.mix(x)) * len("""\n    4\n""")',
}


@pytest.mark.parametrize("body", FORWARDS.values(), ids=FORWARDS)
def test_names_are_those_of_the_class(tmp_path: Path, body: str) -> None:
    source = SOURCE.replace("return self.norm(x + self.mix(x)) * 1", body) + (
        "\n    two = 2\n\n    def __scale(self):\n        return 3\n\n"
        "_Block__half = 0.5\n__half = 7\n\ndef forward(x):\n    return x * 5\n"
    )
    check(imported(tmp_path / "names.py", source).Block())


READERS = ("locals()", "vars()", "dir()", "eval('x')", "__import__('sys')._getframe().f_locals")


@pytest.mark.parametrize("reader", READERS)
def test_a_forward_that_reads_its_variables_stays(tmp_path: Path, reader: str) -> None:
    source = SOURCE.replace("* 1", f"* (len({reader}) and 1)")
    check(imported(tmp_path / "reader.py", source).Block(), BY_NAME)


def test_annotations_in_a_forward_are_computed_as_before(tmp_path: Path) -> None:
    """Annotations are evaluated: the new function has no ``from __future__ import annotations``."""
    source = SOURCE.replace(
        "return self.norm(x + self.mix(x)) * 1",
        "def inner(y: seen.append(1)): return y\n"
        "        inner.__annotations__\n"
        "        return inner(self.norm(x + self.mix(x)))",
    )
    module = imported(tmp_path / "annotated.py", source + "\nseen = []\n")
    model = module.Block()
    check(model)
    torchkiln.replace(model)
    module.seen.clear()
    model(torch.randn(2, 32))
    assert module.seen


def test_the_function_has_no_name_of_ours(tmp_path: Path) -> None:
    """Any name of a parameter works, and the module's globals do not change."""
    source = SOURCE.replace("self, x):", "self, x, *, module=None, original=None):")
    module = imported(tmp_path / "options.py", source)
    names = set(vars(module))
    model, x = module.Block(), torch.randn(2, 32)
    expected = model(x)
    torchkiln.replace(model)
    torch.testing.assert_close(model(x, module=3, original=4), expected)
    assert set(vars(module)) == names


REGISTRY: dict[str, type] = {}


class Recorded(nn.Module):
    """A base that records each subclass under an inherited key, as registries do."""

    key = "recorded"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        REGISTRY[cls.key] = cls


class Meta(abc.ABCMeta):
    """A metaclass that records each class."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, scope: Any, **options: Any) -> Any:
        """Record the name, and create the class."""
        cls.made.append(name)
        return super().__new__(cls, name, bases, scope, **options)

    def __init__(cls, name: str, *args: Any, **options: Any) -> None:
        super().__init__(name, *args, **options)
        cls.made.append(name)


class Block(Recorded, metaclass=Meta):
    """A block whose base and metaclass record its class."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.mix(x))
        return y


class Other(nn.Module, metaclass=Meta):
    """A second class with the metaclass."""


def test_registries_of_classes_do_not_see_ours() -> None:
    model = Block()
    before = dict(REGISTRY), list(Meta.made)
    report = torchkiln.replace(model)
    assert report[""].changed
    made = type(model)
    assert made is not Block
    assert made.__bases__ == (Block,)
    assert (REGISTRY, Meta.made) == before
    assert REGISTRY["recorded"] is Block
    # isinstance() of an abstract class reads a cache of the class.
    assert isinstance(model, Block)
    assert not isinstance(Block(), made)
    assert not isinstance(Other(), made)
    assert isinstance(Block(), Block)
    made.register(Other)
    assert not isinstance(Other(), Block.__mro__[1])
    report.undo()
    assert (REGISTRY, Meta.made) == before


def test_a_pickle_without_the_source_runs_the_forward_of_the_class(tmp_path: Path) -> None:
    module = imported(tmp_path / "unpickled.py", SOURCE)
    sys.modules["unpickled"] = module
    model, x = module.Block(), torch.randn(2, 32)
    expected = model(x)
    torchkiln.replace(model)
    data = pickle.dumps(model)
    (tmp_path / "unpickled.py").unlink()
    text.PROVEN.clear()
    linecache.clearcache()
    torchkiln.patch.plan.MADE.clear()
    with pytest.warns(UserWarning, match=r"torchkiln\.replace: Block: .*; call torchkiln\.replace"):
        loaded = pickle.loads(data)
    torch.testing.assert_close(loaded(x), expected)
    del sys.modules["unpickled"]
