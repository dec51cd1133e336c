#pragma once

// The share of a thread in a sum: vectors of 16 bytes, four in flight.

#include <torchkiln/device/block_reduce.cuh>
#include <torchkiln/device/vec.cuh>

constexpr int kThreads = 256;

__device__ __forceinline__ float sum_share(const float* x, int64_t n) {
  constexpr int kLanes = 4, kInFlight = 4;
  const int64_t step = int64_t{gridDim.x} * kThreads * kLanes;
  const int64_t begin = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * kLanes;
  float sum = 0;
  int64_t i = begin;
  for (; i + (kInFlight - 1) * step + kLanes <= n; i += kInFlight * step) {
    float values[kInFlight][kLanes];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      torchkiln::device::widen(torchkiln::device::load_vector<kLanes>(x + i + k * step), values[k]);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
      for (const float value : values[k]) sum += value;
    }
  }
  for (; i < n; i += step)
    for (int64_t j = i; j < min(i + kLanes, n); ++j) sum += x[j];
  return sum;
}
