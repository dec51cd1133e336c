// relu(x * scale + bias) + residual: one more read, and still one pass.
#include "../fusion/vectors.cuh"

template <class T>
__global__ void bias_relu_residual(const T* x, const T* bias, const T* residual, T* y, float scale,
                                   int columns, int64_t n) {
  for_vector(x, y, n, [&](int64_t at, auto& values) {
    constexpr int kLanes = kVectorLanes<T>;
    float shift[kLanes], other[kLanes];
    widen(load_vector<kLanes>(bias + at % columns), shift);
    widen(load_vector<kLanes>(residual + at), other);
    for (int i = 0; i < kLanes; ++i)
      values[i] = fmaxf(values[i] * scale + shift[i], 0.0f) + other[i];
  });
}
