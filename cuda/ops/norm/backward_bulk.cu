#include "backward_bulk_kernel.cuh"
#include "backward_finish.cuh"

namespace torchkiln::cuda::norm_gradients {

Status bulk(const NormBackward& p, const BulkPlan& plan, Allocate allocate, CUstream_st* stream) {
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), 1, plan.shared_bytes};
  float* const partial = allocate_partials<float>(p, plan.blocks, allocate);
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan.team, plan.stages, partial);
  };
  const Status status = dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (plan.vectors == kLongBulkVectors)
      return launch(bulk_rows<T, kLongBulkVectors, false, false>);
    const auto launch_centered = [&](auto centered) {
      return p.grad_sum == nullptr ? launch(bulk_rows<T, kBulkVectors, centered, false>)
                                   : launch(bulk_rows<T, kBulkVectors, centered, true>);
    };
    return p.centered ? launch_centered(std::true_type{}) : launch_centered(std::false_type{});
  });
  return status.ok() ? finish_partials(p, plan.blocks, partial, stream) : status;
}

}  // namespace torchkiln::cuda::norm_gradients
