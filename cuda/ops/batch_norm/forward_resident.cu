// Moments, statistics and y in one cooperative kernel, for adjacent channels on compute capability
// 9.0. The rows that fit stay in shared memory between the passes: resident.cuh lists the steps.

#include "forward.cuh"
#include "resident.cuh"
#include "statistics.cuh"

namespace torchkiln::cuda {
namespace {

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kResidentBlocks)
    resident_forward(BatchNorm p, ChannelPlan plan, Act act, Moments* partial) {
  using T = typename Access::T;
  using C = typename Access::C;
  using Streams = ChannelStreams<Access, 1, false>;
  constexpr int kLanes = Access::kLanes;
  const T* const x = static_cast<const T*>(p.x);
  const ChannelCursor<Access> cursor(plan);
  const Streams streams{{x}, nullptr, 0};
  ResidentReader<Streams, 48 * 1024> reader(cursor, streams, plan.columns);
  const int64_t count = cursor.count_of_block();
  double origins[kColumnsOfThread] = {};
  if (count > 0) {
    for_each_column<Access>(plan, [&](int i, int64_t column) {
      origins[i] = static_cast<double>(convert<C>(x[cursor.first_of_column(column)]));
    });
  }
  C values[2][kLanes] = {};
  {
    C origin[kLanes] = {};
    if (cursor.has_part())
      widen(load_vector<kLanes>(x + cursor.first_of_column(cursor.column())), origin);
    reader.forwards([&](const auto& item, int64_t) {
      C value[kLanes];
      widen(item.of[0], value);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const C distance = value[i] - origin[i];
        values[0][i] += distance;
        values[1][i] = fma(distance, distance, values[1][i]);
      }
    });
  }
  add_resident<Streams>(plan, values, [&](int i, int64_t column, const double (&sums)[2]) {
    partial[blockIdx.y * plan.columns + column] =
        Moments::from_sums(static_cast<double>(count), origins[i], sums[0], sums[1]);
  });
  for_each_channel(plan.columns, [&](int64_t channel, int lane) {
    const RunningValues before(p, channel);
    const double origin = partial[channel].mean;
    double sums[3] = {};
    for_each_part<Moments>(
        plan.parts, lane, [&](int64_t part) { return partial[part * plan.columns + channel]; },
        [&](const Moments& each) { add_distances(each, origin, sums); });
#pragma unroll
    for (double& sum : sums) sum = reduce_warp(sum, Sum{});
    if (lane > 0) return;
    finish_statistics<C>(p, channel, before, Moments::from_sums(sums[0], origin, sums[1], sums[2]));
  });
  ChannelFactors<Access> factors{};
  if (cursor.is_inside()) {
    int64_t channels[kLanes];
    cursor.channels(channels);
    factors.load(p, channels);
  }
  T* const y = static_cast<T*>(p.y);
  reader.backwards([&](const auto& item, int64_t at) {
    C z[kLanes];
    factors.normalize(item.of[0], z);
    act.apply(z);
    store(y + at, z);
  });
}

}  // namespace

Status launch_resident(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                       CUstream_st* stream) {
  const ChannelPlan& plan = pass.plan;
  return with_resident_access(p.dtype, [&](auto access) {
    using Access = decltype(access);
    const auto moments = static_cast<size_t>(plan.parts * plan.columns);
    auto* const partial = static_cast<Moments*>(allocate(moments * sizeof(Moments)));
    return with_channel_activation<Access>(p.activation, [&](auto act) {
      return launch_overlapped(resident_forward<Access, decltype(act)>, resident_grid(plan), stream,
                               p, plan, act, partial);
    });
  });
}

}  // namespace torchkiln::cuda
