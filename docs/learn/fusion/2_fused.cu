// relu(x * scale + bias) as one kernel: what lies between the operations stays in registers.
// n and columns are multiples of the elements of 16 bytes.
#include "vectors.cuh"

template <class T>
__global__ void bias_relu(const T* x, const T* bias, T* y, float scale, int columns, int64_t n) {
  for_vector(x, y, n, [&](int64_t at, auto& values) {
    float shift[kVectorLanes<T>];
    widen(load_vector<kVectorLanes<T>>(bias + at % columns), shift);
    for (int i = 0; i < kVectorLanes<T>; ++i) values[i] = fmaxf(values[i] * scale + shift[i], 0.0f);
  });
}
