// Accesses of 16 bytes: an instruction moves eight elements of half precision.
// columns is a multiple of 16 bytes.
#include <torchkiln/device/block_reduce.cuh>
#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

template <class T>
__global__ void layer_norm(const T* x, const T* weight, const T* bias, T* y, int columns,
                           float eps) {
  constexpr int kLanes = kVectorLanes<T>;
  x += int64_t{blockIdx.x} * columns;
  y += int64_t{blockIdx.x} * columns;
  float sum = 0, squares = 0;
  for (int i = threadIdx.x * kLanes; i < columns; i += blockDim.x * kLanes) {
    float values[kLanes];
    widen(load_vector<kLanes>(x + i), values);
    for (const float value : values) sum += value;
  }
  const float mean = reduce_block(sum) / columns;
  for (int i = threadIdx.x * kLanes; i < columns; i += blockDim.x * kLanes) {
    float values[kLanes];
    widen(load_vector<kLanes>(x + i), values);
    for (const float value : values) squares += (value - mean) * (value - mean);
  }
  const float rstd = rsqrtf(reduce_block(squares) / columns + eps);
  for (int i = threadIdx.x * kLanes; i < columns; i += blockDim.x * kLanes) {
    float values[kLanes], scale[kLanes], shift[kLanes];
    widen(load_vector<kLanes>(x + i), values);
    widen(load_vector<kLanes>(weight + i), scale);
    widen(load_vector<kLanes>(bias + i), shift);
    for (int j = 0; j < kLanes; ++j) values[j] = (values[j] - mean) * rstd * scale[j] + shift[j];
    store<kLanes>(y + i, values);
  }
}
