#pragma once

// Elementwise kernels with accesses of 16 bytes.

#include <torchkiln/device/vec.cuh>

using namespace torchkiln::device;

// Reads a vector of x, calls body(at, values), and writes the values to y.
template <class T, class Body>
__device__ __forceinline__ void for_vector(const T* x, T* y, int64_t n, const Body& body) {
  constexpr int kLanes = kVectorLanes<T>;
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kLanes;
  if (at >= n) return;
  float values[kLanes];
  widen(load_vector<kLanes>(x + at), values);
  body(at, values);
  store<kLanes>(y + at, values);
}
