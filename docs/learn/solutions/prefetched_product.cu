// Step 3 with the next tiles on their way to registers while the current ones are multiplied. Two
// pairs of tiles take turns, so one barrier per step is enough.
// m and n are multiples of 128, k of 16.
#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

constexpr int kSide = 128, kDepth = 16, kThreads = 256;
using Tile = float[kDepth][kSide + 4];
using Loaded = Vec<__nv_bfloat16, 8>;

__device__ Loaded load(const __nv_bfloat16* from, int k) {
  return load_vector<8>(from + int64_t{threadIdx.x / 2} * k + threadIdx.x % 2 * 8);
}

__device__ void keep(Tile& to, const Loaded& loaded) {
  float values[8];
  widen(loaded, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[threadIdx.x % 2 * 8 + i][threadIdx.x / 2] = values[i];
}

__device__ int own(int thread, int i) { return i / 4 * 64 + thread * 4 + i % 4; }

__global__ void __launch_bounds__(kThreads)
    product(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  __shared__ alignas(16) Tile tiles_a[2], tiles_b[2];
  const int row = blockIdx.y * kSide, column = blockIdx.x * kSide;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  a += int64_t{row} * k;
  b += int64_t{column} * k;
  float sums[8][8] = {};
  Loaded next_a = load(a, k), next_b = load(b, k);
  for (int first = 0; first < k; first += kDepth) {
    Tile& tile_a = tiles_a[first / kDepth % 2];
    Tile& tile_b = tiles_b[first / kDepth % 2];
    keep(tile_a, next_a);
    keep(tile_b, next_b);
    __syncthreads();
    if (first + kDepth < k) {
      next_a = load(a + first + kDepth, k);
      next_b = load(b + first + kDepth, k);
    }
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
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      c[int64_t{row + own(y, i)} * n + column + own(x, j)] = convert<__nv_bfloat16>(sums[i][j]);
  }
}
