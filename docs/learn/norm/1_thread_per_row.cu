// Layer norm, one thread per row: y = (x - mean) / sqrt(variance + eps) * weight + bias.
#include <torchkiln/device/vec.cuh>

using torchkiln::device::convert;

template <class T>
__global__ void layer_norm(const T* x, const T* weight, const T* bias, T* y, int rows, int columns,
                           float eps) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += int64_t{row} * columns;
  y += int64_t{row} * columns;
  float sum = 0;
  for (int i = 0; i < columns; ++i) sum += convert<float>(x[i]);
  const float mean = sum / columns;
  float squares = 0;
  for (int i = 0; i < columns; ++i) {
    const float distance = convert<float>(x[i]) - mean;
    squares += distance * distance;
  }
  const float rstd = rsqrtf(squares / columns + eps);
  for (int i = 0; i < columns; ++i) {
    const float normal = (convert<float>(x[i]) - mean) * rstd;
    y[i] = convert<T>(normal * convert<float>(weight[i]) + convert<float>(bias[i]));
  }
}
