// y = a + b, 16 bytes per access.
#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

template <class T>
__global__ void vector_add(const T* a, const T* b, T* y, int64_t n) {
  constexpr int kLanes = kVectorLanes<T>;
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kLanes;
  if (at + kLanes <= n) {
    float left[kLanes], right[kLanes];
    widen(load_vector<kLanes>(a + at), left);
    widen(load_vector<kLanes>(b + at), right);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) left[i] += right[i];
    store<kLanes>(y + at, left);
  } else {
    for (int64_t i = at; i < n; ++i) y[i] = convert<T>(convert<float>(a[i]) + convert<float>(b[i]));
  }
}
