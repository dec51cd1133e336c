// One thread per result: c[m, n] = a[m, k] times the transpose of b[n, k].
#include <torchkiln/device/vec.cuh>

using torchkiln::device::convert;

__global__ void product(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m,
                        int n, int k) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0;
  for (int i = 0; i < k; ++i)
    sum += convert<float>(a[int64_t{row} * k + i]) * convert<float>(b[int64_t{column} * k + i]);
  c[int64_t{row} * n + column] = convert<__nv_bfloat16>(sum);
}
