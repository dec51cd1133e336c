"""torchkiln.jit.extension: torch's build, our look-up and our lock."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from torchkiln import jit

pytestmark = pytest.mark.usefixtures("own_cache")

extension = import_module("torchkiln.jit.cpp_extension")  # a function has the same name


def test_what_torch_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension  # noqa: PLC0415

    asked: dict[str, Any] = {}
    monkeypatch.setattr(cpp_extension, "load", lambda **given: asked.update(given))
    (tmp_path / "a b.cpp").write_text("")
    jit.extension([tmp_path / "a b.cpp"], cxx_flags=["-DMINE"])
    assert asked["name"].startswith("a_b_")
    assert asked["extra_cflags"] == ["-O3", "-std=c++17", "-DMINE"]
    assert asked["with_cuda"] is False
    assert Path(asked["build_directory"]).is_dir()


def test_sources_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="sources: got none"):
        jit.extension([])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cpp, expected a file"):
        jit.extension(["nowhere.cpp"])


def toolkit(folder: Path, version: str, libraries: str) -> Path:
    """Something that says it is nvcc."""
    for name in ("bin", "include", "nvvm", libraries):
        (folder / name).mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    (folder / libraries / "libcudart.so.13").touch()
    return folder


def test_the_toolkit_has_torchs_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"got a \.cu file, but torch .* has no CUDA"):
        extension.cuda_home(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    other = toolkit(tmp_path / "other", "12.9", "lib64")
    monkeypatch.setattr(extension, "system_first", lambda: iter([other]))
    with pytest.raises(
        RuntimeError, match=r"nvcc: got 12\.9 in .*, expected 13\.0(.*\n)*.*cuda-tool"
    ):
        extension.cuda_home(tmp_path)
    system = toolkit(tmp_path / "system", "13.0", "lib64")
    monkeypatch.setattr(extension, "system_first", lambda: iter([other, system]))
    assert extension.cuda_home(tmp_path) == system
    packages = toolkit(tmp_path / "packages", "13.0", "lib")
    monkeypatch.setattr(extension, "system_first", lambda: iter([packages]))
    home = extension.cuda_home(tmp_path)
    assert (home / "lib64" / "libcudart.so").exists()
    assert (home / "bin" / "nvcc").exists()
    assert extension.cuda_home(tmp_path) == home


def test_a_killed_build_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from torchkiln.jit.cpp_extension import locked\n"
        "folder = Path(sys.argv[1])\n"
        "with locked(folder): (folder / 'lock').touch(); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -9
    assert (tmp_path / "lock").exists()  # which torch would wait for
    with extension.locked(tmp_path):
        assert not (tmp_path / "lock").exists()


def test_one_build_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with extension.locked(tmp_path):
            order.append("second")

    with extension.locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.cpp").touch()
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"cannot be made .* TORCHKILN_CACHE names another"):
        jit.extension([tmp_path / "a.cpp"])
