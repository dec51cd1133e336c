#pragma once

// Totals of the parts of each channel: a block has kChannelsOfTotal channels, and each thread every
// kPartsOfTotal-th part of one.

#include "torchkiln/device/warp.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kTotalThreads = 512;
constexpr int kChannelsOfTotal = 8;  // 32 bytes of float32, a sector
constexpr int kPartsOfTotal = kTotalThreads / kChannelsOfTotal;

__device__ __forceinline__ int64_t total_channel() {
  return int64_t{blockIdx.x} * kChannelsOfTotal + threadIdx.x % kChannelsOfTotal;
}

/// Calls use(load(part)) for each part of the thread's channel; the loads are issued in groups.
template <class Part, class Load, class Use>
__device__ __forceinline__ void each_part(int64_t parts, const Load& load, const Use& use) {
  constexpr int kLoads = 6;
  for (int64_t first = threadIdx.x / kChannelsOfTotal; first < parts;
       first += kLoads * kPartsOfTotal) {
    Part items[kLoads] = {};
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (first + k * kPartsOfTotal < parts) items[k] = load(first + k * kPartsOfTotal);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) use(items[k]);
  }
}

/// Adds the sums of the threads that have the same channel; returns true in the thread that has the
/// totals.
template <int kValues>
__device__ __forceinline__ bool add_total(double (&sums)[kValues]) {
  using device::kWarpLanes;
  constexpr int kWarps = kTotalThreads / kWarpLanes;
  __shared__ double shared[kValues][kWarps][kChannelsOfTotal];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
#pragma unroll
    for (int distance = kChannelsOfTotal; distance < kWarpLanes; distance *= 2)
      sums[v] += __shfl_xor_sync(0xffffffff, sums[v], distance);
    if (lane < kChannelsOfTotal) shared[v][warp][lane] = sums[v];
  }
  __syncthreads();
  if (threadIdx.x >= kChannelsOfTotal) return false;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sums[v] += shared[v][w][lane];
  }
  return true;
}

}  // namespace
}  // namespace torchkiln::cuda
