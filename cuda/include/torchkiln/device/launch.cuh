#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "torchkiln/core/status.h"
#include "torchkiln/device/device.h"
#ifndef __CUDACC_RTC__
#include <atomic>
#include <optional>

#include "torchkiln/core/trace.h"
#endif

namespace torchkiln::device {

#ifndef __CUDACC_RTC__  // NVRTC compiles no host code

/// Empty kernel. Its attributes show the architectures for which this library was compiled.
template <int = 0>
__global__ void probe() {}

/// Clusters of 1 << log_blocks blocks that run at the same time, if a block fills an SM. One
/// cluster more would start after the others and double the time. 0 if no GPC is large enough.
inline int count_clusters(int log_blocks, int shared_bytes) {
  const auto blocks = static_cast<unsigned>(1 << log_blocks);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kWarpLanes);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int found = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&found, probe<>, &config);
  (void)cudaGetLastError();
  return error == cudaSuccess ? found : 0;
}

/// The properties of a GPU; nothing if a query fails.
inline std::optional<Device> query_device(int device) {
  Device found;
  cudaFuncAttributes code;
  if (cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&found.capability_major, cudaDevAttrComputeCapabilityMajor, device) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                             device) != cudaSuccess ||
      cudaFuncGetAttributes(&code, probe<>) != cudaSuccess) {
    return std::nullopt;
  }
  found.runs_80_code = code.ptxVersion >= 80;
  found.runs_90_code = code.ptxVersion >= 90;
  found.clusters[0] = found.multiprocessors;
  if (!found.runs_90_code ||
      cudaFuncSetAttribute(probe<>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           found.shared_bytes) != cudaSuccess ||
      cudaFuncSetAttribute(probe<>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
          cudaSuccess) {
    (void)cudaGetLastError();
    return found;
  }
  for (int log_blocks = 1; log_blocks < 5; ++log_blocks)
    found.clusters[log_blocks] = count_clusters(log_blocks, found.shared_bytes);
  return found;
}

/// The properties of the current device, queried once; Device{} if the query fails.
inline const Device& current_device() {
  constexpr int kDevices = 64;
  static const Device kUnknown;
  static std::atomic<const Device*> known[kDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return kUnknown;
  const Device* found = known[device].load(std::memory_order_acquire);
  if (found == nullptr) {
    const std::optional<Device> answer = query_device(device);
    if (!answer) return kUnknown;
    // Allocated memory is kept until the process ends. If two threads query at once, both results
    // are equal.
    const Device* const queried = new Device(*answer);
    if (known[device].compare_exchange_strong(found, queried)) return *queried;
    delete queried;
  }
  return *found;
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
  // If a query fails, its fields are 0.
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
  cudaGraphNode_t last = nullptr;  // the node that the next node follows, if there is only one
};

inline Recording recording_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
  const cudaGraphEdgeData* edges = nullptr;  // if it is not passed, overlapping edges are an error
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v3(stream, &status, nullptr, nullptr, &nodes, &edges, &count);
#endif
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error; the launch will report it
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

/// The status for an error of the CUDA runtime. Clears the runtime's latest error.
inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  StatusCode code = StatusCode::launch_failed;
  if (error == cudaErrorMemoryAllocation) code = StatusCode::out_of_memory;
  if (error == cudaErrorNoKernelImageForDevice) code = StatusCode::unsupported;
  return {cudaGetErrorString(error), code};
}

/// Queues a kernel. `overlaps`: its blocks may start while the previous kernel still runs, so the
/// kernel must begin with wait_for_previous_kernel(). Does not call current_device(): the linker
/// keeps that inline function from an arbitrary file, with that file's architectures. Therefore a
/// file compiled for a single architecture must not instantiate it.
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
  // In a graph, a launch overlaps only a kernel that allows the next one to start early. After
  // other nodes, overlap gains nothing and costs 0.5 us. The first node must not overlap, because
  // its wait does not include the work that was queued before the graph. If the latest node belongs
  // to a deleted graph or to another thread, the launch is only slower.
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
  if (error != cudaSuccess) return status_of(error);
  if (recording.active) latest_early_node() = recording_of(stream).last;
  if (trace::Listener* listener = trace::listening())
    trace_launch(*listener, reinterpret_cast<const void*>(kernel), grid);
  return {};
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
/// kernel to start. The order matters: when a kernel runs, all kernels before its predecessor have
/// finished, so it may reuse their memory.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
#endif

}  // namespace torchkiln::device
