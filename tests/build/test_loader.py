"""Errors of the loader, for imports with wrong build records, each in a new process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import torchkiln
from torchkiln import extend
from torchkiln._loader import minor, mismatch, missing_instructions, python_version
from torchkiln.typing import BuildInfo, TorchBuild

# A fake torch that ends the process when it is imported.
BROKEN_TORCH = """
import sys
raise SystemExit(f"torch was imported, _C is in {sys.modules['torchkiln'].__path__[-1]}")
"""


def torches(*versions: str, folder: str = ".") -> list[dict[str, str | None]]:
    """Entries of a build record, one per version of torch."""
    return [
        {"version": version, "cuda": "13.0", "folder": folder.format(minor(version))}
        for version in versions
    ]


ONE: dict[str, Any] = {"torches": torches("2.99.0")}
SEVERAL: dict[str, Any] = {"torches": torches("2.98.1", "2.99.0", "2.100.0", folder="torch{}")}


def run_python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new Python, in which the packages in the folder come first."""
    return subprocess.run(
        [sys.executable, *arguments, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )


def import_with(
    folder: Path, record: dict[str, Any], torch_version: str | None, torch_cuda: str | None = None
) -> str:
    """The error of importing a copy of the package with this record and a fake torch."""
    package = folder / "torchkiln"
    built = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    shutil.copytree(Path(torchkiln.__file__).parent, package, ignore=built)
    record = dict(torchkiln.build_info()) | record
    (package / "_build_info.json").write_text(json.dumps(record))
    if torch_version:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(BROKEN_TORCH)
        facts = f"__version__ = {torch_version!r}\ncuda = {torch_cuda!r}\n"
        (folder / "torch" / "version.py").write_text(facts)
    # -S leaves out site-packages, which has the real torch.
    done = run_python("import torchkiln", folder, "-S")
    assert done.returncode == 1, done
    return done.stderr


def test_instructions_that_the_processor_lacks(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma f16c bmi2 avx512f\n")
    lacks = {"avx512bw", "avx512vl", "avx512dq"}
    assert missing_instructions(["avx512"], facts) == lacks
    for built in (["baseline"], ["avx2"], ["baseline", "avx2", "avx512"], []):
        assert not missing_instructions(built, facts)
    assert not missing_instructions(["avx512"], tmp_path / "none")


def test_other_torch(tmp_path: Path) -> None:
    message = import_with(tmp_path, ONE, "2.98.1+cu130")
    assert f"ImportError: torchkiln {torchkiln.__version__} ({tmp_path}" in message
    assert "was built for torch 2.99.0, but found torch 2.98.1 (" in message
    assert f"{sys.executable} -m pip install 'torch==2.99.*'" in message
    assert "--no-build-isolation .     (in the folder with its sources)     to build it" in message
    assert f"{sys.executable} -m torchkiln_command doctor" in message


def test_no_torch(tmp_path: Path) -> None:
    message = import_with(tmp_path, ONE, None)
    assert f"was built for torch 2.99.0, but found no torch in {sys.executable}" in message
    assert "pip install 'torch==2.99.*'" in message


@pytest.mark.parametrize("version", ["2.97.9", "2.101.0", "3.99.0", "2.9.0", "2.9900.0"])
def test_none_of_several(tmp_path: Path, version: str) -> None:
    message = import_with(tmp_path, SEVERAL, f"{version}+cu130", "13.0")
    assert f"built for torch 2.98, 2.99 and 2.100, but found torch {version} (" in message
    assert "pip install 'torch>=2.98,<2.101'     to get one of those" in message
    assert "--no-build-isolation .     (in the folder with its sources)     to build it" in message


def test_other_cuda(tmp_path: Path) -> None:
    message = import_with(tmp_path, ONE | {"cuda": "13.0"}, "2.99.0", "12.6")
    assert "torch 2.99.0 with CUDA 13.0, but found torch 2.99.0 with CUDA 12.6 (" in message


def test_other_python(tmp_path: Path) -> None:
    message = import_with(tmp_path, {"python": "3.9"}, "2.99.0")
    assert "was built for Python 3.9, but found Python 3." in message
    assert sys.executable in message


def test_a_python_without_a_gil_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    flags = {"Py_GIL_DISABLED": 1}
    monkeypatch.setattr(sysconfig, "get_config_var", flags.get)
    found = mismatch(dict(torchkiln.build_info()) | {"python": python}, None)
    assert found is not None
    assert (found.built, found.here) == (f"Python {python}", f"Python {python}t ({sys.executable})")


def test_other_platform(tmp_path: Path) -> None:
    message = import_with(tmp_path, {"platform": "linux-riscv64"}, "2.99.0")
    assert "was built for linux-riscv64, but found linux-" in message


@pytest.mark.parametrize(
    ("version", "cuda", "record"),
    [
        ("2.99.0", "13.0", {"cuda": "13.0"}),
        ("2.99.1+cpu", None, {"cuda": None}),
        ("2.99.0+cu130", "13.0", {"cuda": None}),
        ("2.99.0+cpu", None, {"cuda": "13.0"}),
        ("2.99.0+cu132", "13.2", {"cuda": "13.0"}),
    ],
    ids=["same", "patch", "cpu-build", "cpu-torch", "newer-cuda"],
)
def test_goes_on(tmp_path: Path, version: str, cuda: str, record: dict[str, Any]) -> None:
    assert "torch was imported" in import_with(tmp_path, ONE | record, version, cuda)


@pytest.mark.parametrize("version", ["2.98.0", "2.99.3+cu132", "2.100.1.dev20990101"])
def test_one_of_several(tmp_path: Path, version: str) -> None:
    message = import_with(tmp_path, SEVERAL, version)
    assert f"_C is in {tmp_path}/torchkiln/torch{minor(version)}\n" in message


def test_not_built(tmp_path: Path) -> None:
    built = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    shutil.copytree(Path(torchkiln.__file__).parent, tmp_path / "torchkiln", ignore=built)
    message = run_python("import torchkiln", tmp_path, "-S").stderr
    assert "ImportError: torchkiln has not been built: found no _build_info.json in" in message
    assert f"{sys.executable} -m pip install --no-build-isolation ." in message


def test_record_of_this_build() -> None:
    record = torchkiln.build_info()
    assert record["version"] == torchkiln.__version__
    assert minor(torch.__version__) == minor(record["torch"])
    assert record["torch"] in [built["version"] for built in record["torches"]]
    assert record["python"] == python_version()
    assert (record["cuda"] is None) == (record["cuda_architectures"] == [])
    assert set(record) == set(BuildInfo.__annotations__)
    assert all(set(built) == set(TorchBuild.__annotations__) for built in record["torches"])
    record["torch"] = record["torches"][0]["version"] = "changed"
    assert torchkiln.build_info()["torch"] != "changed"
    assert torchkiln.build_info()["torches"][0]["version"] != "changed"


def test_package_for_cmake_is_there() -> None:
    assert Path(torchkiln.include_path(), "torchkiln", "version.h").is_file()
    config = Path(torchkiln.cmake_prefix_path) / "torchkiln" / "torchkilnConfig.cmake"
    assert config.is_file()


def test_a_package_built_for_another_torch(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "__init__.py"
    package.parent.mkdir()
    extend.require_torch(str(package))  # an editable install without a record
    record = package.with_name("_torch.txt")
    record.write_text(f"{minor(torch.__version__)}.9\n")
    extend.require_torch(str(package))
    record.write_text("2.3.1\n")
    words = r"mine \(.*mine\) was built for torch 2\.3\.1, but found torch .*\n.*'torch==2\.3\.\*'"
    with pytest.raises(ImportError, match=words):
        extend.require_torch(str(package))
