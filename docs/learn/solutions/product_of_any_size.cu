// Step 6 for any m, for even n and for k in multiples of 8: what a box has outside of its matrix
// arrives as zeros, so only the writes need a check. Rows of a and b begin at multiples of 16
// bytes.
#include "../product/6_hopper.cu"

__global__ void __launch_bounds__(3 * kGroup)
    product_of_any_size(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                        __nv_bfloat16* c, int m, int n, int k) {
  run(a, b, (k + kDepth - 1) / kDepth, [&](int row, int column, float x, float y) {
    if (row >= m || column >= n) return;
    const float both[2] = {x, y};
    device::store<2>(c + int64_t{row} * n + column, both);
  });
}
