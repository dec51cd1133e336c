"""Launches of torchkiln.jit: the calls of CUDA's driver, and kernels on a GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln import jit
from torchkiln.jit.call.packing import common_device
from torchkiln.jit.call.signature import kernels_of
from torchkiln.jit.compile import driver
from torchkiln.jit.compile.cache import Binary

pytestmark = pytest.mark.usefixtures("own_cache")

KERNELS = """
#include <torchkiln/core/functors.h>
#include "beside.h"

template <class T>
__global__ void scale(const T* x, T* y, long long n, float by) {
  extern __shared__ float staged[];
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) {
    staged[threadIdx.x] = (float)x[i];
    y[i] = (T)(staged[threadIdx.x] * by + kShift);
  }
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


class Recorded:
    """A fake driver that records calls; the call named ``failing`` returns an error."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of resources"
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_LAUNCH"
            return 701 if name == self.failing else 0

        return called

    def names(self) -> list[str]:
        """The names of the recorded calls, in order."""
        return [name for name, _ in self.calls]


def use(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> Recorded:
    """Replaces the driver by a fake one, and returns it."""
    fake = Recorded(failing)
    monkeypatch.setattr(driver, "library", lambda: fake)
    return fake


def test_a_launch_reaches_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    function = driver.Function("k", b"code", "_Z1k")
    arguments = [ctypes.c_int(5), ctypes.c_double(0.5)]
    function.launch((2, 3, 4), (32, 1, 1), 100_000, 77, arguments)
    loading = ["cuModuleLoadData", "cuModuleGetFunction"]
    assert fake.names() == [*loading, "cuFuncSetAttribute", "cuLaunchKernel"]
    assert fake.calls[1][1][2] == b"_Z1k"
    _, *sizes, stream, addresses, extra = fake.calls[-1][1]
    assert sizes == [2, 3, 4, 32, 1, 1, 100_000]
    assert stream.value == 77
    assert extra is None
    assert ctypes.cast(addresses[0], ctypes.POINTER(ctypes.c_int))[0] == 5
    assert ctypes.cast(addresses[1], ctypes.POINTER(ctypes.c_double))[0] == 0.5
    function.launch((1, 1, 1), (32, 1, 1), 100_000, 77, [])
    assert fake.names().count("cuFuncSetAttribute") == 1


def test_a_failed_launch_raises_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, failing="cuLaunchKernel")
    function = driver.Function("k", b"code", "_Z1k")
    words = r"torchkiln\.jit: k\[\(1, 1, 1\), .*: got CUDA_ERROR_LAUNCH \(out of resources\)"
    with pytest.raises(RuntimeError, match=words):
        function.launch((1, 1, 1), (1024, 1, 1), 0, 0, [])


def test_a_thread_without_a_context_gets_the_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    driver.make_current(3)
    assert fake.names() == ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert fake.calls[1][1][1] == 3


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        RuntimeError, match=r"scale: got no GPU, expected one: this torch .* no CUDA"
    ):
        driver.require_gpu("scale")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="finds no GPU; check that nvidia-smi does"):
        driver.require_gpu("scale")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> jit.Module:
    """A module whose compiler is replaced by one that returns no machine code."""
    monkeypatch.setattr("torchkiln.jit.compile.code.build", lambda *_, **__: Binary(b"", {}))
    return jit.inline("template <class T>\n__global__ void t(T* x) {}\n__global__ void k(int n) {}")


def test_wrong_launches(uncompiled: jit.Module) -> None:
    k = uncompiled.k
    with pytest.raises(TypeError, match=r"k: got 1 arguments and no grid, expected k\[grid"):
        k(1)
    with pytest.raises(TypeError, match=r"expected \[grid, block, bytes, stream"):
        k[32]
    for grid, block in ((0, 32), ((1, 2, 3, 4), 32), ((1, 70_000), 32), (1, (1, 1, 65)), (1.5, 1)):
        with pytest.raises(ValueError, match=r"got .*, expected up to three sizes"):
            k[grid, block]
    with pytest.raises(ValueError, match="expected at most 1024 threads"):
        k[1, (64, 32)]
    with pytest.raises(ValueError, match="bytes: got -1"):
        k[1, 32, -1]
    with pytest.raises(TypeError, match=r"stream: got 7, expected a torch\.cuda\.Stream"):
        k[1, 32, 0, 7]


def test_defaults_of_a_launch(uncompiled: jit.Module) -> None:
    launches = [uncompiled.k[1, 32], uncompiled.k[1, 32, 64]]
    assert [(launch.shared_bytes, launch.stream) for launch in launches] == [(0, None), (64, None)]


def test_missing_kernels(uncompiled: jit.Module) -> None:
    with pytest.raises(
        AttributeError, match="got kernel 'kk', expected one of t, k; did you mean k"
    ):
        _ = uncompiled.kk
    with pytest.raises(AttributeError, match=r"t: got no template arguments, .*\['t<T>'\]"):
        _ = uncompiled.t
    assert uncompiled["t<float>"].signature.parameters[0].dtype == torch.float32
    with pytest.raises(FileNotFoundError, match=r"path: got nowhere\.cu, expected a file"):
        jit.load("nowhere.cu")


def test_devices_of_arguments() -> None:
    signature = kernels_of("__global__ void k(float* x, int n, float* y, float* z) {}")["k"]
    with FakeTensorMode():
        first, second = (torch.empty(2, device=f"cuda:{i}") for i in range(2))
    assert common_device("k", signature, (None, 1, second, second)) == 1
    assert common_device("k", signature, (None, 1, None, None)) is None
    with pytest.raises(ValueError, match="y: got a tensor on cpu, expected a tensor on a GPU"):
        common_device("k", signature, (first, 1, torch.ones(2), first))
    with pytest.raises(ValueError, match="z: got a tensor on cuda:1, expected one on cuda:0, the"):
        common_device("k", signature, (first, 1, None, second))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_the_launch_fails(nvrtc: object) -> None:
    del nvrtc
    kernel = jit.inline("__global__ void fill(float* x, int n) {}").fill
    x = torch.ones(2)
    with pytest.raises(TypeError, match="got 1 argument, expected 2"):
        kernel[1, 32](x)
    with pytest.raises(RuntimeError, match=r"fill: got no GPU, expected one: .* compiled here"):
        kernel[1, 32](x, 2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_launch(source: Path, dtype: torch.dtype) -> None:
    names = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
    source.write_text("#include <torchkiln/device/vec.cuh>\n" + KERNELS)
    kernel = jit.load(source)[f"scale<{names[dtype]}>"]
    x = torch.randn(100_003, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    kernel[-(-x.numel() // 256), 256, 1024](x, y, x.numel(), 2.0)
    torch.testing.assert_close(y, (x.float() * 2 + 1).to(dtype), rtol=0, atol=0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        y.zero_()
        kernel[-(-x.numel() // 256), 256, 100_000](x, y, x.numel(), 4.0)
    side.synchronize()
    torch.testing.assert_close(y, (x.float() * 4 + 1).to(dtype), rtol=0, atol=0)


@pytest.mark.cuda
def test_block_reduce() -> None:
    module = jit.inline("""
#include <torchkiln/device/block_reduce.cuh>
__global__ void sums(const double* x, double* y) {
  const double total = torchkiln::device::reduce_block(x[blockIdx.x * blockDim.x + threadIdx.x]);
  const double again = torchkiln::device::reduce_block(total) / blockDim.x;
  if (threadIdx.x == blockDim.x - 1) y[blockIdx.x] = again;
}
""")
    x = torch.randn(7, 96, device="cuda", dtype=torch.float64)
    y = torch.empty(7, device="cuda", dtype=torch.float64)
    module.sums[7, 96](x, y)
    torch.testing.assert_close(y, x.sum(1))


@pytest.mark.cuda
def test_launches_of_many_threads() -> None:
    """Threads without a CUDA context concurrently load and launch the same kernel."""
    kernel = jit.inline("__global__ void one(float* x) { x[threadIdx.x] += 1; }").one
    x = torch.zeros(8, 32, device="cuda")
    torch.cuda.synchronize()
    threads = [threading.Thread(target=kernel[1, 32], args=(row,)) for row in x]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bool((x == 1).all())


@pytest.mark.cuda
def test_launch_in_a_graph_and_wrong_devices(source: Path) -> None:
    relu = jit.load(source).relu
    x, y = torch.randn(1000, device="cuda"), torch.empty(1000, device="cuda")
    relu[4, 256](x, y, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        relu[4, 256](x, y, 1000)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, torch.relu(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="y: got a tensor on cpu, expected a tensor on a GPU"):
        relu[4, 256](x, y.cpu(), 1000)


def test_sizes_of_the_space() -> None:
    """The packed Space has as many bytes as the struct in jit_elementwise.cuh."""
    from torchkiln.jit.call.layout import layout  # noqa: PLC0415

    found = layout((4, 6), (torch.empty(4, 6), torch.empty(6).expand(4, 6)))
    assert found is not None
    assert len(found.space) == 24 + 96 + 64 + 2 * 64 + 2 * 8
    assert struct.unpack_from("<qqii", found.space) == (24, 6, 2, 1)  # 6 is not a multiple of 4
