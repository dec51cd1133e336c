// Sums of columns with the same bits in every run: parts first, then their sum in a fixed order.
#include <cstdint>

// Block (x, y) adds every gridDim.y-th row of its columns.
__global__ void sum_parts(const float* x, float* parts, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
  for (int row = blockIdx.y; row < rows; row += gridDim.y)
    sum += x[row * int64_t{columns} + column];
  parts[blockIdx.y * int64_t{columns} + column] = sum;
}

__global__ void add_parts(const float* parts, float* out, int count, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
  for (int part = 0; part < count; ++part) sum += parts[part * int64_t{columns} + column];
  out[column] = sum;
}
