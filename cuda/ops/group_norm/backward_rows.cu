// Sums and grad_x of adjacent channels (channels_last): see rows.cuh.

#include "launch.cuh"
#include "rows.cuh"

namespace torchkiln::cuda {
namespace {

template <class Access, class... Sum>
using GradientStreams = ChannelStreams<Access, 2, false, Sum...>;

template <class Access>
using SumStreams = GradientStreams<Access, typename Access::C, typename Access::C>;

/// Partial sums of g and of g * (x - mean) for each channel: [samples, parts, 2, channels].
template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kGroupBackwardBlocks)
    row_sums(GroupNormBackward p, ChannelPlan plan, Act act, typename Access::C* partial) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const ChannelCursor<Access> cursor(plan);
  for_each_sample(p.layout, [&](int64_t sample, int64_t first) {
    const SumStreams<Access> streams{
        {static_cast<const T*>(p.grad) + first, static_cast<const T*>(p.x) + first}, nullptr, 0};
    ChannelReader<false, SumStreams<Access>> reader(cursor, streams);
    ChannelFactors<Access> factors{};
    if (cursor.is_inside()) load_factors(p, sample, cursor, factors);
    C sums[2][kLanes] = {};
    reader.each([&](const auto& item, int64_t) {
      C g[kLanes], from_mean[kLanes];
      argument_gradient(factors, act, item, g, from_mean);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        sums[0][i] += g[i];
        sums[1][i] = fma(g[i], from_mean[i], sums[1][i]);
      }
    });
    C* const to = partial + (sample * plan.parts + blockIdx.y) * 2 * plan.columns;
    add_threads<Access>(plan, sums, [&](int64_t column, const C(&total)[2]) {
      to[column] = total[0];
      to[plan.columns + column] = total[1];
    });
  });
}

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kGroupBackwardBlocks)
    row_input_gradients(GroupNormBackward p, ChannelPlan plan, Act act,
                        const typename Access::C* coefficients) {
  using T = typename Access::T;
  wait_for_previous_kernel();
  const ChannelCursor<Access> cursor(plan);
  for_each_sample(p.layout, [&](int64_t sample, int64_t first) {
    if (!cursor.is_inside()) return;
    const GradientStreams<Access> streams{
        {static_cast<const T*>(p.grad) + first, static_cast<const T*>(p.x) + first}, nullptr, 0};
    ChannelReader<true, GradientStreams<Access>> reader(cursor, streams);
    InputGradient<Access> gradient;
    gradient.load(p, coefficients, sample, cursor);
    T* const grad_x = static_cast<T*>(p.grad_x) + first;
    reader.each([&](const auto& item, int64_t at) { gradient.write(item, act, grad_x + at); });
  });
}

template <class Body>
Status with_gradient_rows(const GroupNormBackward& p, const ChannelPass& pass, const Body& body) {
  return with_rows(p, pass, [&](auto access, Grid& grid) {
    return with_group_activation<decltype(access)>(
        p.activation, [&](auto act) { return body(access, act, grid); });
  });
}

}  // namespace

Status group_sums_of_rows(const GroupNormBackward& p, const ChannelPass& pass, Allocate allocate,
                          CUstream_st* stream, GroupParts& parts) {
  const ChannelPlan& plan = pass.plan;
  return with_gradient_rows(p, pass, [&](auto access, auto act, Grid& grid) {
    using Access = decltype(access);
    using C = typename Access::C;
    const auto sums = 2 * static_cast<size_t>(p.layout.batch * plan.parts * plan.columns);
    auto* const partial = static_cast<C*>(allocate(sums * sizeof(C)));
    parts = {partial, plan.parts, plan.parts * 2 * plan.columns, 1, 2 * plan.columns, plan.columns};
    grid.shared_bytes = SumStreams<Access>::kSharedBytes;
    return launch_overlapped(row_sums<Access, decltype(act)>, grid, stream, p, plan, act, partial);
  });
}

Status group_input_gradients_of_rows(const GroupNormBackward& p, const ChannelPass& pass,
                                     const void* coefficients, CUstream_st* stream) {
  return with_gradient_rows(p, pass, [&](auto access, auto act, Grid& grid) {
    using Access = decltype(access);
    grid.shared_bytes = GradientStreams<Access>::kSharedBytes;
    return launch_overlapped(row_input_gradients<Access, decltype(act)>, grid, stream, p, pass.plan,
                             act, static_cast<const typename Access::C*>(coefficients));
  });
}

}  // namespace torchkiln::cuda
