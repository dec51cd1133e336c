#include "torchkiln/kernels/matmul.h"

#include "detail/gemm/variants.h"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::cuda {

using namespace device;
namespace {

/// Whether the kernel of compute capability 9.0 was built, and can run here on these operands.
bool fits_sm90(const Matmul& p) {
#ifdef TORCHKILN_WITH_SM90
  int device = 0;
  int major = 0;
  constexpr int kMajor = 9;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == kMajor && gemm::sm90::fits(p);
#else
  (void)p;
  return false;
#endif
}

/// Whether tiles of 128 by 256 keep the multiprocessors busy, in the last of several rounds over
/// them, too: in the only round, nothing hides how the last tile is finished.
bool fills(const Matmul& p, int64_t multiprocessors) {
  constexpr int64_t kRows = 128;
  constexpr int64_t kColumns = 256;
  const int64_t tiles = ceil_div(p.m, kRows) * ceil_div(p.n, kColumns) * p.batch;
  const int64_t rounds = ceil_div(tiles, multiprocessors);
  const int64_t results = p.m * p.n * p.batch;
  constexpr int64_t kPercent = 85;
  return rounds > 1 && results * 100 >= kPercent * rounds * multiprocessors * kRows * kColumns;
}

/// Measured on an H200, beside cuBLAS and torch's kernels for the rest. Plain products are as fast
/// (0.98 to 1.03), and so is what cuBLASLt fuses, a bias and relu. What it does not fuse is a pass
/// over memory saved, where the products last as long as it takes to finish a tile beside them:
/// three warps need 8 us for a residual, 18 us for gelu, and 1024 of k last 12 us.
bool beats_library(const Matmul& p) {
  const bool is_none = p.activation == kActivation<None>;
  const bool is_relu = p.activation == kActivation<Relu>;
  if (p.residual == nullptr && (is_none || (is_relu && p.bias != nullptr))) return false;
  const int64_t deep_enough = is_none || is_relu ? 512 : 2048;
  return p.k >= deep_enough && fills(p, current_device().multiprocessors);
}

}  // namespace

MatmulKernel choose(const Matmul& p, bool beside_library) {
  const bool is_half = size_of(p.dtype) == 2;
  if (is_half && fits_sm90(p) && (!beside_library || beats_library(p))) return MatmulKernel::sm90;
  if (beside_library) return MatmulKernel::library;
  return is_half && gemm::tensor_core::runs() ? MatmulKernel::tensor_core : MatmulKernel::simt;
}

Status matmul(const Matmul& p, MatmulKernel kernel, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return {};
  switch (kernel) {
#ifdef TORCHKILN_WITH_SM90
    case MatmulKernel::sm90:
      if (!fits_sm90(p)) return {"not for the kernel of this name"};
      return gemm::sm90::matmul(p, current_device().multiprocessors, stream);
#endif
    case MatmulKernel::tensor_core:
      if (!gemm::tensor_core::runs()) return {"not for the kernel of this name"};
      return gemm::tensor_core::matmul(p, stream);
    case MatmulKernel::simt:
      return gemm::simt::matmul(p, stream);
    default:
      return {"this kernel was not built"};
  }
}

}  // namespace torchkiln::cuda
