#pragma once

// Launch of the streaming gradients of norms, for the files that compile it for one dtype each.

#include "backward_streaming_kernel.cuh"
#include "detail/reduce/columns.cuh"

namespace torchkiln::cuda::norm_gradients {

using namespace reduce;
namespace {

int result_count(const NormBackward& p) {
  return (p.grad_weight != nullptr ? 1 : 0) + (p.grad_bias != nullptr ? 1 : 0);
}

template <class Access, bool kCentered, bool kAdds, int kStages>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  using C = Compute<typename Access::T>;
  const Grid grid{dim3(static_cast<unsigned>(plan.teams << plan.team.log_blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), plan.team.blocks(),
                  plan.shared_bytes};
  const auto sums = static_cast<size_t>(plan.teams * p.columns * result_count(p));
  C* partial = static_cast<C*>(allocate(sums * sizeof(C)));
  const Status status = launch_overlapped(stream_rows<Access, kCentered, kAdds, kStages>, grid,
                                          stream, p, plan.team, partial);
  const columns::Plan columns{1, 1, 1, plan.teams, p.rows, p.columns};
  if (!status.ok() || result_count(p) == 0) return status;
  const Result weight{p.grad_weight, p.weight_dtype, 1};
  const Result bias{p.grad_bias, p.weight_dtype, 1};
  if (result_count(p) == 2)
    return columns::queue_finish(static_cast<const C*>(partial), columns, weight, &bias, stream);
  return columns::queue_finish(static_cast<const C*>(partial), columns,
                               p.grad_weight == nullptr ? bias : weight, nullptr, stream);
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
