#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "torchkiln/status.h"

namespace torchkiln {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The largest grid along x; more blocks than that do not come up below 2^31 * 4096 elements, but
/// are refused.
inline constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

/// What launches need to know of the current device, asked of the driver once a device.
struct Device {
  int multiprocessors = 1;
  int major = 0;  // of the compute capability
};

inline Device current_device() {
  constexpr int kDevices = 64;
  // major << 16 | multiprocessors. Two threads that both ask write the same.
  static int known[kDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return {};
  int packed = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
  if (packed == 0) {
    Device asked;
    if (cudaDeviceGetAttribute(&asked.multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess ||
        cudaDeviceGetAttribute(&asked.major, cudaDevAttrComputeCapabilityMajor, device) !=
            cudaSuccess) {
      return {};
    }
    packed = asked.major << 16 | asked.multiprocessors;
    __atomic_store_n(&known[device], packed, __ATOMIC_RELAXED);
  }
  return {packed & 0xffff, packed >> 16};
}

/// Queues a kernel whose blocks may be started while the kernel before it is still running, so that
/// its launch costs no time of its own (from compute capability 9.0 on). The kernel must begin with
/// wait_for_previous_kernel().
template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), dim3 blocks, int threads,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = current_device().major >= 9 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // reported once, here
  return {cudaGetErrorString(error)};
}

#ifdef __CUDACC__
/// Waits until the kernel before this one has finished and its results are visible, then lets the
/// next one be started. In this order: a kernel that has begun thereby knows that all before its
/// predecessor are done, too, and memory that they used may be written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
#endif

}  // namespace torchkiln
