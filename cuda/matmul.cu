#include "torchkiln/kernels/matmul.h"

#include "torchkiln/launch.cuh"
#include "torchkiln/matmul_kernels.h"

namespace torchkiln::cuda {
namespace {

/// Whether the kernel of compute capability 9.0 was built, and can run here on these operands.
bool fits_hopper(const Matmul& p) {
#ifdef TORCHKILN_WITH_HOPPER
  int device = 0;
  int major = 0;
  constexpr int kHopper = 9;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == kHopper && hopper::fits(p);
#else
  (void)p;
  return false;
#endif
}

/// Whether tiles of 128 by 256 keep the multiprocessors busy: in the last round over them, too.
bool fills(const Matmul& p, int64_t multiprocessors) {
  constexpr int64_t kRows = 128;
  constexpr int64_t kColumns = 256;
  const int64_t tiles = ceil_div(p.m, kRows) * ceil_div(p.n, kColumns) * p.batch;
  const int64_t rounds = ceil_div(tiles, multiprocessors);
  const int64_t results = p.m * p.n * p.batch;
  constexpr int64_t kPercent = 85;
  return results * 100 >= kPercent * rounds * multiprocessors * kRows * kColumns;
}

}  // namespace

MatmulKernel choose(const Matmul& p, bool beside_library) {
  const bool is_half = size_of(p.dtype) == 2;
  if (is_half && fits_hopper(p)) {
    // Measured on an H200: what the library does not fuse pays for the few per cent that its
    // products are faster by.
    const bool fused = p.activation != kActivation<None> || p.residual != nullptr;
    constexpr int64_t kDeepEnough = 512;
    if (!beside_library ||
        (fused && p.k >= kDeepEnough && fills(p, current_device().multiprocessors)))
      return MatmulKernel::hopper;
  }
  if (beside_library) return MatmulKernel::library;
  return is_half && tensor_core::runs() ? MatmulKernel::tensor_core : MatmulKernel::simt;
}

Status matmul(const Matmul& p, MatmulKernel kernel, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return {};
  switch (kernel) {
#ifdef TORCHKILN_WITH_HOPPER
    case MatmulKernel::hopper:
      if (!fits_hopper(p)) return {"not for the kernel of this name"};
      return hopper::matmul(p, current_device().multiprocessors, stream);
#endif
    case MatmulKernel::tensor_core:
      if (!tensor_core::runs()) return {"not for the kernel of this name"};
      return tensor_core::matmul(p, stream);
    case MatmulKernel::simt:
      return simt::matmul(p, stream);
    default:
      return {"this kernel was not built"};
  }
}

}  // namespace torchkiln::cuda
