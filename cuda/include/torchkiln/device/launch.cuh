#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "torchkiln/core/status.h"
#ifndef __CUDACC_RTC__
#include "torchkiln/core/trace.h"
#endif

namespace torchkiln::device {

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

/// Reports a launch to torchkiln.explain(), with the resources that the compiler gave the kernel.
inline void trace_launch(trace::Listener& listener, const void* kernel, const Grid& grid) {
  trace::GpuLaunch launch{};
  cudaFuncAttributes code{};
  int device = 0;
  const int threads = static_cast<int>(grid.threads.x * grid.threads.y * grid.threads.z);
  // Fields whose query fails stay 0.
  (void)cudaFuncGetName(&launch.kernel, kernel);
  (void)cudaFuncGetAttributes(&code, kernel);
  (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &launch.blocks_per_multiprocessor, kernel, threads, static_cast<size_t>(grid.shared_bytes));
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&launch.most_threads, cudaDevAttrMaxThreadsPerMultiProcessor,
                               device);
  (void)cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
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
  listener.launched(launch);
}

/// Queues a kernel. `overlaps`: its blocks may start while the kernel before it still runs; then it
/// must begin with wait_for_previous_kernel(). Asks nothing of current_device(), so that files
/// compiled for one architecture alone can call it: current_device() is an inline function that
/// exists once in the library, with the architectures of any one file.
template <class... Parameters, class... Arguments>
Status launch_kernel(void (*kernel)(Parameters...), const Grid& grid, bool overlaps,
                     cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kAlwaysAllowed = 32 * 1024;  // beside static shared memory
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
  if (overlaps) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error == cudaSuccess) {
    if (trace::Listener* listener = trace::listening())
      trace_launch(*listener, reinterpret_cast<const void*>(kernel), grid);
    return {};
  }
  (void)cudaGetLastError();  // clears the error, which the status reports
  return {cudaGetErrorString(error)};
}

/// Queues a kernel that begins with wait_for_previous_kernel(). From compute capability 9.0 on its
/// launch overlaps the end of the kernel before it, unless grid.overlaps is false: behind cuBLAS,
/// which never triggers an early start, overlapping costs 0.5 us in a CUDA graph.
template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
                         const Arguments&... arguments) {
  const bool overlaps = grid.overlaps && current_device().runs_90_code;
  return launch_kernel(kernel, grid, overlaps, stream, arguments...);
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

}  // namespace torchkiln::device
