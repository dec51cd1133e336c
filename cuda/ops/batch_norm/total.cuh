#pragma once

// Totals of the parts of each channel, with the threads that choose_totals() selects.

#include "choose.h"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::cuda {
namespace {

/// The partial sums of a channel that one thread adds. Threads with adjacent indices add adjacent
/// channels, or adjacent columns of one channel. kThreads: threads per channel.
template <int kThreads>
class ChannelParts {
 public:
  /// `stride`: elements from one part to the next.
  __device__ __forceinline__ ChannelParts(int64_t parts, int64_t stride, int64_t columns,
                                          int64_t channels)
      : stride_(stride), period_(static_cast<uint32_t>(columns / channels)) {
    const int thread = static_cast<int>(threadIdx.x);
    count_ = static_cast<uint32_t>(parts) * period_;
    within_block_ = period_ > 1 ? thread / kThreads : thread % kChannels;
    first_ = period_ > 1 ? thread % kThreads : thread / kChannels;
  }

  __device__ __forceinline__ int64_t channel() const {
    return int64_t{blockIdx.x} * kChannels + within_block_;
  }
  /// The index of the channel among the channels of the block.
  __device__ __forceinline__ int within_block() const { return within_block_; }
  /// The thread's index among the threads of the channel.
  __device__ __forceinline__ int thread() const { return first_; }

  /// The index of a partial sum of the channel.
  __device__ __forceinline__ int64_t at(uint32_t i) const {
    if (period_ == 1) return i * stride_ + channel();
    const uint32_t part = i / period_;
    return part * stride_ + channel() * period_ + (i - part * period_);
  }

  /// Calls use(load(index)) for each partial sum of the thread. Loads are issued in groups of
  /// kTotalLoads.
  template <class Part, class Load, class Use>
  __device__ __forceinline__ void each(const Load& load, const Use& use) const {
    for (uint32_t first = first_; first < count_; first += kTotalLoads * kThreads) {
      Part items[kTotalLoads] = {};
#pragma unroll
      for (int k = 0; k < kTotalLoads; ++k)
        if (first + k * kThreads < count_) items[k] = load(at(first + k * kThreads));
#pragma unroll
      for (int k = 0; k < kTotalLoads; ++k) use(items[k]);
    }
  }

 private:
  static constexpr int kChannels = kChannelTotalThreads / kThreads;  // per block
  int64_t stride_;
  uint32_t period_;
  uint32_t count_;
  int within_block_;
  int first_;
};

/// Adds the sums of the threads that have the same channel; returns true in the thread that has the
/// totals.
template <int kValues>
__device__ __forceinline__ bool add_total(const ChannelParts<1>&, double (&)[kValues]) {
  return true;
}
template <int kValues>
__device__ __forceinline__ bool add_total(const ChannelParts<kThreadsOfTotal>& own,
                                          double (&sums)[kValues]) {
  using device::kWarpLanes;
  static_assert(kThreadsOfTotal == 2 * kWarpLanes);
  __shared__ double shared[kValues][kChannelsOfTotal][kThreadsOfTotal + 1];  // no bank conflicts
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
#pragma unroll
  for (int v = 0; v < kValues; ++v) shared[v][own.within_block()][own.thread()] = sums[v];
  __syncthreads();
  for (int i = warp; i < kValues * kChannelsOfTotal; i += kChannelTotalThreads / kWarpLanes) {
    double* const of = shared[i / kChannelsOfTotal][i % kChannelsOfTotal];
    const double sum = device::reduce_warp(of[lane] + of[lane + kWarpLanes], device::Sum{});
    __syncwarp();
    if (lane == 0) of[0] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kValues; ++v) sums[v] = shared[v][own.within_block()][0];
  return own.thread() == 0;
}

/// Calls body(threads per channel as a type, grid). `terms`: partial sums of each channel.
template <class Body>
Status with_threads_of_total(int64_t channels, int64_t terms, const Body& body) {
  const TotalPlan plan = choose_totals(channels, terms);
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks)), kChannelTotalThreads};
  return plan.has_one ? body(std::integral_constant<int, 1>{}, grid)
                      : body(std::integral_constant<int, kThreadsOfTotal>{}, grid);
}

}  // namespace
}  // namespace torchkiln::cuda
