#pragma once

// One number of all threads of a block, for kernels that torchkiln.jit compiles: shuffles within a
// warp, then one warp over what the warps have found. Neither CUDA's C++ library nor a second of
// compile time. The order of the operations depends on nothing but the number of threads.

namespace torchkiln {

struct Plus {
  template <class C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return a + b;
  }
};

/// Combines `value` of the 32 lanes of a warp, all of which call this; each gets the result.
template <class C, class Combine = Plus>
__device__ __forceinline__ C reduce_warp(C value, Combine combine = {}) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

/// Combines `value` of all threads of a block of whole warps along x; each gets the result.
/// `nothing` is what changes no value: 0 for a sum.
template <class C, class Combine = Plus>
__device__ C reduce_block(C value, C nothing = C(0), Combine combine = {}) {
  __shared__ C of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  value = reduce_warp(value, combine);
  __syncthreads();  // until all have read what an earlier call left
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  return reduce_warp(lane < warps ? of_warps[lane] : nothing, combine);
}

}  // namespace torchkiln
