#pragma once

// The kernels of the forward: partial moments of each channel, and the outputs.

#include "factors.cuh"
#include "merge.cuh"
#include "statistics.cuh"

namespace torchkiln::cuda {

/// The forward in two steps, moments_of_*() and outputs_of_*(); merge_moments() runs between them.
/// *_rows: adjacent channels; *_planes: adjacent elements of a channel.
Status moments_of_rows(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                       CUstream_st* stream);
Status moments_of_planes(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                         CUstream_st* stream);
Status outputs_of_rows(const BatchNorm& p, const ChannelPass& pass, CUstream_st* stream);
Status outputs_of_planes(const BatchNorm& p, const ChannelPass& pass, CUstream_st* stream);

/// moments_of_rows() or moments_of_planes().
Status moments_of(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                  CUstream_st* stream);

/// Launches one cooperative kernel for both passes (forward_resident.cu).
Status launch_resident(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                       CUstream_st* stream);

/// Packs the signs of y in a kernel of its own, after a kernel that stored y without vectors.
Status pack_signs(const BatchNorm& p, CUstream_st* stream);

namespace {

/// The stream of x. Its shared memory also holds two float64 sums per element of a vector.
template <class Access>
using MomentStreams = ChannelStreams<Access, 1, false, double, double>;

/// Sums, over the part of a block, the distances from the first element of that part, and their
/// squares. With distances few digits are lost if the mean is far from 0. Calls use(column or
/// channel, moments) once for each column or channel of the block.
template <class Access, class Use>
__device__ __forceinline__ void add_moments(const typename Access::T* x, const ChannelPlan& plan,
                                            const Use& use) {
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  constexpr int kChannels = Access::kColumns ? kLanes : 1;
  const ChannelCursor<Access> cursor(plan);
  const MomentStreams<Access> streams{{x}, nullptr, 0};
  ChannelReader<false, MomentStreams<Access>> reader(cursor, streams);
  C origin[kChannels] = {}, sum[kLanes] = {}, squares[kLanes] = {};
  if (cursor.has_part())
    widen(load_vector<kChannels>(x + cursor.first_of_column(cursor.column())), origin);
  int64_t count = 0;
  reader.each([&](const auto& item, int64_t) {
    C value[kLanes];
    widen(item.of[0], value);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const C distance = value[i] - origin[ChannelFactors<Access>::of(i)];
      sum[i] += distance;
      squares[i] = fma(distance, distance, squares[i]);
    }
    ++count;
  });
  double values[2][kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    values[0][i] = static_cast<double>(sum[i]);
    values[1][i] = static_cast<double>(squares[i]);
  }
  if constexpr (Access::kColumns) {
    count = cursor.count_of_block();
  } else {
    count = reduce_block(count * kLanes);
  }
  add_threads<Access>(plan, values, [&](int64_t column, const double (&sums)[2]) {
    C from[1] = {};
    if (count > 0) widen(load_vector<1>(x + cursor.first_of_column(column)), from);
    use(column, Moments::from_sums(static_cast<double>(count), static_cast<double>(from[0]),
                                   sums[0], sums[1]));
  });
}

template <class Access>
__global__ void __launch_bounds__(kChannelThreads, kMomentBlocks)
    part_moments(const typename Access::T* x, ChannelPlan plan, Moments* partial) {
  wait_for_previous_kernel();
  Moments* const to = partial + blockIdx.y * plan.columns;
  add_moments<Access>(x, plan,
                      [&](int64_t column, const Moments& moments) { to[column] = moments; });
}

/// Computes the factors of a thread's channels from the running statistics, in eval mode. Writes
/// the statistics for backward if they are wanted.
template <class Access, int kChannels>
__device__ __forceinline__ void load_running(const BatchNorm& p,
                                             const ChannelCursor<Access>& cursor,
                                             const int64_t (&channels)[kChannels],
                                             ChannelFactors<Access>& factors) {
  using C = typename Access::C;
  C low[kChannels] = {}, rstd[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    const int64_t channel = channels[i];
    factors.mean[i] =
        read_parameter<C>(p.running_mean.data, channel * p.running_mean.stride, p.running_dtype);
    const auto variance =
        read_parameter<double>(p.running_var.data, channel * p.running_var.stride, p.running_dtype);
    rstd[i] = static_cast<C>(1 / sqrt(variance + p.eps));
    if (p.statistics == nullptr || !cursor.is_first(i, channel)) continue;
    C* const to = static_cast<C*>(p.statistics) + channel;
    to[0] = factors.mean[i];
    to[p.layout.channels] = C(0);
    to[2 * p.layout.channels] = rstd[i];
  }
  factors.set(p, channels, low, rstd);
}

template <class Access>
using OutputStreams = ChannelStreams<Access, 2, false>;

template <class Access, class Act>
__device__ __forceinline__ void write_outputs(const BatchNorm& p, const ChannelPlan& plan,
                                              const Act& act) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  const ChannelCursor<Access> cursor(plan);
  if (!cursor.is_inside()) return;
  using Streams = OutputStreams<Access>;
  const Streams streams{
      {static_cast<const T*>(p.x), static_cast<const T*>(p.residual)}, nullptr, 0};
  ChannelReader<true, Streams> reader(cursor, streams);
  ChannelFactors<Access> factors;
  int64_t channels[factors.kChannels];
  cursor.channels(channels);
  if (p.training) {
    factors.load(p, channels);
  } else {
    load_running(p, cursor, channels, factors);
  }
  T* const y = static_cast<T*>(p.y);
  reader.each([&](const auto& item, int64_t at) {
    C z[kLanes];
    factors.normalize(item.of[0], z);
    if (p.residual != nullptr) add_vector(item.of[1], z);
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

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kOutputBlocks)
    channel_outputs(BatchNorm p, ChannelPlan plan, Act act) {
  wait_for_previous_kernel();
  write_outputs<Access>(p, plan, act);
}

/// Runs both passes in one kernel. It needs no grid barrier, because each block has whole channels.
template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kMomentBlocks)
    whole_channels(BatchNorm p, ChannelPlan plan, Act act) {
  wait_for_previous_kernel();
  add_moments<Access>(static_cast<const typename Access::T*>(p.x), plan,
                      [&](int64_t channel, const Moments& moments) {
                        finish_statistics<typename Access::C>(p, channel, RunningValues(p, channel),
                                                              moments);
                      });
  __syncthreads();
  write_outputs<Access>(p, plan, act);
}

template <bool kColumns>
Status launch_moments(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                      CUstream_st* stream) {
  const ChannelPlan& plan = pass.plan;
  Grid grid;
  const Status fits = grid_of(plan, grid);
  if (!fits.ok()) return fits;
  return with_channel_access<kColumns>(p.dtype, pass.lanes, [&](auto access) {
    using Access = decltype(access);
    using T = typename Access::T;
    grid.shared_bytes = MomentStreams<Access>::kSharedBytes;
    const auto moments = static_cast<size_t>(plan.parts * plan.columns);
    auto* const partial = static_cast<Moments*>(allocate(moments * sizeof(Moments)));
    const Status status = launch_overlapped(part_moments<Access>, grid, stream,
                                            static_cast<const T*>(p.x), plan, partial);
    if (!status.ok()) return status;
    return merge_moments(p, partial, plan.parts, plan.columns, stream);
  });
}

template <bool kColumns>
Status launch_outputs(const BatchNorm& p, const ChannelPass& pass, CUstream_st* stream) {
  Grid grid;
  const Status fits = grid_of(pass.plan, grid);
  if (!fits.ok()) return fits;
  return with_channel_access<kColumns>(p.dtype, pass.lanes, [&](auto access) {
    using Access = decltype(access);
    grid.shared_bytes = OutputStreams<Access>::kSharedBytes;
    const Status status = with_channel_activation<Access>(p.activation, [&](auto act) {
      using Act = decltype(act);
      auto* kernel = channel_outputs<Access, Act>;
      if (pass.whole) {
        kernel = whole_channels<Access, Act>;
        grid.shared_bytes = std::max(grid.shared_bytes, MomentStreams<Access>::kSharedBytes);
      }
      return launch_overlapped(kernel, grid, stream, p, pass.plan, act);
    });
    if (!status.ok() || p.signs == nullptr || Access::kLanes == kChannelLanes) return status;
    return pack_signs(p, stream);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
