"""torchkiln.jit's use of NVRTC, where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    """A file of kernels and a header beside it."""
    (tmp_path / "beside.h").write_text("constexpr float kShift = 1.0f;\n")
    (tmp_path / "my.cu").write_text(KERNELS)
    return tmp_path / "my.cu"


def test_compiled_code_is_kept(
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
    assert "__nv_name_map" not in str(caught.value)  # what NVRTC makes of our question for names


HEADERS = (
    "vec.cuh",
    "functors.h",
    "random.h",
    "divide.cuh",
    "sums.cuh",
    "launch.cuh",
    "strided.cuh",
    "block_reduce.cuh",
)


@pytest.mark.parametrize("header", HEADERS)
def test_headers(nvrtc: toolkit.Toolkit, header: str) -> None:
    del nvrtc
    jit.inline(f"#include <torchkiln/{header}>\n__global__ void k() {{}}").binary("sm_90a")


def test_a_killed_process_leaves_nothing_to_wait_for(nvrtc: toolkit.Toolkit, source: Path) -> None:
    del nvrtc
    code = (
        "import os, sys; from torchkiln import jit; from torchkiln.jit.compile import nvrtc\n"
        "nvrtc.compile_program = lambda *_: os.kill(os.getpid(), 9)\n"
        "jit.load(sys.argv[1])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(source)]
    assert subprocess.run(command, check=False).returncode == -9
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
    with pytest.warns(UserWarning, match="file/jit cannot be written .* TORCHKILN_CACHE names"):
        module = jit.load(source)
    assert module.binary("sm_80", "relu").code.startswith(b"\x7fELF")


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "roots", lambda: iter(()))
    toolkit.find.cache_clear()
    try:
        with pytest.raises(
            RuntimeError, match=r"NVRTC: got none, expected libnvrtc\.so.*(\n.*)*pip"
        ):
            jit.inline("__global__ void k() {}")
    finally:
        toolkit.find.cache_clear()
