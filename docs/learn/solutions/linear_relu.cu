// relu(a b^T + bias): the sums are still in registers when bias and relu are applied.
// m and n are multiples of 128, k of 32.
#include "../product/4_tensor_cores.cu"

__global__ void __launch_bounds__(kThreads, 2)
    linear_relu(const __nv_bfloat16* a, const __nv_bfloat16* b, const __nv_bfloat16* bias,
                __nv_bfloat16* c, int m, int n, int k) {
  WarpTile<kPitch> results(threadIdx.x / 32);
  multiply_tiles(results, a, b, k);
  const int column = blockIdx.x * kSide + results.column + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float shift[2];
    widen(load_vector<2>(bias + column + j * 8), shift);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        float& sum = results.sums[i][j][s];
        sum = fmaxf(sum + shift[s % 2], 0.0f);
      }
    }
  }
  results.store(c + int64_t{blockIdx.y} * kSide * n + blockIdx.x * kSide, n);
}
