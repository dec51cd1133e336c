"""torchkiln.jit.load(reload=True): the next launch runs the saved file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torchkiln import jit
from torchkiln.jit.compile import driver, reload
from torchkiln.jit.compile.cache import Binary
from torchkiln.jit.compile.reload import UNSETTLED_NANOSECONDS, Files

pytestmark = pytest.mark.usefixtures("own_cache")

ADD = '#include "by.h"\n__global__ void add(float* x) { x[threadIdx.x] += kBy; }\n'


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A kernel and its header, saved ten seconds ago."""
    for name, text in (("by.h", "constexpr float kBy = 1;\n"), ("my.cu", ADD)):
        save(tmp_path / name, text, ago=10)
    return tmp_path / "my.cu"


def save(path: Path, text: str, *, ago: float = 0) -> None:
    """Writes a file with a modification time ``seconds`` in the past."""
    path.write_text(text)
    if ago:
        then = time.time() - ago
        os.utime(path, (then, then))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fake compiler: returns the list of compiled sources, and rejects those with "wrong"."""
    sources: list[str] = []

    def build(source: str, path: str, names: Any, **_: Any) -> Binary:
        sources.append(source)
        if "wrong" in source:
            raise jit.CompileError(f"{path}(1): error: wrong")
        return Binary(source.encode(), {name: name for name in names})

    monkeypatch.setattr("torchkiln.jit.compile.code.build", build)
    return sources


def test_a_save_is_compiled_at_the_next_launch(saved: Path, compiled: list[str]) -> None:
    module = jit.load(saved, reload=True)
    kernel = module.add
    assert len(compiled) == 1
    before = kernel.instance()
    assert kernel.instance() is before
    save(saved, ADD.replace("float* x", "double* x, int n"))
    assert [str(p) for p in kernel.instance().signature.parameters] == ["double* x", "int n"]
    assert b"double" in kernel.instance().code.binary("sm_75", "add").code
    assert len(compiled) == 3  # by load, for the save, and for sm_75
    with pytest.raises(TypeError, match=r"got 1 argument, expected 2: add\(double\* x, int n\)"):
        kernel[1, 32](torch.ones(2))
    assert jit.load(saved).source == module.source


def test_without_reload_a_module_does_not_change(saved: Path, compiled: list[str]) -> None:
    module = jit.load(saved)
    save(saved, "__global__ void wrong() {}")
    assert module.add.instance().code.source == ADD
    assert len(compiled) == 1


def test_a_saved_header_is_compiled(saved: Path, compiled: list[str]) -> None:
    module = jit.load(saved, reload=True)
    before = module.code()
    save(saved.with_name("by.h"), '#include "more.h"\n')
    save(saved.with_name("more.h"), "constexpr float kBy = 2;\n")
    middle = module.code()
    assert middle is not before
    save(saved.with_name("more.h"), "constexpr float kBy = 3;\n")
    assert module.code() is not middle
    assert len(compiled) == 3


def test_the_same_text_is_not_compiled_again(saved: Path, compiled: list[str]) -> None:
    module = jit.load(saved, reload=True)
    kernel = module.add
    before = kernel.instance()
    os.utime(saved)
    assert kernel.instance() is before
    assert len(compiled) == 1


def test_a_broken_save_is_an_error_until_the_next(saved: Path, compiled: list[str]) -> None:
    module = jit.load(saved, reload=True)
    kernel = module.add
    save(saved, "wrong")
    for _ in range(3):
        with pytest.raises(jit.CompileError, match=r"my\.cu\(1\): error: wrong"):
            kernel[1, 32](torch.ones(2))
    assert len(compiled) == 2  # the broken version is compiled once
    save(saved, ADD + "// repaired\n")
    assert kernel.instance().code.source.endswith("// repaired\n")


def test_a_missing_header_that_comes_back(
    saved: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "GONE_SECONDS", 0.02)
    kernel = jit.load(saved, reload=True).add
    save(saved, '#include "wrong.h"\n' + ADD, ago=5)
    for _ in range(2):
        with pytest.raises(jit.CompileError):
            kernel.instance()
    compiled.clear()
    monkeypatch.setattr("torchkiln.jit.compile.code.build", lambda *_, **__: Binary(b"new", {}))
    save(saved.with_name("wrong.h"), "", ago=100)  # an older time, but the text is new
    assert kernel.instance().code.binary("sm_80").code == b"new"


def test_a_half_written_file_is_read_again(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is saved again while it compiles is compiled again."""

    def build(source: str, *_: Any, **__: Any) -> Binary:
        if "half" in source:
            save(saved, ADD + "// whole\n")
            raise jit.CompileError("half")
        return Binary(source.encode(), {"add": "add"})

    monkeypatch.setattr("torchkiln.jit.compile.code.build", build)
    kernel = jit.load(saved, reload=True).add
    save(saved, "half")
    assert kernel.instance().code.source.endswith("// whole\n")


def test_a_removed_kernel(saved: Path, compiled: list[str]) -> None:
    module = jit.load(saved, reload=True)
    kernel = module.add
    save(saved, ADD.replace("add", "sub"))
    with pytest.raises(AttributeError, match="got kernel 'add', expected one of sub"):
        kernel.instance()
    assert module.sub.signature.name == "sub"
    save(saved, ADD)
    assert kernel.instance().signature.name == "add"
    assert len(compiled) == 3


def test_a_replaced_file(saved: Path, compiled: list[str]) -> None:
    """A file replaced by another of the same size and time, as most editors save, is compiled."""
    kernel = jit.load(saved, reload=True).add
    facts = saved.stat()
    other = saved.with_name("my.cu~")
    save(other, ADD.replace("+=", "-="))
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert other.stat().st_size == facts.st_size
    other.replace(saved)
    assert "-=" in kernel.instance().code.source
    assert len(compiled) == 2


def test_a_file_that_is_missing_for_a_moment(
    saved: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = jit.load(saved, reload=True).add
    monkeypatch.setattr(reload, "GONE_SECONDS", 20)
    for begin in (saved.unlink, lambda: saved.write_text("")):
        begin()
        text = ADD + f"// {begin}\n"
        later = threading.Timer(0.05, save, (saved, text))
        later.start()
        assert kernel.instance().code.source == text
        later.join()
    monkeypatch.setattr(reload, "GONE_SECONDS", 0.02)
    saved.unlink()
    with pytest.raises(FileNotFoundError, match=r"my\.cu cannot be read .* tries again"):
        kernel.instance()
    save(saved, ADD)
    assert kernel.instance().code.source == ADD
    assert "" not in compiled


def test_a_second_save_within_the_same_tick(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within the resolution of the file's time is found by comparing the text."""

    def changed_again() -> bool:
        files = Files(saved)
        for text in ("1.0", "2.0"):
            saved.write_text(ADD.replace("kBy", text))
            os.utime(saved, (then, then))
            changed = files.changed()
        assert not files.changed()
        return changed

    then = time.time() - 2
    assert UNSETTLED_NANOSECONDS < 1e9
    assert not changed_again()  # after two seconds the text is not compared
    monkeypatch.setattr(reload, "UNSETTLED_NANOSECONDS", 60 * 10**9)
    assert changed_again()


def test_unchanged_files_are_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(saved)
    assert [Path(name).name for name in files.names] == ["my.cu", "by.h"]  # no headers of torchkiln

    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("read")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert not files.changed()
    with pytest.raises(AssertionError, match="read"):
        files.changed(closely=True)


def test_a_capture_keeps_the_kernel(
    saved: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = jit.load(saved, reload=True).add
    save(saved, "wrong")
    with monkeypatch.context() as patch:
        patch.setattr(driver, "capturing", lambda: True)
        assert kernel.instance().code.source == ADD
    with pytest.raises(jit.CompileError):
        kernel.instance()
    assert len(compiled) == 2


def test_with_the_compiler(nvrtc: object, saved: Path) -> None:
    del nvrtc
    module = jit.load(saved, reload=True)
    first = module.binary("sm_80").code
    save(saved.with_name("by.h"), "constexpr float kBy = 2;\n")
    second = module.binary("sm_80").code
    assert second not in (first, b"")
    save(saved, "\n" + ADD.replace("kBy", "kNone"))
    with pytest.raises(jit.CompileError, match=r'my\.cu\(3\): error: identifier "kNone"'):
        module.binary("sm_80")
    save(saved, ADD)
    assert module.binary("sm_80").code == second


def test_a_header_saved_during_compilation_is_not_cached(
    nvrtc: object, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del nvrtc
    from torchkiln.jit.compile import nvrtc as compiler  # noqa: PLC0415

    compile_program, header = compiler.compile_program, saved.with_name("by.h")
    old = header.read_text()

    def saves_first(*given: Any) -> Any:
        header.write_text("constexpr float kBy = 5;\n")
        return compile_program(*given)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_program", saves_first)
        five = jit.load(saved).binary("sm_80").code
    header.write_text(old)
    assert jit.load(saved).binary("sm_80").code != five


@pytest.mark.cuda
def test_launches_on_a_gpu(saved: Path) -> None:
    module = jit.load(saved, reload=True)
    kernel, x = module.add, torch.zeros(32, device="cuda")
    kernel[1, 32](x)
    save(saved.with_name("by.h"), "constexpr float kBy = 10;\n")
    kernel[1, 32](x)
    assert x.tolist() == [11.0] * 32
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        save(saved.with_name("by.h"), "constexpr float kBy = 100;\n")
        kernel[1, 32](x)
    graph.replay()
    assert x.tolist() == [21.0] * 32
    kernel[1, 32](x)
    graph.replay()
    assert x.tolist() == [131.0] * 32
    save(saved, "__global__ void add(float* x) { wrong; }")
    with pytest.raises(jit.CompileError, match=r"my\.cu\(1\): error"):
        kernel[1, 32](x)
    save(saved, "__global__ void add(float* x, float by) { x[threadIdx.x] *= by; }")
    kernel[1, 32](x, 2.0)
    assert x.tolist() == [262.0] * 32
