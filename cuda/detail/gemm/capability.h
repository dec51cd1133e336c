#pragma once

#include "torchkiln/device/device.h"

namespace torchkiln::gemm {

/// Whether the kernels for compute capability 9.0 were built and run on this GPU.
inline bool has_sm90(const device::Device& device) {
#ifdef TORCHKILN_WITH_SM90
  constexpr int kMajor = 9;
  return device.capability_major == kMajor;
#else
  (void)device;
  return false;
#endif
}

}  // namespace torchkiln::gemm
