#pragma once

#include <cuda_runtime.h>

namespace torchkiln::gemm {

/// Whether the kernels for compute capability 9.0 were built and run on the current device.
inline bool has_sm90() {
#ifdef TORCHKILN_WITH_SM90
  int device = 0;
  int major = 0;
  constexpr int kMajor = 9;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == kMajor;
#else
  return false;
#endif
}

}  // namespace torchkiln::gemm
