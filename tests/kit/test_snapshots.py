"""Snapshots of the public interface, which docs/stability.md promises, in tests/data/*.txt.

``python tests/kit/test_snapshots.py`` writes the files; a reviewer reads the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchkiln
from torchkiln import bench
from torchkiln.bench.clock import Times
from torchkiln.bench.comparison import Comparison
from torchkiln.bench.fuzz import Run, Timed
from torchkiln.bench.result import Skipped
from torchkiln.cli import COMMANDS, main
from torchkiln.cli.status import Status
from torchkiln.demo.accuracy import Errors
from torchkiln.demo.results import Results
from torchkiln.demo.train import train_both
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.report import examine
from torchkiln.hub_check import Problem
from torchkiln.hub_check.__main__ import Result
from torchkiln.judge import Verdict
from torchkiln.testing import SPECS, Outcome
from torchkiln.testing.contract.compiler import exported
from torchkiln.testing.environment import environment
from torchkiln.testing.result import write
from torchkiln.testing.validation import with_forms

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")
MODULES = ("torchkiln", "torchkiln.nn", *sorted(f"torchkiln.{n}" for n in torchkiln.SUBMODULES))

EXPERIMENTAL = {f"torchkiln.{name}" for name in ("bench", "distributed", "hub", "judge", "profile")}

SIZES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Linear", "LinearFP8", "MLP", "SparseLinear"), (4, 6)),
    **dict.fromkeys(("LinearCrossEntropyLoss", "LinearLogprob", "LinearKL"), (4, 6)),
    **dict.fromkeys(("ConvBNAct1d", "ConvBNAct2d", "ConvBNAct3d"), (2, 3, 1)),
    **dict.fromkeys(("TransformerEncoderLayer", "TransformerDecoderLayer"), (8, 2)),
    **dict.fromkeys(("TransformerBlock", "Attention", "MultiheadAttention"), (8, 2)),
    **dict.fromkeys(("GELU", "ReLU", "ReLU2", "SiLU", "Sigmoid", "Tanh", "QuickGELU"), ()),
    **dict.fromkeys(("SwiGLU", "GEGLU", "DropoutAdd", "CrossEntropyLoss", "Logprob"), ()),
    "GatedMLP": (4, 6),
    "GroupNorm": (2, 4),
    "KVCache": (1, 4, 2, 8),
}
"""Constructor arguments of modules that need more than one size."""


def names() -> Iterator[str]:
    """The names in ``__all__`` of each public module."""
    for module in MODULES:
        yield module
        yield from (f"  {name}" for name in sorted(importlib.import_module(module).__all__))


def signature(thing: Any) -> str:
    """Names and defaults of the parameters, without annotations."""
    found = inspect.signature(thing)
    plain = [
        p.replace(
            annotation=p.empty, default=p.default if is_plain(p.default) else Named(p.default)
        )
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


class Named:
    """A default that is shown as the name of the object."""

    def __init__(self, value: Any) -> None:
        self.name = getattr(value, "__name__", str(value))

    def __repr__(self) -> str:
        return self.name


def is_plain(value: Any) -> bool:
    """Whether repr() of a default is the same in each run."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value in (None, inspect.Parameter.empty) or type(value) in (bool, int, float, str)


def signatures() -> Iterator[str]:
    """Signatures of public functions, constructors and forwards, except of experimental modules."""
    for module in (name for name in MODULES if name not in EXPERIMENTAL):
        for name in sorted(importlib.import_module(module).__all__):
            thing = getattr(importlib.import_module(module), name)
            if inspect.isclass(thing) and issubclass(thing, nn.Module):
                yield f"{module}.{name}{signature(thing)}"
                if thing.forward is not nn.Module.forward:
                    yield f"{module}.{name}.forward{signature(thing.forward)}"
            elif inspect.isfunction(thing):
                yield f"{module}.{name}{signature(thing)}"
    yield f"torchkiln.replace{signature(torchkiln.replace)}"
    yield f"torchkiln.replace.register{signature(torchkiln.replace.register)}"
    yield f"torchkiln.replace.unregister{signature(torchkiln.replace.unregister)}"


def members() -> Iterator[str]:
    """Fields and methods of public classes that are not nn.Modules, and of reports."""
    made = (torchkiln.replace(nn.Identity()), torchkiln.explain("relu", torch.ones(1)))
    classes: dict[type[Any], set[str]] = {type(one): set(vars(one)) for one in made}
    for module in (name for name in MODULES if name not in EXPERIMENTAL):
        for thing in (getattr(import_module(module), n) for n in import_module(module).__all__):
            if inspect.isclass(thing) and not issubclass(thing, nn.Module):
                classes.setdefault(thing, set())
    for cls in sorted(classes, key=lambda one: f"{one.__module__}.{one.__qualname__}"):
        yield cls.__qualname__
        own = [base for base in cls.__mro__ if base.__module__.startswith("torchkiln")]
        found = {n for base in own for n in (*vars(base), *vars(base).get("__annotations__", ()))}
        for name in sorted(name for name in found | classes[cls] if not name.startswith("_")):
            value = inspect.getattr_static(cls, name, None)
            yield f"  {name}{signature(value) if inspect.isfunction(value) else ''}"


def schemas() -> Iterator[str]:
    """Schemas of all ops in torch.ops.torchkiln."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("torchkiln::"):
            op, _, overload = name.partition(".")
            yield str(torch._C._get_schema(op, overload))


def exported_helpers() -> Iterator[str]:
    """Names of all helper ops in exported graphs of the public ops."""
    found = set()
    for spec in with_forms(SPECS):
        if "export" not in spec.excluded and "cpu" in spec.devices:
            program = exported(spec, spec.typical(CPU, torch.float32))
            found |= {
                str(node.target) for node in program.graph.nodes if node.op == "call_function"
            }
    yield from sorted(name for name in found if name.startswith("torchkiln._"))


def state() -> Iterator[str]:
    """The keys of each module's state_dict."""
    for name in sorted(torchkiln.nn.__all__):
        keys = list(getattr(torchkiln.nn, name)(*SIZES.get(name, (8,))).state_dict())
        yield f"{name}: {', '.join(keys) or '-'}"


class Parsed(Exception):  # noqa: N818
    """Carries a command's parser out of the command."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that a command creates."""

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Parsed(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        command = COMMANDS[name]
        try:
            (command.parser or import_module(command.module).main)([])
        except Parsed as found:
            parser: argparse.ArgumentParser = found.args[0]
            return parser
    raise AssertionError(f"{name} parses nothing")


def command_line() -> Iterator[str]:
    """Each command with its flags, and the exit statuses."""
    for name in COMMANDS:
        yield name
        for action in parser_of(name)._actions:
            words = ", ".join(action.option_strings) or str(action.dest)
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            choices = f" of {', '.join(map(str, action.choices))}" if action.choices else ""
            many = f" ({action.nargs})" if action.nargs else ""
            yield f"  {words}{value if action.option_strings else ''}{many}{choices}"
    yield "exit status"
    for status in Status:
        yield f"  {status.name}: {status.value}"
    for given in ([], ["--help"], ["nonsense"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield f"  torchkiln {' '.join(given)}: {main(given)}"


def outline(value: Any, place: str = "", depth: int = 4) -> Iterator[str]:
    """A line per object of JSON: its path, and its keys; lists have [] behind their key."""
    if isinstance(value, (list, tuple)) and value and depth:
        yield from outline(value[0], f"{place}[]", depth - 1)
    if isinstance(value, dict) and depth:
        keys = [f"{k}[]" if isinstance(v, (list, tuple)) else k for k, v in value.items()]
        yield f"  {place or 'all'}: {', '.join(keys) or 'empty'}"
        for key, item in value.items():
            yield from outline(item, f"{place}.{key}".lstrip("."), depth - 1)


def reports() -> Iterator[str]:
    """Outlines of the JSON of each kind of report."""
    found = [torchkiln.replace(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))).as_dict()]
    found.append(torchkiln.explain("relu", torch.ones(8)).as_dict())
    times = Times(1.0, 0.9, 1.1, 3)
    here = environment(CPU)
    row = bench.Measurement(
        *("calls", "relu", "a variant", "float32", (1, 1), "forward", 1, 8, 1),
        {"torchkiln": times, "eager": times},
        references={"copy": times},
        missing={"apex": "a reason"},
        remarks={"quack": "a remark"},
        peaks={"torchkiln": 8},
    )
    skipped = Skipped("calls", "relu", "float32", None, None, "a reason")
    found.append(bench.Record(here, (row,), (skipped,)).as_dict())
    found.append(Comparison(here, ("a", "b"), (times, times), 8, 1.0).as_dict())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        write([Outcome("relu", "values", "cpu", "float32", "passed", "", 0.1)], {}, path)
        found.append(json.loads(path.read_text()))
        words = ["profile", "relu", "--device=cpu", "--shape=8x8", f"--json={path}"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(words) == 0
        found.append(json.loads(path.read_text()))
    found.append(
        Run(here, [Timed("1:0", "relu", "", "", "", 1, 1.0, 1.0, None, None, "")]).as_dict()
    )
    found.append(Result(True, ("variant",), (Problem(Path("file"), "words"),)).as_dict())
    verdict = Verdict("candidate.py", "reference", "cpu", void=["words"], answers={"right": "yes"})
    verdict.add("cached result", "words")
    verdict.seconds["candidate"] = 1.0
    found.append(verdict.as_dict())
    error = Errors("relu", torch.float32, "forward", 1.0, 1.0, 1, None)
    *_, trained = train_both(CPU, 2)
    found.append(Results(here, (error,), (row,), (skipped,), trained, None).as_dict())
    for report in found:
        yield report["schema"]
        yield from outline(report)
    doctor = examine(Environment.here()).as_dict()
    yield doctor["schema"]
    yield json.dumps(list(doctor))


SNAPSHOTS: dict[str, Callable[[], Iterator[str]]] = {
    "names": names,
    "signatures": signatures,
    "members": members,
    "schemas": schemas,
    "exported": exported_helpers,
    "state_dict": state,
    "command_line": command_line,
    "json": reports,
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_nothing_has_changed(name: str) -> None:
    """After an intended change, write the file again and tell users in CHANGELOG.md."""
    path = DATA / f"{name}.txt"
    kept = path.read_text(encoding="utf-8").splitlines()
    found = "\n".join(SNAPSHOTS[name]()).splitlines()
    changes = list(difflib.unified_diff(kept, found, path.name, "now", lineterm="", n=0))
    assert not changes, "\n".join([*changes, f"to accept it: python {Path(__file__).name}"])


if __name__ == "__main__":
    for snapshot in sys.argv[1:] or SNAPSHOTS:
        text = "\n".join([*SNAPSHOTS[snapshot](), ""])
        (DATA / f"{snapshot}.txt").write_text(text, encoding="utf-8")
