// Tensor cores: one instruction of a warp multiplies 16 x 16 by 16 x 8 elements.
// m and n are multiples of 128, k of 32.
#include "mma.cuh"

using namespace torchkiln::device;

constexpr int kSide = 128, kDepth = 32, kThreads = 256;
constexpr int kPitch = kDepth + 8;  // eight rows that are read together begin in different banks
using Tile = __nv_bfloat16[kSide][kPitch];

__device__ void load(Tile& to, const __nv_bfloat16* from, int k) {
#pragma unroll
  for (int i = threadIdx.x; i < kSide * kDepth / 8; i += kThreads) {
    const int row = i / 4, depth = i % 4 * 8;
    *reinterpret_cast<uint4*>(&to[row][depth]) =
        *reinterpret_cast<const uint4*>(from + int64_t{row} * k + depth);
  }
}

// Adds the products of all of k to the results of a warp.
__device__ __forceinline__ void multiply_tiles(WarpTile<kPitch>& results, const __nv_bfloat16* a,
                                               const __nv_bfloat16* b, int k) {
  __shared__ alignas(16) Tile tile_a, tile_b;
  a += int64_t{blockIdx.y} * kSide * k;
  b += int64_t{blockIdx.x} * kSide * k;
  for (int first = 0; first < k; first += kDepth) {
    load(tile_a, a + first, k);
    load(tile_b, b + first, k);
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) results.add(tile_a, tile_b, depth);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    product(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  WarpTile<kPitch> results(threadIdx.x / 32);
  multiply_tiles(results, a, b, k);
  results.store(c + int64_t{blockIdx.y} * kSide * n + blockIdx.x * kSide, n);
}
