#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "torchkiln/status.h"

namespace torchkiln {

/// The state of the launch just made. Clears the error, so that a bad configuration is reported
/// once, here.
inline Status launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : Status{cudaGetErrorString(error)};
}

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
  static int known[kDevices] =
      {};  // major << 16 | multiprocessors; two threads that both ask write the same
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

/// Queues a kernel that may be started while the one before it is still running, so that its launch
/// costs no time of its own (from compute capability 9.0 on). It must call
/// wait_for_previous_kernel() before it reads that one's results.
template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = current_device().major >= 9 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return {cudaGetErrorString(error)};
}

#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
#endif

}  // namespace torchkiln
