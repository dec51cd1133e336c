// 16 bytes per access: four floats or eight halves per thread. x and y begin at multiples of 16.
#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

template <class T>
__global__ void square(const T* x, T* y, int64_t n) {
  constexpr int kLanes = kVectorLanes<T>;
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kLanes;
  if (at + kLanes <= n) {
    float values[kLanes];
    widen(load_vector<kLanes>(x + at), values);
#pragma unroll
    for (float& value : values) value *= value;
    store<kLanes>(y + at, values);
  } else {
    for (int64_t i = at; i < n; ++i) {
      const float value = convert<float>(x[i]);
      y[i] = convert<T>(value * value);
    }
  }
}
