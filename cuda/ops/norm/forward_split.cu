#include "forward_split.cuh"

#include "forward_split_kernel.cuh"

namespace torchkiln::cuda {

Status split_norm(const Norm& p, Allocate allocate, CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GridPlan plan =
        make_grid_plan(p.rows, p.columns, kVectorLanes<T>, kNormSplitRows, kNormSplitVectors);
    Compute<T>* exchange = nullptr;
    const Status status =
        allocate_exchange(plan, p.rows, p.centered ? 3 : 1, allocate, stream, exchange);
    if (!status.ok()) return status;
    const auto kernel = p.centered ? norm_split_rows<T, true> : norm_split_rows<T, false>;
    return launch_overlapped(kernel, make_grid(plan), stream, p, plan, exchange);
  });
}

}  // namespace torchkiln::cuda
