#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "torchkiln/core/status.h"
#ifndef __CUDACC_RTC__
#include "torchkiln/core/trace.h"
#endif

namespace torchkiln::device {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifndef __CUDACC_RTC__  // NVRTC compiles no host code

/// The largest grid along x: 2^31 - 1 blocks of at least 512 elements. Larger problems are refused.
inline constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

/// Properties of the current device that launches depend on; queried once per device.
struct Device {
  int multiprocessors = 1;
  // Whether launches may overlap and blocks may form clusters.
  bool runs_90_code = false;
  // Shared memory that one block may opt in to.
  int shared_bytes = 48 * 1024;
};

/// Empty kernel, queried for the architectures this library was compiled for.
template <int = 0>
__global__ void probe() {}

inline Device current_device() {
  constexpr int kDevices = 64;
  // shared_bytes << 32 | multiprocessors << 1 | runs_90_code. A race is harmless: all threads write
  // the same value.
  static int64_t cached[kDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return {};
  int64_t packed = __atomic_load_n(&cached[device], __ATOMIC_RELAXED);
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
    // Decided by the compiled code, not by the GPU: code for an older architecture, translated by
    // the driver, has no wait in wait_for_previous_kernel() and no clusters.
    packed = int64_t{shared_bytes} << 32 | multiprocessors << 1 | (code.ptxVersion >= 90 ? 1 : 0);
    __atomic_store_n(&cached[device], packed, __ATOMIC_RELAXED);
  }
  return {static_cast<int>(packed & 0xffffffff) >> 1, (packed & 1) != 0,
          static_cast<int>(packed >> 32)};
}

/// Launch configuration of a kernel.
struct Grid {
  dim3 blocks;
  dim3 threads;
  int cluster = 1;           // blocks per cluster, along x
  int shared_bytes = 0;      // dynamic shared memory
  bool cooperative = false;  // all blocks are resident at the same time, or the launch fails
};

/// Reports a launch to torchkiln.explain(), with the resources that the compiler assigned to the
/// kernel.
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

/// The CUDA graph that a stream records.
struct Recording {
  bool active = false;
  cudaGraphNode_t last = nullptr;  // the node that the next one will follow, if it follows one
};

inline Recording recording_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
  const cudaGraphEdgeData* edges = nullptr;  // without it, edges that overlap are an error
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v3(stream, &status, nullptr, nullptr, &nodes, &edges, &count);
#endif
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error, which the launch reports again
    return {};
  }
  if (status != cudaStreamCaptureStatusActive) return {};
  return {true, count == 1 ? nodes[0] : nullptr};
}

/// The node of the thread's latest launch that allows the next kernel to start early.
inline cudaGraphNode_t& latest_early_node() {
  static thread_local cudaGraphNode_t node = nullptr;
  return node;
}

/// Queues a kernel. `overlaps`: its blocks may start while the previous kernel still runs, so the
/// kernel must begin with wait_for_previous_kernel(). Does not call current_device(): that inline
/// function exists once in the library, with the architectures of an arbitrary file, so a file
/// compiled for a single architecture must not instantiate it.
template <class... Parameters, class... Arguments>
Status launch_kernel(void (*kernel)(Parameters...), const Grid& grid, bool overlaps,
                     cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kAlwaysAllowed = 32 * 1024;  // together with static shared memory
  cudaError_t error = cudaSuccess;
  if (grid.shared_bytes > kAlwaysAllowed) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 grid.shared_bytes);
  }
  constexpr int kPortableCluster = 8;
  if (error == cudaSuccess && grid.cluster > kPortableCluster)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  const Recording recording = overlaps ? recording_of(stream) : Recording{};
  // In a graph, a launch overlaps only a kernel that lets it start early. Behind other nodes it
  // gains nothing and costs 0.5 us. The first node must not overlap: its wait ends before the work
  // that was queued ahead of the graph. A handle of a graph that is gone, or a node of another
  // thread, costs time only.
  if (overlaps &&
      (!recording.active || (recording.last != nullptr && recording.last == latest_early_node()))) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (grid.cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error == cudaSuccess) {
    if (recording.active) latest_early_node() = recording_of(stream).last;
    if (trace::Listener* listener = trace::listening())
      trace_launch(*listener, reinterpret_cast<const void*>(kernel), grid);
    return {};
  }
  (void)cudaGetLastError();  // clears the error, which the status reports
  return {cudaGetErrorString(error)};
}

/// Queues a kernel that begins with wait_for_previous_kernel(). On compute capability 9.0 and later
/// the launch overlaps the end of the previous kernel, unless it is cooperative.
template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
                         const Arguments&... arguments) {
  const bool overlaps = !grid.cooperative && current_device().runs_90_code;
  return launch_kernel(kernel, grid, overlaps, stream, arguments...);
}

#endif

#ifdef __CUDACC__
/// Waits until the previous kernel has finished and its results are visible, then allows the next
/// kernel to start. The order matters: a running kernel can rely on all kernels before its
/// predecessor having finished, so it may reuse their memory.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
#endif

}  // namespace torchkiln::device
