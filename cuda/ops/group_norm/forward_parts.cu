// Computes y from the statistics, for groups that several blocks share: see parts.cuh.

#include "parts.cuh"

namespace torchkiln::cuda {
namespace {

template <class T, int kLanes, class Act>
__global__ void __launch_bounds__(kGroupPartThreads, kGroupPartBlocks)
    part_outputs(GroupNorm p, PartRows rows, Act act) {
  using C = Compute<T>;
  using Vector = Vec<T, kLanes>;
  constexpr int kCount = kVectorsInFlight<Vector, Act>;
  wait_for_previous_kernel();
  const GroupPart<T, kLanes> part(rows, p.layout);
  const C* const statistics = static_cast<const C*>(p.statistics) + part.statistics();
  const C mean = statistics[0], low = statistics[rows.all], rstd = statistics[2 * rows.all];
  const T* const x = static_cast<const T*>(p.x) + part.group() * p.layout.count();
  T* const y = static_cast<T*>(p.y) + part.group() * p.layout.count();
  Vector items[kCount];
  part.template each<kCount>([&](int k, int64_t at) { items[k] = load_vector<kLanes>(x + at); },
                             [&](int k, int64_t at) {
                               C z[kLanes], weight[kLanes], scale[kLanes], shift[kLanes];
                               part.parameters(p, at, weight, shift);
                               set_factors(low, rstd, weight, scale, shift);
                               widen(items[k], z);
#pragma unroll
                               for (int i = 0; i < kLanes; ++i)
                                 z[i] = fma(z[i] - mean, scale[i], shift[i]);
                               act.apply(z);
                               store(y + at, z);
                             });
}

}  // namespace

Status group_outputs_of_parts(const GroupNorm& p, const GroupPartPlan& plan, int64_t pixels,
                              CUstream_st* stream) {
  return with_group_parts(p, plan, [&](auto tag, auto lanes, auto act, const Grid& grid) {
    using T = typename decltype(tag)::type;
    return launch_overlapped(part_outputs<T, decltype(lanes)::value, decltype(act)>, grid, stream,
                             p, part_rows(p, plan, pixels), act);
  });
}

}  // namespace torchkiln::cuda
