// relu(x * scale + bias) as three kernels: each one reads and writes a whole tensor.
// n and columns are multiples of the elements of 16 bytes.
#include "vectors.cuh"

template <class T>
__global__ void multiply(const T* x, T* y, float scale, int64_t n) {
  for_vector(x, y, n, [&](int64_t, auto& values) {
    for (float& value : values) value *= scale;
  });
}

template <class T>
__global__ void add(const T* x, const T* bias, T* y, int columns, int64_t n) {
  for_vector(x, y, n, [&](int64_t at, auto& values) {
    float shift[kVectorLanes<T>];
    widen(load_vector<kVectorLanes<T>>(bias + at % columns), shift);
    for (int i = 0; i < kVectorLanes<T>; ++i) values[i] += shift[i];
  });
}

template <class T>
__global__ void relu(const T* x, T* y, int64_t n) {
  for_vector(x, y, n, [&](int64_t, auto& values) {
    for (float& value : values) value = fmaxf(value, 0.0f);
  });
}
