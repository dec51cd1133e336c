#pragma once

// Adds up the sums of several threads, for the gradients of weight and bias.

#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

inline constexpr int kTotalThreads = 256;

/// Adds the values of the threads with the same index in rows of `width` threads; `width` is a
/// power of 2. Returns true in the threads that have the totals.
template <int kValues>
__device__ __forceinline__ bool add_slices(double (&values)[kValues], int width) {
  __shared__ double shared[kValues][kTotalThreads];
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kValues; ++v) shared[v][thread] = values[v];
  for (int other = kTotalThreads / 2; other >= width; other /= 2) {
    __syncthreads();
    if (thread >= other) continue;
#pragma unroll
    for (int v = 0; v < kValues; ++v) shared[v][thread] += shared[v][thread + other];
  }
  if (thread >= width) return false;
#pragma unroll
  for (int v = 0; v < kValues; ++v) values[v] = shared[v][thread];
  return true;
}

/// Stores the sums of g and of g * n of a channel.
__device__ __forceinline__ void store_parameter_gradients(const GroupNormBackward& p,
                                                          int64_t channel,
                                                          const double (&total)[2]) {
  if (p.grad_bias != nullptr)
    reduce::Result{p.grad_bias, p.parameter_dtype, 1}.store(channel, total[0]);
  if (p.grad_weight != nullptr)
    reduce::Result{p.grad_weight, p.parameter_dtype, 1}.store(channel, total[1]);
}

}  // namespace
}  // namespace torchkiln::cuda
