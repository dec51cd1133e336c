// Sums, coefficients and grad_x in one cooperative kernel, for adjacent channels on compute
// capability 9.0. The rows that fit stay in shared memory between the passes: resident.cuh lists
// the steps.

#include "backward.cuh"
#include "resident.cuh"
#include "sums.cuh"

namespace torchkiln::cuda {
namespace {

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kResidentBlocks)
    resident_backward(BatchNormBackward p, ChannelPlan plan, Act act, typename Access::C* partial) {
  using T = typename Access::T;
  using C = typename Access::C;
  using Streams = GradientStreams<Access, Act>;
  constexpr int kLanes = Access::kLanes;
  const ChannelCursor<Access> cursor(plan);
  const auto streams = gradient_streams<Access, Act>(p, static_cast<const T*>(p.grad), false);
  ResidentReader<Streams, 32 * 1024> reader(cursor, streams, plan.columns);
  ChannelFactors<Access> factors{};
  int64_t channels[kLanes];
  cursor.channels(channels);
  if (cursor.is_inside()) factors.load(p, channels);
  C sums[2][kLanes] = {};
  reader.forwards([&](const auto& item, int64_t at) {
    C g[kLanes];
    add_gradients(p, factors, act, item, at, g, sums);
  });
  C* const to = partial + int64_t{blockIdx.y} * 2 * plan.columns;
  add_resident<Streams>(plan, sums, [&](int, int64_t column, const double (&total)[2]) {
    to[column] = static_cast<C>(total[0]);
    to[plan.columns + column] = static_cast<C>(total[1]);
  });
  for_each_channel(plan.columns, [&](int64_t channel, int lane) {
    struct Part {
      C sum, product;
    };
    double total[2] = {};
    for_each_part<Part>(
        plan.parts, lane,
        [&](int64_t part) {
          const C* const from = partial + part * 2 * plan.columns + channel;
          return Part{from[0], from[plan.columns]};
        },
        [&](const Part& each) {
          total[0] += static_cast<double>(each.sum);
          total[1] += static_cast<double>(each.product);
        });
#pragma unroll
    for (double& sum : total) sum = reduce_warp(sum, Sum{});
    if (lane == 0) finish_sums<C>(p, channel, total);
  });
  if (p.grad_x == nullptr) return;
  C slope[kLanes] = {}, level[kLanes] = {};
  if (cursor.is_inside()) {
    const C* const coefficients = static_cast<const C*>(p.coefficients);
    read_each<C>(coefficients, channels, slope);
    read_each<C>(coefficients + plan.columns, channels, level);
  }
  reader.backwards([&](const auto& item, int64_t at) {
    C g[kLanes], from_mean[kLanes];
    gradient_of(p, factors, act, item, false, g, from_mean);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      g[i] = (fma(-slope[i], from_mean[i], g[i]) - level[i]) * factors.scale[i];
    store(static_cast<T*>(p.grad_x) + at, g);
  });
}

}  // namespace

Status launch_resident(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                       CUstream_st* stream) {
  const ChannelPlan& plan = pass.plan;
  return with_resident_access(p.dtype, [&](auto access) {
    using Access = decltype(access);
    using C = typename Access::C;
    const auto sums = static_cast<size_t>(plan.parts * plan.columns) * 2;
    C* const partial = static_cast<C*>(allocate(sums * sizeof(C)));
    const auto launch = [&](auto act) {
      return launch_overlapped(resident_backward<Access, decltype(act)>, resident_grid(plan),
                               stream, p, plan, act, partial);
    };
    if (p.second != nullptr) return launch(ReluOfSum<MathFor<typename Access::T>>{});
    return with_channel_activation<Access>(p.activation, launch);
  });
}

}  // namespace torchkiln::cuda
