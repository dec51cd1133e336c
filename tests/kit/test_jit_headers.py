"""torchkiln's public CUDA headers: under NVRTC, under nvcc, and in a kernel on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torchkiln import jit
from torchkiln.jit.compile import toolkit
from torchkiln.jit.compile.build import OPTIONS
from torchkiln.jit.compile.includes import scan

pytestmark = pytest.mark.usefixtures("own_cache")

INCLUDE = toolkit.torchkiln_include()
HOST_ONLY = {"torchkiln/core/trace.h"}
HEADERS = sorted(
    str(path.relative_to(INCLUDE))
    for folder in ("core", "device", "kernels")
    for path in (INCLUDE / "torchkiln" / folder).iterdir()
)
DEVICE_HEADERS = [header for header in HEADERS if header not in HOST_ONLY]


def includes(headers: list[str]) -> str:
    """One line of #include per header."""
    return "".join(f"#include <{header}>\n" for header in headers)


def require_cccl(nvrtc: toolkit.Toolkit, header: str) -> None:
    """Skips headers that include CUDA's C++ library if it is not installed."""
    found = scan(includes([header]), "inline.cu")
    uses_cccl = any(name.startswith("cuda/") for name in found.names)
    if uses_cccl and not any(folder.name == "cccl" for folder in nvrtc.includes):
        pytest.skip("CUDA's C++ library is not installed")


@pytest.mark.parametrize("header", DEVICE_HEADERS)
def test_nvrtc_compiles_each_header_alone(nvrtc: toolkit.Toolkit, header: str) -> None:
    require_cccl(nvrtc, header)
    jit.inline(includes([header]) + "__global__ void k() {}").binary("sm_90a")


@pytest.mark.parametrize("headers", [DEVICE_HEADERS, DEVICE_HEADERS[::-1]], ids=["a-z", "z-a"])
def test_nvrtc_compiles_all_headers_together(nvrtc: toolkit.Toolkit, headers: list[str]) -> None:
    """All headers compile in one unit; two headers that define the same name would fail."""
    for header in headers:
        require_cccl(nvrtc, header)
    jit.inline(includes(headers) + "__global__ void k() {}").binary("sm_90a")


SOURCE = """
#include <torchkiln/core/functors.h>
#include <torchkiln/device/block_reduce.cuh>
#include <torchkiln/device/vec.cuh>

#include <cstdint>

// y = gelu(x * by) and the sum of each row of y. One block per row; accesses of 16 bytes, then of
// single elements.
template <class T>
__global__ void __launch_bounds__(128)
    gelu_rows(const T* x, T* y, float* sums, int64_t columns, float by) {
  constexpr int kLanes = torchkiln::device::kVectorLanes<T>;
  const T* from = x + blockIdx.x * columns;
  T* to = y + blockIdx.x * columns;
  const auto formula = [=](float value) {
    return torchkiln::Gelu::value<torchkiln::ExactMath>(torchkiln::MultiplyAdd{}(value, by, 0.0f));
  };
  const bool aligned = columns % kLanes == 0;  // every row then starts at a multiple of 16 bytes
  const int64_t vectors = aligned ? columns / kLanes : 0;
  float total = 0;
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    float values[kLanes];
    torchkiln::device::widen(torchkiln::device::load_vector<kLanes>(from + i * kLanes), values);
    for (int k = 0; k < kLanes; ++k) total += values[k] = formula(values[k]);
    torchkiln::device::store<kLanes>(to + i * kLanes, values);
  }
  for (int64_t i = vectors * kLanes + threadIdx.x; i < columns; i += blockDim.x) {
    const float value = formula(torchkiln::device::convert<float>(from[i]));
    to[i] = torchkiln::device::convert<T>(value);
    total += value;
  }
  total = torchkiln::device::reduce_block(total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

template __global__ void gelu_rows<float>(const float*, float*, float*, int64_t, float);
template __global__ void gelu_rows<__half>(const __half*, __half*, float*, int64_t, float);
"""


@pytest.fixture
def nvcc() -> Path:
    """The path of nvcc, if a CUDA toolkit is installed."""
    candidates = [root / "bin" / "nvcc" for root in toolkit.roots()]
    if system := shutil.which("nvcc"):
        candidates.insert(0, Path(system))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    pytest.skip("no nvcc")


def test_nvrtc_compiles_a_kernel(nvrtc: toolkit.Toolkit) -> None:
    del nvrtc
    module = jit.inline(SOURCE)
    for name in ("gelu_rows<float>", "gelu_rows<__half>"):
        assert module.binary("sm_90a", name).code.startswith(b"\x7fELF")


def test_nvcc_compiles_the_same_kernel_with_all_headers(nvcc: Path, tmp_path: Path) -> None:
    """nvcc compiles all headers for the device and for the host."""
    (tmp_path / "probe.cu").write_text("#include <cuda/std/tuple>\n")
    probe = [str(nvcc), "-E", "probe.cu"]
    if subprocess.run(probe, cwd=tmp_path, capture_output=True, check=False).returncode != 0:
        pytest.skip("CUDA's C++ library is not installed")
    (tmp_path / "my.cu").write_text(includes(HEADERS) + SOURCE)
    standard = next(option for option in OPTIONS if "std=" in option)
    options = [standard, "-arch=sm_80", f"-I{INCLUDE}", "-Werror=all-warnings", "-c"]
    command = [str(nvcc), *options, "my.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"gelu_rows" in (tmp_path / "my.o").read_bytes()


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [1024, 1000, 77, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu(dtype: torch.dtype, columns: int) -> None:
    name = {torch.float32: "float", torch.float16: "__half"}[dtype]
    x = torch.randn(37, columns, device="cuda", dtype=dtype)
    y, sums = torch.empty_like(x), torch.empty(37, device="cuda")
    jit.inline(SOURCE)[f"gelu_rows<{name}>"][37, 128](x, y, sums, columns, 0.5)
    truth = torch.nn.functional.gelu(x.double() * 0.5)
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), truth, rtol=2 * spacing, atol=2 * spacing)
    # A thread adds 8 times, then 10 levels of pairs follow; the formula rounds, too.
    bound = 32 * torch.finfo(torch.float32).eps * truth.abs().sum(1)
    assert bool(((sums.double() - truth.sum(1)).abs() <= bound).all())
