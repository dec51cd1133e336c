"""The cache of torchkiln.jit compiles again after a change of anything that the compiler reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jit_variations import KERNEL, VARIATIONS, Call, Variation, write

from torchkiln import jit
from torchkiln.jit.compile import cache, nvrtc, toolkit
from torchkiln.jit.compile.build import build
from torchkiln.jit.compile.cache import Binary
from torchkiln.jit.compile.reload import Files

pytestmark = pytest.mark.usefixtures("own_cache")
PARTS = 12


def compiled(call: Call, folder: Path, patch: pytest.MonkeyPatch) -> Binary:
    """The machine code of a compilation, from the cache or the compiler."""
    for name in ("NVRTC_APPEND_FLAGS", "NVRTCWIZ"):
        patch.delenv(name, raising=False)
    for name, value in call.environment.items():
        patch.setenv(name, value)
    here = str(folder)
    return build(
        call.source.replace("{folder}", here),
        call.path if call.path == "inline.cu" else f"{here}/{call.path}",
        call.names,
        architecture=call.architecture,
        include=[Path(name) for name in call.include],
        options=[option.replace("{folder}", here) for option in call.options],
    )


def prepare(variation: Variation, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Writes the files of a variation, and changes into their folder."""
    files = {k: v.replace(b"{folder}", str(folder).encode()) for k, v in variation.files.items()}
    (folder / "source").mkdir(parents=True)
    write(folder, files, variation.links)
    patch.chdir(folder)


def change(variation: Variation, folder: Path) -> Call:
    """Changes the files; returns the second compilation."""
    write(folder, variation.change, variation.relinked)
    return variation.after or variation.call


def test_there_are_500_variations() -> None:
    labels = [variation.label for variation in VARIATIONS]
    assert len(set(labels)) == len(labels) >= 500


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A fake toolkit of empty files, and a fake compiler; returns the list of its calls."""
    cuda = tmp_path / "cuda"
    names = ("lib/libnvrtc.so.13", "include/cuda_fp16.h", "include/crt/deep.h", "include/cub/c.h")
    write(cuda, dict.fromkeys(names, b""), {})
    found = toolkit.Toolkit(cuda / names[0], (cuda / "include",))
    calls: list[int] = []

    def compile_program(*_: Any) -> tuple[bytes, dict[str, str]]:
        calls.append(1)
        return b"code %d" % len(calls), {"k": "k"}

    monkeypatch.setattr(toolkit, "find", lambda: found)
    monkeypatch.setattr(nvrtc, "compile_program", compile_program)
    return calls


@pytest.mark.parametrize("part", range(PARTS))
def test_a_change_is_a_new_entry(
    stand_in: list[int], part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = 0
    for i, variation in enumerate(VARIATIONS[part::PARTS]):
        folder = tmp_path / str(i)
        prepare(variation, folder, monkeypatch)
        first = compiled(variation.call, folder, monkeypatch)
        cached += compiled(variation.call, folder, monkeypatch) == first
        last = len(stand_in)
        compiled(change(variation, folder), folder, monkeypatch)
        assert len(stand_in) == last + 1, variation.label
    assert cached > 0.6 * len(VARIATIONS) / PARTS


@pytest.mark.rotates("part", PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_code_is_that_of_an_empty_cache(
    nvrtc: toolkit.Toolkit, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change gives other code, which equals the code compiled with an empty cache."""
    del nvrtc
    read_by_all = [
        v for v in VARIATIONS if not {**v.call.environment, **(v.after or v.call).environment}
    ]
    for i, variation in enumerate(read_by_all[part::PARTS]):
        folder = tmp_path / str(i)
        prepare(variation, folder, monkeypatch)
        first = compiled(variation.call, folder, monkeypatch)
        call = change(variation, folder)
        second = compiled(call, folder, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setenv("TORCHKILN_CACHE", str(folder / "empty"))
            fresh = compiled(call, folder, patch)
        assert second == fresh != first, variation.label


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("lib/libnvrtc.so.13", ""),
        ("include/cuda_fp16.h", ""),
        ("include/crt/deep.h", ""),
        ("include/cub/c.h", "#include <cub/c.h>"),
    ],
)
def test_cudas_files_in_place(
    stand_in: list[int], tmp_path: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(source=source + KERNEL)
    compiled(call, tmp_path, monkeypatch)
    compiled(call, tmp_path, monkeypatch)
    assert len(stand_in) == 1
    os.utime(tmp_path / "cuda" / name, ns=(1, 1))
    compiled(call, tmp_path, monkeypatch)
    (tmp_path / "cuda" / name).write_text("longer")
    compiled(call, tmp_path, monkeypatch)
    assert len(stand_in) == 3


@pytest.mark.parametrize(
    "source",
    [
        "__device__ const char* now = __DATE__;",
        "__device__ const char* now = __TI\\\nME__;",
        "#include_next <cuda_fp16.h>",
    ],
)
def test_a_source_that_only_a_compiler_can_read_is_not_stored(
    stand_in: list[int], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(source=source + KERNEL)
    for _ in range(3):
        compiled(call, tmp_path, monkeypatch)
    assert len(stand_in) == 3
    assert not cache.folder().exists()


def test_a_source_without_a_file_has_no_folder(
    nvrtc: toolkit.Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source without a file does not find headers in the working folder, in either spelling."""
    del nvrtc
    write(tmp_path, {"z.h": b"#define VAL 1", "torchkiln/device/vec.cuh": b"#error\n"}, {})
    monkeypatch.chdir(tmp_path)
    for form in ('"z.h"', "<z.h>"):
        message = r'^torchkiln.jit: inline.cu: .*\ninline.cu\(1\): .* open source file "z.h"'
        with pytest.raises(jit.CompileError, match=message) as caught:
            jit.inline(f"#include {form}{KERNEL}")
        assert "/dev/null" not in str(caught.value)
    jit.inline('#include <torchkiln/device/vec.cuh>\n#include "torchkiln/device/vec.cuh"\n')


def test_the_folder_of_a_source_is_last(nvrtc: toolkit.Toolkit, tmp_path: Path) -> None:
    del nvrtc
    wrong = dict.fromkeys(("torchkiln/device/vec.cuh", "cuda_fp16.h"), b"#error wrong\n")
    source = b"#include <torchkiln/device/vec.cuh>\n#include <cuda_fp16.h>\n#include <own.h>\n"
    write(tmp_path, {**wrong, "own.h": b"", "my.cu": source}, {})
    jit.load(tmp_path / "my.cu")


def test_reload_watches_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, variation in enumerate(VARIATIONS):
        folder = tmp_path / str(i)
        call = variation.call
        is_local = not call.environment and call.path != "inline.cu" and variation.change
        if not is_local or "macro" in variation.label or "trigraph" in variation.label:
            continue
        prepare(variation, folder, monkeypatch)
        source = folder / call.path
        source.write_text(call.source.replace("{folder}", str(folder)), newline="")
        options = [option.replace("{folder}", str(folder)) for option in call.options]
        files = Files(source, [Path(name) for name in call.include], options)
        if len(files.names) == 1:
            assert variation.label.startswith(("-DNAME", "has_include"))
            continue
        change(variation, folder)
        assert files.changed(closely=True), variation.label
