// The row stays in registers: each element is read from memory once.
#include "row.cuh"

using torchkiln::device::reduce_block;

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads)
    layer_norm(const T* x, const T* weight, const T* bias, T* y, int columns, float eps) {
  const int64_t first = int64_t{blockIdx.x} * columns;
  const Row<T, kVectors> row(x + first, columns);
  float sum = 0, squares = 0;
  row.for_each([&](int, const auto& values) {
    for (const float value : values) sum += value;
  });
  const float mean = reduce_block(sum) / columns;
  row.for_each([&](int, const auto& values) {
    for (const float value : values) squares += (value - mean) * (value - mean);
  });
  const float rstd = rsqrtf(reduce_block(squares) / columns + eps);
  row.write(mean, rstd, weight, bias, y + first);
}
