"""torchkiln.jit with NVRTC: its cache, compile errors, and processes that compile concurrently."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import forked

from torchkiln import jit
from torchkiln.jit.compile import cache, toolkit
from torchkiln.jit.compile.build import architecture_of

pytestmark = pytest.mark.usefixtures("own_cache")

KERNELS = """
#include <torchkiln/core/functors.h>
#include "beside.h"

template <class T>
__global__ void scale(const T* x, T* y, long long n, float by) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = (T)((float)x[i] * by + kShift);
}
__global__ void relu(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = torchkiln::Relu::value<torchkiln::ExactMath>(x[i]);
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of kernels that includes a header in the same folder."""
    (tmp_path / "beside.h").write_text("constexpr float kShift = 1.0f;\n")
    (tmp_path / "my.cu").write_text(KERNELS)
    return tmp_path / "my.cu"


def test_compiled_code_is_cached(
    nvrtc: toolkit.Toolkit, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del nvrtc
    module = jit.load(source)
    first = module.binary("sm_90", "scale<float>")
    assert first.code.startswith(b"\x7fELF")
    assert "scale" in first.names["scale<float>"]

    def refuse(*_: Any) -> Any:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr("torchkiln.jit.compile.nvrtc.compile_program", refuse)
        assert jit.load(source).binary("sm_90", "scale<float>") == first
        with pytest.raises(AssertionError, match="compiled again"):
            jit.load(source).binary("sm_80", "scale<float>")
        source.with_name("beside.h").write_text("constexpr float kShift = 2.0f;\n")
        with pytest.raises(AssertionError, match="compiled again"):
            jit.load(source)
    assert jit.load(source).binary("sm_90", "scale<float>").code != first.code


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n__global__ void k() { wrong; }", r'my\.cu\(3\): error: identifier "wrong"'),
        ("__global__ void k(int n\n{ }", r'my\.cu\(2\): error: expected a "\)"'),
        ("__global__ void k() {", r'error: expected a "}"'),
        ("__global__ void (int n) {}", r"my\.cu\(1\): error: expected an identifier"),
        ("__global__ int k() {}", r"my\.cu\(1\): error: a __global__ function must"),
        ('#include "gone.h"\n', r'my\.cu\(1\): .* cannot open source file "gone\.h"'),
        ("#include <torch/extension.h>\n", r"use torchkiln\.jit\.extension"),
        ("#include <iostream>\n", r"use torchkiln\.jit\.extension"),
        (
            "__global__ void k() {}\nvoid f() { k<<<1, 1>>>(); }",
            r"my\.cu\(2\): error: .*(\n.*)*use torchkiln\.jit\.extension",
        ),
        ("void f() { cudaDeviceSynchronize(); }", r"use torchkiln\.jit\.extension"),
        ("at::Tensor f();", r"use torchkiln\.jit\.extension"),
    ],
)
def test_compile_errors(nvrtc: toolkit.Toolkit, tmp_path: Path, source: str, message: str) -> None:
    del nvrtc
    (tmp_path / "my.cu").write_text(source)
    with pytest.raises(jit.CompileError, match=message) as caught:
        jit.load(tmp_path / "my.cu")
    assert "__nv_name_map" not in str(caught.value)  # NVRTC adds these errors to the first one


def test_a_killed_process_blocks_no_other(nvrtc: toolkit.Toolkit, source: Path) -> None:
    del nvrtc
    code = (
        "import os, sys; from torchkiln import jit; from torchkiln.jit.compile import nvrtc\n"
        "nvrtc.compile_program = lambda *_: os.kill(os.getpid(), 9)\n"
        "jit.load(sys.argv[1])"
    )
    assert forked(code, source).returncode == -9
    assert jit.load(source).relu.signature.name == "relu"


def test_many_processes_at_once(nvrtc: toolkit.Toolkit, source: Path) -> None:
    del nvrtc
    code = (
        "import sys, hashlib; from torchkiln import jit\n"
        "print(hashlib.sha256(jit.load(sys.argv[1]).binary('sm_80', 'relu').code).hexdigest())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    found = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(found) == 1
    kept = [path for path in cache.folder().rglob("*") if path.is_file()]
    assert not [path for path in kept if path.name.startswith("unfinished")]
    assert len(kept) == len({"sm_80", architecture_of()})


def test_a_cache_that_cannot_be_written(
    nvrtc: toolkit.Toolkit, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del nvrtc
    (source.parent / "file").touch()
    monkeypatch.setenv("TORCHKILN_CACHE", str(source.parent / "file"))
    with pytest.warns(UserWarning, match="file/jit cannot be used .*Set TORCHKILN_CACHE"):
        module = jit.load(source)
    assert module.binary("sm_80", "relu").code.startswith(b"\x7fELF")


def install(root: Path, *files: str) -> Path:
    """Creates a fake CUDA folder with these files, all empty."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The CUDA folders in which toolkit.find() searches; at first none."""
    folders: list[Path] = []
    monkeypatch.setattr(toolkit, "roots", lambda: iter(folders))
    toolkit.find.cache_clear()
    yield folders
    toolkit.find.cache_clear()


def test_without_nvrtc(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not roots
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    command = r"'cuda-toolkit\[nvrtc,cudart\]==13\.0\.\*'"
    words = rf"NVRTC: got none, expected libnvrtc\.so\.13 .*\n.* {command}"
    with pytest.raises(RuntimeError, match=words):
        jit.inline("__global__ void k() {}")


def test_several_cudas(tmp_path: Path, roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python packages of CUDA 13 and 12, and a toolkit without headers on the machine."""
    new = install(
        tmp_path / "cu13", "lib/libnvrtc.so.13", "include/cuda_fp16.h", "include/cccl/nv/target"
    )
    old = install(tmp_path / "cuda_nvrtc", "lib/libnvrtc.so.12")
    runtime = install(tmp_path / "cuda_runtime" / "include", "cuda_fp16.h")
    library = install(tmp_path / "cuda_cccl" / "include", "nv/target")
    bare = install(tmp_path / "machine" / "cuda", "lib64/libnvrtc.so.11.8.89")
    roots += [new, old, bare]
    newest = toolkit.Toolkit(
        new / "lib" / "libnvrtc.so.13", (new / "include", new / "include" / "cccl")
    )
    older = toolkit.Toolkit(old / "lib" / "libnvrtc.so.12", (runtime, library))
    for version, expected in (("13.0", newest), ("12.8", older), (None, newest)):
        monkeypatch.setattr(torch.version, "cuda", version)
        toolkit.find.cache_clear()
        assert toolkit.find() == expected
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    toolkit.find.cache_clear()
    with pytest.raises(RuntimeError, match=r"got .*so\.12, .*11\.8\.89, expected libnvrtc"):
        toolkit.find()
