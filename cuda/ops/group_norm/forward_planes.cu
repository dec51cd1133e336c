// Computes y from the statistics, for channels that are planes of adjacent elements: see
// planes.cuh.

#include "launch.cuh"
#include "planes.cuh"

namespace torchkiln::cuda {
namespace {

template <class Access>
using OutputStreams = ChannelStreams<Access, 1, false>;

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kGroupOutputBlocks)
    plane_outputs(GroupNorm p, PlanePlan plan, Act act) {
  using T = typename Access::T;
  wait_for_previous_kernel();
  const OutputStreams<Access> streams{{static_cast<const T*>(p.x)}, nullptr, 0};
  PlaneReader<true, OutputStreams<Access>> reader(plan, streams);
  ChannelFactors<Access> factors{};
  T* const y = static_cast<T*>(p.y);
  reader.each(
      [&](int64_t plane) {
        const PlaneOf of(p.layout, plane);
        load_factors(p, of.sample, of.channels, factors);
      },
      [&](const auto& item, int64_t at) { write_output(factors, act, item.of[0], y + at); },
      [](int64_t) {});
}

}  // namespace

Status group_outputs_of_planes(const GroupNorm& p, const PlanePass& pass, CUstream_st* stream) {
  return with_planes(p, pass, [&](auto access, auto act, Grid& grid) {
    using Access = decltype(access);
    grid.shared_bytes = OutputStreams<Access>::kSharedBytes;
    return launch_overlapped(plane_outputs<Access, decltype(act)>, grid, stream, p, pass.plan, act);
  });
}

}  // namespace torchkiln::cuda
