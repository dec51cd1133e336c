#pragma once

// Reduction over the threads of a block: shuffles within each warp, then every warp reduces the
// results of all warps. The order of the operations depends only on the number of threads.

#include "torchkiln/device/warp.cuh"

namespace torchkiln::device {

/// Combines `value` over all threads of a block, whose threads are along x and whole warps. Each
/// thread gets the result.
template <class C, class Op = Sum>
__device__ C reduce_block(C value, const Op& op = {}) {
  __shared__ C of_warps[kWarpLanes];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int warps = static_cast<int>(blockDim.x) / kWarpLanes;
  value = reduce_warp(value, op);
  __syncthreads();  // all threads have read the slots of an earlier call
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  return reduce_warp(lane < warps ? of_warps[lane] : Op::template identity<C>(), op);
}

/// Combines N values per thread over all threads of a block, with two barriers in total.
template <int N, class C, class Op = Sum>
__device__ void reduce_block(C (&values)[N], const Op& op = {}) {
  __shared__ C of_warps[N][kWarpLanes];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int warps = static_cast<int>(blockDim.x) / kWarpLanes;
#pragma unroll
  for (C& value : values) value = reduce_warp(value, op);
  __syncthreads();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) of_warps[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i)
    values[i] = reduce_warp(lane < warps ? of_warps[i][lane] : Op::template identity<C>(), op);
}

}  // namespace torchkiln::device
