#pragma once

// Launch of the streaming gradients of norms, for the files that compile it for one dtype each.

#include "backward_finish.cuh"
#include "backward_streaming_kernel.cuh"

namespace torchkiln::cuda::norm_gradients {

namespace {

template <class Access, bool kCentered, bool kAdds, int kStages>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  using C = Compute<typename Access::T>;
  const Grid grid{dim3(static_cast<unsigned>(plan.teams << plan.team.log_blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), plan.team.blocks(),
                  plan.shared_bytes};
  C* const partial = allocate_partials<C>(p, plan.teams, allocate);
  const Status status = launch_overlapped(stream_rows<Access, kCentered, kAdds, kStages>, grid,
                                          stream, p, plan.team, partial);
  return status.ok() ? finish_partials(p, plan.teams, partial, stream) : status;
}

template <class Access>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  const auto launch_centered = [&](auto centered) {
    const auto with_sum = [&](auto adds) {
      return plan.stages == 3 ? launch_stream<Access, centered, adds, 3>(p, plan, allocate, stream)
                              : launch_stream<Access, centered, adds, 2>(p, plan, allocate, stream);
    };
    return p.grad_sum == nullptr ? with_sum(std::false_type{}) : with_sum(std::true_type{});
  };
  return p.centered ? launch_centered(std::true_type{}) : launch_centered(std::false_type{});
}

}  // namespace

template <class T>
Status stream(const NormBackward& p, Alignment alignment, const StreamPlan& plan, Allocate allocate,
              CUstream_st* stream) {
  if constexpr (sizeof(T) < 8) {
    if (alignment == Alignment::shared_offset)
      return launch_stream<RowVectors<T, kVectorLanes<T>, false>>(p, plan, allocate, stream);
  }
  return launch_stream<RowVectors<T, kVectorLanes<T>, true>>(p, plan, allocate, stream);
}

}  // namespace torchkiln::cuda::norm_gradients
