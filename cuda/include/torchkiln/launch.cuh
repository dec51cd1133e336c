#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "torchkiln/status.h"
#ifndef __CUDACC_RTC__
#include "torchkiln/listener.h"
#endif

namespace torchkiln {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifndef __CUDACC_RTC__  // which compiles nothing that launches

/// The largest grid along x: 2^31 blocks of at least 512 elements. More are refused.
inline constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

/// What launches need to know of the current device, asked of the driver once a device.
struct Device {
  int multiprocessors = 1;
  // Whether kernels may overlap, and blocks form clusters.
  bool runs_90_code = false;
  // Of one block, once it is asked for.
  int shared_bytes = 48 * 1024;
};

/// Stands for all kernels of the library, which are compiled for the same architectures.
template <int = 0>
__global__ void probe() {}

inline Device current_device() {
  constexpr int kDevices = 64;
  // shared_bytes << 32 | multiprocessors << 1 | runs_90_code. Two threads that both ask write the
  // same.
  static int64_t known[kDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return {};
  int64_t packed = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
  if (packed == 0) {
    int multiprocessors = 1;
    int shared_bytes = 0;
    cudaFuncAttributes code;
    if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess ||
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess ||
        cudaFuncGetAttributes(&code, probe<>) != cudaSuccess) {
      return {};
    }
    // What was compiled counts, not the GPU: code for an older architecture, which the driver
    // translates, does not wait in wait_for_previous_kernel() and knows no clusters.
    packed = int64_t{shared_bytes} << 32 | multiprocessors << 1 | (code.ptxVersion >= 90 ? 1 : 0);
    __atomic_store_n(&known[device], packed, __ATOMIC_RELAXED);
  }
  return {static_cast<int>(packed & 0xffffffff) >> 1, (packed & 1) != 0,
          static_cast<int>(packed >> 32)};
}

/// What a kernel is launched with.
struct Grid {
  dim3 blocks;
  dim3 threads;
  int cluster = 1;       // blocks of a cluster, along x
  int shared_bytes = 0;  // of dynamic shared memory
  bool overlaps = true;
};

/// Tells a listener of a launch, with what the compiler made of the kernel.
inline void tell(explain::Listener& listener, const void* kernel, const Grid& grid) {
  explain::GpuLaunch launch{};
  cudaFuncAttributes code{};
  int device = 0;
  const int threads = static_cast<int>(grid.threads.x * grid.threads.y * grid.threads.z);
  // What cannot be found out stays 0.
  (void)cudaFuncGetName(&launch.kernel, kernel);
  (void)cudaFuncGetAttributes(&code, kernel);
  (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &launch.blocks_per_multiprocessor, kernel, threads, static_cast<size_t>(grid.shared_bytes));
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&launch.most_threads, cudaDevAttrMaxThreadsPerMultiProcessor,
                               device);
  (void)cudaGetLastError();
  const dim3* sizes[2] = {&grid.blocks, &grid.threads};
  unsigned* to[2] = {launch.blocks, launch.threads};
  for (int i = 0; i < 2; ++i) {
    to[i][0] = sizes[i]->x;
    to[i][1] = sizes[i]->y;
    to[i][2] = sizes[i]->z;
  }
  launch.cluster = grid.cluster;
  launch.dynamic_shared_bytes = grid.shared_bytes;
  launch.static_shared_bytes = static_cast<int>(code.sharedSizeBytes);
  launch.registers = code.numRegs;
  launch.local_bytes = static_cast<int>(code.localSizeBytes);
  launch.multiprocessors = current_device().multiprocessors;
  listener.launched(launch);
}

/// Queues a kernel whose blocks may be started while the kernel before it is still running, so that
/// its launch costs no time of its own (from compute capability 9.0 on). The kernel must begin with
/// wait_for_previous_kernel(). Behind a kernel that lets no other begin, as cuBLAS's are, that
/// costs half a microsecond in a CUDA graph instead of saving one: then `grid.overlaps` is to be
/// false.
template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
                         const Arguments&... arguments) {
  constexpr int kAlwaysAllowed = 32 * 1024;  // beside what is static
  cudaError_t error = cudaSuccess;
  if (grid.shared_bytes > kAlwaysAllowed) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 grid.shared_bytes);
  }
  constexpr int kPortableCluster = 8;
  if (error == cudaSuccess && grid.cluster > kPortableCluster)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (grid.overlaps && current_device().runs_90_code) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error == cudaSuccess) {
    if (explain::Listener* listener = explain::listening())
      tell(*listener, reinterpret_cast<const void*>(kernel), grid);
    return {};
  }
  (void)cudaGetLastError();  // reported once, here
  return {cudaGetErrorString(error)};
}

#endif

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
