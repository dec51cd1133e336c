// A block computes 32 x 32 results and shares what it reads: each element is loaded once per block.
#include <torchkiln/device/vec.cuh>

using torchkiln::device::convert;

constexpr int kSide = 32;

__global__ void __launch_bounds__(kSide* kSide)
    product(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  __shared__ float tile_a[kSide][kSide];
  __shared__ float tile_b[kSide][kSide + 1];  // a column of it lies in 32 different banks
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kSide, column = blockIdx.x * kSide;
  float sum = 0;
  for (int first = 0; first < k; first += kSide) {
    // Adjacent threads read adjacent elements of k. Elements outside count as zero.
    const bool inside = first + x < k;
    const int64_t at_a = int64_t{row + y} * k + first + x;
    const int64_t at_b = int64_t{column + y} * k + first + x;
    tile_a[y][x] = inside && row + y < m ? convert<float>(a[at_a]) : 0.0f;
    tile_b[y][x] = inside && column + y < n ? convert<float>(b[at_b]) : 0.0f;
    __syncthreads();  // the tiles are complete
    for (int i = 0; i < kSide; ++i) sum += tile_a[y][i] * tile_b[x][i];
    __syncthreads();  // the tiles have been read
  }
  if (row + y < m && column + x < n)
    c[int64_t{row + y} * n + column + x] = convert<__nv_bfloat16>(sum);
}
