// Sums and grad_x of channels that are planes of adjacent elements: see planes.cuh.

#include "launch.cuh"
#include "planes.cuh"

namespace torchkiln::cuda {
namespace {

template <class Access>
using GradientStreams = ChannelStreams<Access, 2, false>;

template <class Access>
__device__ __forceinline__ GradientStreams<Access> gradient_streams(const GroupNormBackward& p) {
  using T = typename Access::T;
  return {{static_cast<const T*>(p.grad), static_cast<const T*>(p.x)}, nullptr, 0};
}

/// Sums of g and of g * (x - mean) for each segment: [2, segments of all planes].
template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kGroupBackwardBlocks)
    plane_sums(GroupNormBackward p, PlanePlan plan, Act act, typename Access::C* partial) {
  using C = typename Access::C;
  wait_for_previous_kernel();
  const auto streams = gradient_streams<Access>(p);
  PlaneReader<false, GradientStreams<Access>> reader(plan, streams);
  ChannelFactors<Access> factors{};
  C sum = 0, product = 0;
  reader.each(
      [&](int64_t plane) {
        const PlaneOf of(p.layout, plane);
        load_factors(p, of.sample, of.channels, factors);
      },
      [&](const auto& item, int64_t) {
        C g[Access::kLanes], from_mean[Access::kLanes];
        argument_gradient(factors, act, item, g, from_mean);
#pragma unroll
        for (int i = 0; i < Access::kLanes; ++i) {
          sum += g[i];
          product = fma(g[i], from_mean[i], product);
        }
      },
      [&](int64_t row) {
        for (int other = plan.threads / 2; other > 0; other /= 2) {
          sum += __shfl_xor_sync(~0u, sum, other);
          product += __shfl_xor_sync(~0u, product, other);
        }
        if (row >= 0 && static_cast<int>(threadIdx.x) % plan.threads == 0) {
          partial[row] = sum;
          partial[plan.rows() + row] = product;
        }
        sum = product = 0;
      });
}

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kGroupBackwardBlocks)
    plane_input_gradients(GroupNormBackward p, PlanePlan plan, Act act,
                          const typename Access::C* coefficients) {
  using T = typename Access::T;
  wait_for_previous_kernel();
  const auto streams = gradient_streams<Access>(p);
  PlaneReader<true, GradientStreams<Access>> reader(plan, streams);
  InputGradient<Access> gradient{};
  T* const grad_x = static_cast<T*>(p.grad_x);
  reader.each(
      [&](int64_t plane) {
        const PlaneOf of(p.layout, plane);
        gradient.load(p, coefficients, of.sample, of.channels);
      },
      [&](const auto& item, int64_t at) { gradient.write(item, act, grad_x + at); },
      [](int64_t) {});
}

}  // namespace

Status group_sums_of_planes(const GroupNormBackward& p, const PlanePass& pass, Allocate allocate,
                            CUstream_st* stream, GroupParts& parts) {
  const PlanePlan& plan = pass.plan;
  return with_planes(p, pass, [&](auto access, auto act, Grid& grid) {
    using Access = decltype(access);
    using C = typename Access::C;
    auto* const partial =
        static_cast<C*>(allocate(2 * static_cast<size_t>(plan.rows()) * sizeof(C)));
    parts = {partial, plan.segments, p.layout.channels * plan.segments, plan.segments,
             1,       plan.rows()};
    grid.shared_bytes = GradientStreams<Access>::kSharedBytes;
    return launch_overlapped(plane_sums<Access, decltype(act)>, grid, stream, p, plan, act,
                             partial);
  });
}

Status group_input_gradients_of_planes(const GroupNormBackward& p, const PlanePass& pass,
                                       const void* coefficients, CUstream_st* stream) {
  return with_planes(p, pass, [&](auto access, auto act, Grid& grid) {
    using Access = decltype(access);
    grid.shared_bytes = GradientStreams<Access>::kSharedBytes;
    return launch_overlapped(plane_input_gradients<Access, decltype(act)>, grid, stream, p,
                             pass.plan, act, static_cast<const typename Access::C*>(coefficients));
  });
}

}  // namespace torchkiln::cuda
