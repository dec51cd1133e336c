#pragma once

// The kernels of the forward: moments of parts of the channels, and the outputs.

#include "factors.cuh"
#include "moments.cuh"

namespace torchkiln::cuda {

/// The forward of rows of adjacent channels, and of planes of adjacent elements.
Status batch_norm_rows(const BatchNorm& p, Allocate allocate, CUstream_st* stream);
Status batch_norm_planes(const BatchNorm& p, Allocate allocate, CUstream_st* stream);

/// Merges the moments of `parts` parts of each channel, [parts, channels], into the statistics and
/// the running ones.
Status merge_moments(const BatchNorm& p, const Moments* partial, int64_t parts,
                     CUstream_st* stream);

/// Packs the signs of y, for kernels without vectors.
Status pack_signs(const BatchNorm& p, CUstream_st* stream);

namespace {

// Blocks per SM: 2 x 256 threads x 8 loads x 16 B = 64 KiB in flight.
constexpr int kMomentBlocks = 2;
constexpr int kOutputBlocks = 2;

/// Sums of distances to the first element of a thread, and of their squares: few digits are lost
/// where the mean is far from 0. The parts of a block are merged in float64, because the distance
/// of two means far from 0 needs the digits.
template <class Access>
__global__ void __launch_bounds__(kChannelThreads, kMomentBlocks)
    part_moments(const typename Access::T* x, ChannelPlan plan, Moments* partial) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  constexpr int kChannels = Access::kColumns ? kLanes : 1;
  wait_for_previous_kernel();
  const ChannelCursor<Access, kInFlight<Access, 8>> cursor(plan);
  C origin[kLanes] = {}, sum[kLanes] = {}, squares[kLanes] = {};
  int64_t count = 0;
  cursor.template each<false>([&](int64_t at) { return load_vector<kLanes>(x + at); },
                              [&](const Vec<T, kLanes>& item, int64_t) {
                                C value[kLanes];
                                widen(item, value);
#pragma unroll
                                for (int i = 0; i < kLanes; ++i) {
                                  if (count == 0) origin[i] = value[i];
                                  const C distance = value[i] - origin[i];
                                  sum[i] += distance;
                                  squares[i] = fma(distance, distance, squares[i]);
                                }
                                ++count;
                              });
  Moments merged[kChannels] = {};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    merged[ChannelFactors<Access>::of(i)].merge(
        Moments::from_sums(static_cast<double>(count), static_cast<double>(origin[i]),
                           static_cast<double>(sum[i]), static_cast<double>(squares[i])));
  }
  __shared__ double means[kChannels * kChannelThreads];
  __shared__ double distances[kChannels * kChannelThreads];
  __shared__ double counts[kChannelThreads];
  merge_threads<Access>(
      plan,
      [&] {
        counts[threadIdx.x] = merged[0].count;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
          means[i * kChannelThreads + threadIdx.x] = merged[i].mean;
          distances[i * kChannelThreads + threadIdx.x] = merged[i].squares;
        }
      },
      [&](int other) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
          merged[i].merge({counts[other], means[i * kChannelThreads + other],
                           distances[i * kChannelThreads + other]});
        }
      });
  if (!cursor.is_inside() || !has_merged<Access>(plan)) return;
#pragma unroll
  for (int i = 0; i < kChannels; ++i)
    partial[blockIdx.y * plan.layout.channels + cursor.channel() + i] = merged[i];
}

/// The factors of a thread's channels in eval mode without statistics in memory; writes the
/// statistics for backward if they are wanted.
template <class Access>
__device__ __forceinline__ void load_running(const BatchNorm& p, int64_t channel, bool is_first,
                                             ChannelFactors<Access>& factors) {
  using C = typename Access::C;
#pragma unroll
  for (int i = 0; i < ChannelFactors<Access>::kChannels; ++i) {
    const int64_t each = channel + i;
    const C mean =
        read_parameter<C>(p.running_mean.data, each * p.running_mean.stride, p.running_dtype);
    const auto variance =
        read_parameter<double>(p.running_var.data, each * p.running_var.stride, p.running_dtype);
    const C rstd = static_cast<C>(1 / sqrt(variance + p.eps));
    factors.set(p, i, each, mean, C(0), rstd);
    if (!is_first || p.statistics == nullptr) continue;
    C* const to = static_cast<C*>(p.statistics) + each;
    to[0] = mean;
    to[p.layout.channels] = C(0);
    to[2 * p.layout.channels] = rstd;
  }
}

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kOutputBlocks)
    channel_outputs(BatchNorm p, ChannelPlan plan, Act act) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const ChannelCursor<Access, kInFlight<Access, 6>> cursor(plan);
  if (!cursor.is_inside()) return;
  ChannelFactors<Access> factors;
  if (p.training) {
    factors.load(p, cursor.channel());
  } else {
    load_running(p, cursor.channel(), cursor.is_first(), factors);
  }
  const T* const x = static_cast<const T*>(p.x);
  const T* const residual = static_cast<const T*>(p.residual);
  T* const y = static_cast<T*>(p.y);
  struct Item {
    Vec<T, kLanes> x, residual;
  };
  cursor.template each<true>(
      [&](int64_t at) {
        Item item{};
        item.x = load_vector<kLanes>(x + at);
        if (residual != nullptr) item.residual = load_vector<kLanes>(residual + at);
        return item;
      },
      [&](const Item& item, int64_t at) {
        C z[kLanes];
        factors.normalize(item.x, z);
        if (residual != nullptr) add_vector(item.residual, z);
        act.apply(z);
        Vec<T, kLanes> result;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) result.lane[i] = convert<T>(z[i]);
        *reinterpret_cast<Vec<T, kLanes>*>(y + at) = result;
        if constexpr (kLanes == kChannelLanes) {
          if (p.signs == nullptr) return;
          unsigned signs = 0;
#pragma unroll
          for (int i = 0; i < kLanes; ++i)
            signs |= static_cast<unsigned>(!(convert<C>(result.lane[i]) <= C(0))) << i;
          p.signs[at / 8] = static_cast<uint8_t>(signs);
        }
      });
}

template <bool kColumns>
Status launch_forward(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return with_channel_access<kColumns>(p.dtype, p.layout, {p.x, p.residual, p.y}, [&](auto access) {
    using Access = decltype(access);
    using T = typename Access::T;
    Grid grid;
    Status status;
    if (p.training) {
      const ChannelPlan plan =
          make_channel_plan<Access>(p.layout, kInFlight<Access, 8>, kMomentBlocks);
      status = grid_of(plan, grid);
      if (!status.ok()) return status;
      const auto moments = static_cast<size_t>(plan.parts * p.layout.channels);
      auto* const partial = static_cast<Moments*>(allocate(moments * sizeof(Moments)));
      status = launch_overlapped(part_moments<Access>, grid, stream, static_cast<const T*>(p.x),
                                 plan, partial);
      if (!status.ok()) return status;
      status = merge_moments(p, partial, plan.parts, stream);
      if (!status.ok()) return status;
    }
    const ChannelPlan plan =
        make_channel_plan<Access>(p.layout, kInFlight<Access, 6>, kOutputBlocks);
    status = grid_of(plan, grid);
    if (!status.ok()) return status;
    status = with_channel_activation<Access>(p.activation, [&](auto act) {
      return launch_overlapped(channel_outputs<Access, decltype(act)>, grid, stream, p, plan, act);
    });
    if (!status.ok() || p.signs == nullptr || Access::kLanes == kChannelLanes) return status;
    return pack_signs(p, stream);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
