#pragma once

// Statistics of a channel from its moments, and the update of the running statistics.

#include "detail/reduce/common.cuh"
#include "factors.cuh"
#include "merge.cuh"

namespace torchkiln::cuda {
namespace {

__device__ __forceinline__ void write_parameter(void* to, int64_t at, double value, Dtype dtype) {
  reduce::Result{to, dtype, 1}.store(at, value);
}

__device__ __forceinline__ double read_running(const RunningStatistic& running, int64_t channel,
                                               Dtype dtype) {
  if (running.data == nullptr) return 0;
  return read_parameter<double>(running.data, channel * running.stride, dtype);
}

__device__ __forceinline__ void move_running(const RunningStatistic& running, int64_t channel,
                                             double before, double value, double momentum,
                                             Dtype dtype) {
  if (running.data == nullptr) return;
  write_parameter(running.data, channel * running.stride,
                  momentum * value + (1 - momentum) * before, dtype);
}

template <class C>
__device__ __forceinline__ void write_statistics(void* statistics, int64_t channels,
                                                 int64_t channel, const Moments& moments,
                                                 double eps) {
  C* const to = static_cast<C*>(statistics) + channel;
  const C mean = static_cast<C>(moments.mean);
  to[0] = mean;
  to[channels] = static_cast<C>(moments.mean - static_cast<double>(mean));
  to[2 * channels] = static_cast<C>(1 / sqrt(moments.squares / moments.count + eps));
}

/// Adds the moments of a part to `sums`: the count, the sum of distances from `origin`, and the sum
/// of their squares.
__device__ __forceinline__ void add_distances(const Moments& each, double origin,
                                              double (&sums)[3]) {
  const double distance = each.count == 0 ? 0 : each.mean - origin;
  sums[0] += each.count;
  sums[1] += each.count * distance;
  sums[2] += each.squares + each.count * distance * distance;
}

/// The running statistics of a channel. Load them before the moments, so that both loads are in
/// flight.
struct RunningValues {
  double mean;
  double var;

  template <class Problem>
  __device__ __forceinline__ RunningValues(const Problem& p, int64_t channel)
      : mean(read_running(p.running_mean, channel, p.running_dtype)),
        var(read_running(p.running_var, channel, p.running_dtype)) {}
};

/// Moves the running statistics of a channel towards its moments.
template <class Problem>
__device__ __forceinline__ void move_running(const Problem& p, int64_t channel,
                                             const RunningValues& before, const Moments& merged,
                                             double momentum) {
  move_running(p.running_mean, channel, before.mean, merged.mean, momentum, p.running_dtype);
  move_running(p.running_var, channel, before.var, merged.squares / (merged.count - 1), momentum,
               p.running_dtype);
}

/// Writes the statistics of a channel and moves the running statistics.
template <class C>
__device__ __forceinline__ void finish_statistics(const BatchNorm& p, int64_t channel,
                                                  const RunningValues& before,
                                                  const Moments& merged) {
  write_statistics<C>(p.statistics, p.layout.channels, channel, merged, p.eps);
  move_running(p, channel, before, merged, p.momentum);
}

}  // namespace
}  // namespace torchkiln::cuda
