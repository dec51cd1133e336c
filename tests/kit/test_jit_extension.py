"""torchkiln.jit.extension: flags, search for a toolkit, and the lock of a build."""

from __future__ import annotations

import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import forked

from torchkiln import jit
from torchkiln.jit import cpp_extension

pytestmark = pytest.mark.usefixtures("own_cache")


def test_arguments_of_torchs_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension as torchs  # noqa: PLC0415  slow to import

    asked: dict[str, Any] = {}
    monkeypatch.setattr(torchs, "load", lambda **given: asked.update(given))
    (tmp_path / "a b.cpp").write_text("")
    jit.extension([tmp_path / "a b.cpp"], cxx_flags=["-DMINE"])
    assert asked["name"].startswith("a_b_")
    assert asked["extra_cflags"] == ["-O3", "-std=c++17", "-DMINE"]
    assert asked["with_cuda"] is False
    assert Path(asked["build_directory"]).is_dir()


def test_missing_sources() -> None:
    with pytest.raises(ValueError, match="sources: got none"):
        jit.extension([])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cpp, expected a file"):
        jit.extension(["nowhere.cpp"])


def toolkit(folder: Path, version: str, libraries: str) -> Path:
    """A fake toolkit: its nvcc prints this version."""
    for name in ("bin", "include", "nvvm", libraries):
        (folder / name).mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    (folder / libraries / "libcudart.so.13").touch()
    return folder


def test_the_toolkit_has_torchs_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"got a \.cu file, expected \.cpp .* no CUDA"):
        cpp_extension.cuda_home(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    other = toolkit(tmp_path / "other", "12.9", "lib64")
    monkeypatch.setattr(cpp_extension, "system_first", lambda: iter([other]))
    with pytest.raises(
        RuntimeError, match=r"nvcc: got 12\.9 in .*, expected 13\.0(.*\n)*.*cuda-tool"
    ):
        cpp_extension.cuda_home(tmp_path)
    system = toolkit(tmp_path / "system", "13.0", "lib64")
    monkeypatch.setattr(cpp_extension, "system_first", lambda: iter([other, system]))
    assert cpp_extension.cuda_home(tmp_path) == system
    packages = toolkit(tmp_path / "packages", "13.0", "lib")
    monkeypatch.setattr(cpp_extension, "system_first", lambda: iter([packages]))
    home = cpp_extension.cuda_home(tmp_path)
    assert (home / "lib64" / "libcudart.so").exists()
    assert (home / "bin" / "nvcc").exists()
    assert cpp_extension.cuda_home(tmp_path) == home


def test_a_killed_build_blocks_no_other(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from torchkiln.jit.cpp_extension import locked\n"
        "folder = Path(sys.argv[1])\n"
        "with locked(folder): (folder / 'lock').touch(); os.kill(os.getpid(), 9)"
    )
    assert forked(code, tmp_path).returncode == -9
    assert (tmp_path / "lock").exists()  # torch's own lock would wait for this file
    with cpp_extension.locked(tmp_path):
        assert not (tmp_path / "lock").exists()


def test_one_build_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with cpp_extension.locked(tmp_path):
            order.append("second")

    with cpp_extension.locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_folder_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.cpp").touch()
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"expected a folder .*set TORCHKILN_CACHE"):
        jit.extension([tmp_path / "a.cpp"])


@pytest.mark.parametrize("name", ["../../../x", "a b", 'a"b', "a\nb", "é", "1a", "/nowhere/x"])
def test_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.cpp").touch()
    with pytest.raises(ValueError, match=r"extension: name: got .*, expected a Python identifier"):
        jit.extension([tmp_path / "a.cpp"], name=name)
    assert [path.name for path in tmp_path.iterdir()] == ["a.cpp"]


def test_machines_and_pythons_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension as torchs  # noqa: PLC0415  slow to import

    folders: list[str] = []
    monkeypatch.setattr(torchs, "load", lambda **given: folders.append(given["build_directory"]))
    (tmp_path / "a.cpp").touch()
    for abi in ("cpython-313-x86_64-linux-gnu", "cpython-313t-x86_64-linux-gnu", "other"):
        monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": abi}.get)
        jit.extension([tmp_path / "a.cpp"])
    assert len(set(folders)) == 3
