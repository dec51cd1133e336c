// A thread computes 8 x 8 results: 16 reads of shared memory feed 64 multiplications.
// m and n are multiples of 128, k of 16.
#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

constexpr int kSide = 128, kDepth = 16, kThreads = 256;
using Tile = float[kDepth][kSide + 4];  // transposed: a row has one element of k

// Copies 128 rows and 16 elements of k. Two threads share a row and read 16 bytes each.
__device__ void load(Tile& to, const __nv_bfloat16* from, int k) {
  const int row = threadIdx.x / 2, depth = threadIdx.x % 2 * 8;
  float values[8];
  widen(load_vector<8>(from + int64_t{row} * k + depth), values);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[depth + i][row] = values[i];
}

// A thread has four adjacent rows in each half of the tile, so a warp reads whole vectors.
__device__ int own(int thread, int i) { return i / 4 * 64 + thread * 4 + i % 4; }

__global__ void __launch_bounds__(kThreads)
    product(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  __shared__ alignas(16) Tile tile_a, tile_b;
  const int row = blockIdx.y * kSide, column = blockIdx.x * kSide;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float sums[8][8] = {};
  for (int first = 0; first < k; first += kDepth) {
    load(tile_a, a + int64_t{row} * k + first, k);
    load(tile_b, b + int64_t{column} * k + first, k);
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      float from_a[8], from_b[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        from_a[i] = tile_a[depth][own(y, i)];
        from_b[i] = tile_b[depth][own(x, i)];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += from_a[i] * from_b[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    __nv_bfloat16* const to = c + int64_t{row + own(y, i)} * n + column;
    for (int half = 0; half < 2; ++half) {
      const float four[4] = {sums[i][half * 4], sums[i][half * 4 + 1], sums[i][half * 4 + 2],
                             sums[i][half * 4 + 3]};
      store<4>(to + own(x, half * 4), four);
    }
  }
}
