"""torchkiln's device headers in a kernel of one's own: under NVRTC, under nvcc, on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torchkiln import jit
from torchkiln.jit.compile import toolkit
from torchkiln.jit.compile.build import OPTIONS

pytestmark = pytest.mark.usefixtures("own_cache")

SOURCE = """
#include <torchkiln/device/block_reduce.cuh>
#include <torchkiln/device/fast_divide.cuh>
#include <torchkiln/core/functors.h>
#include <torchkiln/device/launch.cuh>
#include <torchkiln/core/layout.h>
#include <torchkiln/core/scalar_math.h>
#include <torchkiln/core/philox.h>
#include <torchkiln/device/jit_elementwise.cuh>
#include <detail/reduce/common.cuh>
#include <torchkiln/device/vec.cuh>

#include <cstdint>

// y = gelu(x * by) and the sums of its rows: a block a row, by 16 bytes, then single elements.
template <class T>
__global__ void __launch_bounds__(128)
    gelu_rows(const T* x, T* y, float* sums, int64_t columns, float by) {
  constexpr int kLanes = torchkiln::device::kVectorLanes<T>;
  const T* from = x + blockIdx.x * columns;
  T* to = y + blockIdx.x * columns;
  const auto formula = [=](float value) {
    return torchkiln::Gelu::value<torchkiln::ExactMath>(torchkiln::MultiplyAdd{}(value, by, 0.0f));
  };
  const bool whole = columns % kLanes == 0;  // then all rows are aligned
  const int64_t vectors = whole ? columns / kLanes : 0;
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
    """A compiler of CUDA's toolkit, if one is here."""
    candidates = [root / "bin" / "nvcc" for root in toolkit.roots()]
    if system := shutil.which("nvcc"):
        candidates.insert(0, Path(system))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    pytest.skip("no nvcc")


def test_nvrtc(nvrtc: toolkit.Toolkit) -> None:
    del nvrtc
    module = jit.inline(SOURCE)
    for name in ("gelu_rows<float>", "gelu_rows<__half>"):
        assert module.binary("sm_90a", name).code.startswith(b"\x7fELF")


def test_nvcc_takes_the_same_source(nvcc: Path, tmp_path: Path) -> None:
    """The host's part of it, too: the object is one to link."""
    (tmp_path / "my.cu").write_text(SOURCE)
    standard = next(option for option in OPTIONS if "std=" in option)
    include = toolkit.torchkiln_include()
    options = [standard, "-arch=sm_80", f"-I{include}", "-Werror=all-warnings", "-c"]
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
    # Each thread adds up to 8 values, then ten pairs; the formula rounds some times more.
    bound = 32 * torch.finfo(torch.float32).eps * truth.abs().sum(1)
    assert bool(((sums.double() - truth.sum(1)).abs() <= bound).all())
