// Moments, their merge, and y of adjacent channels (channels_last): see rows.cuh.

#include "launch.cuh"
#include "ops/batch_norm/forward.cuh"
#include "rows.cuh"

namespace torchkiln::cuda {
namespace {

/// Partial moments of each channel, [samples, parts, channels].
template <class Access>
__global__ void __launch_bounds__(kChannelThreads, kMomentBlocks)
    row_moments(GroupNorm p, ChannelPlan plan, Moments* partial) {
  using T = typename Access::T;
  wait_for_previous_kernel();
  for_each_sample(p.layout, [&](int64_t sample, int64_t first) {
    Moments* const to = partial + (sample * plan.parts + blockIdx.y) * plan.columns;
    add_moments<Access>(static_cast<const T*>(p.x) + first, plan,
                        [&](int64_t column, const Moments& moments) { to[column] = moments; });
  });
}

/// Merges the partial moments of each group, with one block per group of a sample or, with kAlone,
/// one thread.
template <class C, bool kAlone>
__global__ void __launch_bounds__(kMergeThreads)
    merge_group(GroupNorm p, const Moments* partial, int parts) {
  wait_for_previous_kernel();
  const int64_t group = kAlone ? group_of_thread() : blockIdx.x;
  if (kAlone && group >= p.layout.all_groups()) return;
  const int64_t sample = group / p.layout.groups;
  const int64_t channels = p.layout.channels_per_group();
  const Moments* const from =
      partial + sample * parts * p.layout.channels + (group - sample * p.layout.groups) * channels;
  const double origin = from[0].mean;
  double sums[3] = {};
  const unsigned first = kAlone ? 0 : threadIdx.x, step = kAlone ? 1 : blockDim.x;
#pragma unroll 4
  for (int64_t i = first; i < channels * parts; i += step) {
    const int64_t part = i / channels;
    const Moments each = from[part * p.layout.channels + (i - part * channels)];
    const double distance = each.count == 0 ? 0 : each.mean - origin;
    sums[0] += each.count;
    sums[1] += each.count * distance;
    sums[2] += each.squares + each.count * distance * distance;
  }
  if constexpr (!kAlone) {
    reduce_block(sums);
    if (threadIdx.x > 0) return;
  }
  const Moments merged = Moments::from_sums(sums[0], origin, sums[1], sums[2]);
  const int64_t all = p.layout.all_groups();
  C* const to = static_cast<C*>(p.statistics) + group;
  to[0] = static_cast<C>(merged.mean);
  to[all] = static_cast<C>(merged.mean - static_cast<double>(to[0]));
  to[2 * all] = static_cast<C>(1 / sqrt(merged.squares / merged.count + p.eps));
}

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kGroupOutputBlocks)
    row_outputs(GroupNorm p, ChannelPlan plan, Act act) {
  using T = typename Access::T;
  wait_for_previous_kernel();
  const ChannelCursor<Access> cursor(plan);
  for_each_sample(p.layout, [&](int64_t sample, int64_t first) {
    if (!cursor.is_inside()) return;
    using Streams = ChannelStreams<Access, 1, false>;
    const Streams streams{{static_cast<const T*>(p.x) + first}, nullptr, 0};
    ChannelReader<true, Streams> reader(cursor, streams);
    ChannelFactors<Access> factors;
    load_factors(p, sample, cursor, factors);
    T* const y = static_cast<T*>(p.y) + first;
    reader.each(
        [&](const auto& item, int64_t at) { write_output(factors, act, item.of[0], y + at); });
  });
}

}  // namespace

Status group_statistics_of_rows(const GroupNorm& p, const ChannelPass& pass, Allocate allocate,
                                CUstream_st* stream) {
  const ChannelPlan& plan = pass.plan;
  return with_rows(p, pass, [&](auto access, Grid& grid) -> Status {
    using Access = decltype(access);
    const auto moments = static_cast<size_t>(p.layout.batch * plan.parts * plan.columns);
    auto* const partial = static_cast<Moments*>(allocate(moments * sizeof(Moments)));
    grid.shared_bytes = MomentStreams<Access>::kSharedBytes;
    const Status status = launch_overlapped(row_moments<Access>, grid, stream, p, plan, partial);
    if (!status.ok()) return status;
    if (p.layout.all_groups() > kMaxGridX) return {"too many groups for one launch"};
    const auto merge = [&](auto kernel, int64_t blocks, int threads) {
      const Grid of_groups{dim3(static_cast<unsigned>(blocks)), dim3(threads)};
      return launch_overlapped(kernel, of_groups, stream, p, static_cast<const Moments*>(partial),
                               static_cast<int>(plan.parts));
    };
    const int64_t groups = p.layout.all_groups();
    if (threads_have_groups(p.layout, plan.parts))
      return merge(merge_group<typename Access::C, true>, ceil_div(groups, kMergeThreads),
                   kMergeThreads);
    return merge(merge_group<typename Access::C, false>, groups,
                 merge_threads(p.layout.channels_per_group() * plan.parts));
  });
}

Status group_outputs_of_rows(const GroupNorm& p, const ChannelPass& pass, CUstream_st* stream) {
  return with_rows(p, pass, [&](auto access, Grid& grid) {
    using Access = decltype(access);
    grid.shared_bytes = ChannelStreams<Access, 1, false>::kSharedBytes;
    return with_group_activation<Access>(p.activation, [&](auto act) {
      return launch_overlapped(row_outputs<Access, decltype(act)>, grid, stream, p, pass.plan, act);
    });
  });
}

}  // namespace torchkiln::cuda
