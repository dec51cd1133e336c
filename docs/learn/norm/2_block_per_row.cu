// One block per row: adjacent threads read adjacent elements, and add up what they found.
#include <torchkiln/device/block_reduce.cuh>
#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

template <class T>
__global__ void layer_norm(const T* x, const T* weight, const T* bias, T* y, int columns,
                           float eps) {
  x += int64_t{blockIdx.x} * columns;
  y += int64_t{blockIdx.x} * columns;
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += convert<float>(x[i]);
  const float mean = reduce_block(sum) / columns;
  float squares = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const float distance = convert<float>(x[i]) - mean;
    squares += distance * distance;
  }
  const float rstd = rsqrtf(reduce_block(squares) / columns + eps);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const float normal = (convert<float>(x[i]) - mean) * rstd;
    y[i] = convert<T>(normal * convert<float>(weight[i]) + convert<float>(bias[i]));
  }
}
