#pragma once

// The properties of a GPU from which launch plans are computed. Includes no header of CUDA, so that
// g++ compiles the plans, and tests make plans for GPUs that they do not have.

#include <cstdint>

/// Marks functions that kernels call, too.
#ifdef __CUDACC__
#define TORCHKILN_HOST_DEVICE __host__ __device__
#else
#define TORCHKILN_HOST_DEVICE
#endif

namespace torchkiln::device {

inline constexpr int kWarpLanes = 32;

/// The widest load or store of one thread.
inline constexpr int kVectorBytes = 16;

/// The largest grid along x: 2^31 - 1 blocks of at least 512 elements. Larger problems are refused.
inline constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The properties of a GPU on which launch plans depend.
struct Device {
  int multiprocessors = 1;
  // Major number of the compute capability. Code for 9.0a runs on 9.0 alone.
  int capability_major = 0;
  // runs_80_code: tensor cores multiply half precision, and copies to shared memory are
  // asynchronous. runs_90_code: launches may overlap, and blocks may form clusters. The compiled
  // code decides this, not the GPU: code for an older architecture, translated by the driver, has
  // none of these.
  bool runs_80_code = false;
  bool runs_90_code = false;
  // Most shared memory, in bytes, that one block may opt in to.
  int shared_bytes = 48 * 1024;
  // Clusters of 1, 2, 4, 8 and 16 blocks that run at the same time, if a block fills an SM. The
  // blocks of a cluster run in one GPC, and not every GPC has a multiple of 16 SMs.
  int clusters[5] = {1, 0, 0, 0, 0};
};

}  // namespace torchkiln::device
