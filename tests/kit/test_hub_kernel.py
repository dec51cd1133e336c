"""``torchkiln new NAME --for hub`` writes a kernel that ``torchkiln check-hub DIR`` accepts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchkiln import hub
from torchkiln.cli import main
from torchkiln.hub_check import check_hub
from torchkiln.hub_check.binary import check_module
from torchkiln.new import write_hub_kernel
from torchkiln.new.template import PLACEHOLDER

NAME = "soft_gate"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder of a new kernel."""
    folder = tmp_path / "kernel"
    write_hub_kernel(NAME, folder)
    return folder


def test_a_new_kernel_is_complete(project: Path) -> None:
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert files == {
        ".gitignore",
        "CARD.md",
        "README.md",
        "benchmarks/benchmark.py",
        "build.toml",
        "build_local.py",
        "flake.nix",
        "soft_gate_cpu/soft_gate_cpu.cpp",
        "soft_gate_cuda/soft_gate.cu",
        "tests/test_soft_gate.py",
        "torch-ext/soft_gate/__init__.py",
        "torch-ext/soft_gate/layers.py",
        "torch-ext/torch_binding.cpp",
        "torch-ext/torch_binding.h",
    }
    for name in files:
        text = (project / name).read_text()
        assert not PLACEHOLDER.search(text.replace("PACKAGE", "")), name
    assert 'name = "soft-gate"' in (project / "build.toml").read_text()
    assert "class SoftGate(nn.Module)" in (project / "torch-ext/soft_gate/layers.py").read_text()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    assert main(["new", NAME, "--for", "hub", "--out", str(folder)]) == 0
    assert "python build_local.py" in capsys.readouterr().out
    assert main(["check-hub", str(folder)]) == 0
    assert capsys.readouterr().out == "0 problems in sources and 0 builds\n"
    (folder / "CARD.md").unlink()
    assert main(["check-hub", str(folder)]) == 1
    assert "CARD.md: expected this file beside build.toml" in capsys.readouterr().out
    assert main(["check-hub", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "torchkiln.check-hub/1"
    assert [problem["line"] for problem in found["problems"]] == [None]
    assert main(["check-hub", str(tmp_path)]) == 2
    assert "expected a folder with build.toml or build/VARIANT" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["new", NAME, "--for", "hub", "--op"])


def written(path: str, before: str, after: str) -> Callable[[Path], None]:
    """A function that replaces ``before`` by ``after`` in a file of the project."""

    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert before in text
        (folder / path).write_text(text.replace(before, after))

    return change


ENTRY, LAYERS = "torch-ext/soft_gate/__init__.py", "torch-ext/soft_gate/layers.py"
BINDING = "torch-ext/torch_binding.cpp"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (written("build.toml", "[general]", "[general"), "got no TOML"),
        (written("build.toml", '"soft-gate"', '"Soft_Gate"'), "general.name: got 'Soft_Gate'"),
        (written("build.toml", "version = 1", 'version = "1"'), "general.version: got '1'"),
        (written("build.toml", 'license = "Apache-2.0"', ""), "general.license: got none"),
        (written("build.toml", '"cuda"]', '"gpu"]'), "general.backends: got ['cpu', 'gpu']"),
        (written("build.toml", "soft_gate.cu", "other.cu"), "src: got 'soft_gate_cuda/other.cu'"),
        (
            written(BINDING, "IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU", "IMPL(mine, CPU"),
            "got ops in the namespace mine",
        ),
        (written(BINDING, "REGISTER_EXTENSION", "// "), "got no REGISTER_EXTENSION"),
        (written(ENTRY, "import torch\n", "import numpy\n"), "got import of numpy, expected torch"),
        (
            written(ENTRY, "from ._ops", "from soft_gate._ops"),
            "got import of soft_gate._ops, expected torch",
        ),
        (written(ENTRY, "from . import layers\n", ""), "got no `from . import layers`"),
        (
            written(ENTRY, 'add_op_namespace_prefix("soft_gate_backward")', '"x::y"'),
            "register_fake: got 'x::y', expected add_op_namespace_prefix(name)",
        ),
        (written(ENTRY, "x: torch.Tensor)", "x: torch.Tensor | None)"), "an annotation X | Y"),
        (
            written(ENTRY, "__all__", "match 1:\n    case 1:\n        pass\n__all__"),
            "got what Python 3.9 cannot parse",
        ),
        (
            written(LAYERS, "    has_backward = True", "    size = 3"),
            "SoftGate: got the variable size, expected a layer without a state",
        ),
        (
            written(LAYERS, "    def forward", "    size: int = 3\n\n    def forward"),
            "got the variable size",
        ),
        (written(LAYERS, "def forward", "def call"), "got the method call, expected only forward"),
        (lambda folder: shutil.rmtree(folder / "torch-ext" / NAME), "expected the Python package"),
    ],
)
def test_problems_of_sources(project: Path, change: Callable[[Path], None], words: str) -> None:
    change(project)
    assert any(words in str(problem) for problem in check_hub(project)), check_hub(project)


def test_annotations_are_fine_where_python_does_not_evaluate_them(project: Path) -> None:
    entry = project / ENTRY
    text = entry.read_text().replace("x: torch.Tensor)", "x: torch.Tensor | None)")
    entry.write_text("from __future__ import annotations\n" + text)
    assert check_hub(project) == []


def test_the_layers_of_the_package_are_a_local_kernel_only() -> None:
    problems = [str(problem) for problem in check_hub(hub.path())]
    assert len(problems) == 2
    assert all("got import of torchkiln.hub" in problem for problem in problems)


def test_problems_of_a_build(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "torch-stable-abi211-cu130-x86_64-linux"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    metadata = {"name": "a", "id": "_a_1", "version": 1, "license": "MIT"}
    metadata |= {"backend": {"type": "cuda"}}
    path = folder / "metadata.json"
    path.write_text(json.dumps(metadata))
    assert check_hub(tmp_path) == []
    bad = {"name": "A", "id": "1", "version": "1", "license": "", "backend": {"type": "gpu"}}
    for name, value in bad.items():
        path.write_text(json.dumps(metadata | {name: value}))
        (problem,) = check_hub(tmp_path)
        assert problem.words.startswith(name)
    path.write_text(json.dumps(metadata | {"digest": {"files": {"__init__.py": "x", "b.py": ""}}}))
    assert [p.words[:11] for p in check_hub(tmp_path)] == ["got SHA-256", "digest: got"]
    path.write_text("{")
    assert "got no JSON" in str(check_hub(tmp_path)[0])
    folder.rename(folder.with_name("linux"))
    assert "expected torch-BACKEND" in str(check_hub(tmp_path)[0])


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_problems_of_a_module(tmp_path: Path) -> None:
    text = tmp_path / "a.abi3.so"
    text.write_text("no library")
    assert "got no shared library" in str(next(check_module(text)))
    if shutil.which("cc") is None:
        pytest.skip("needs a compiler")
    source, module = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text("extern int _PyPrivate(void); int f(void) { return _PyPrivate(); }")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", module], check=True)
    words = " ".join(problem.words for problem in check_module(module))
    for expected in ("expected NAME.abi3.so", "got _PyPrivate", "got no PyInit_a"):
        assert expected in words


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(torch.version.cuda is not None, reason="would need nvcc")
def test_a_new_kernel_builds_and_passes_its_tests(project: Path) -> None:
    pytest.importorskip("kernels")
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    for words in (["build_local.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    # The only problem allowed is that a local build needs newer libraries than the hub allows.
    assert all("of manylinux_2_28" in problem.words for problem in check_hub(project))
