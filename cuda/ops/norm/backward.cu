#include "backward_bulk_plan.cuh"
#include "backward_few_rows.cuh"
#include "backward_slabs.cuh"
#include "backward_split.cuh"
#include "backward_streaming_plan.cuh"

namespace torchkiln::cuda {

using namespace norm_gradients;
namespace {

Alignment backward_alignment(const NormBackward& p) {
  const TensorRows tensors[] = {{p.grad, p.grad_row_stride},
                                {p.z, p.z_row_stride},
                                {p.grad_sum, p.grad_sum_row_stride},
                                {p.grad_x, p.columns}};
  const Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  return alignment == Alignment::vector && !aligned(p.weight) ? alignment_with_offset(p.dtype)
                                                              : alignment;
}

}  // namespace

Status norm_backward(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  const Alignment alignment = backward_alignment(p);
  if (has_few_rows(p, alignment)) return few_rows(p, stream);
  const BulkPlan bulk_plan = plan_bulk(p, alignment);
  if (bulk_plan.blocks > 0) return bulk(p, bulk_plan, allocate, stream);
  const norm_slabs::SlabPlan slab_plan = plan_slabs(p, alignment);
  const StreamPlan plan = plan_stream(p, alignment);
  if (slab_plan.blocks > 0 && prefers_slabs(p, alignment, plan.teams > 0))
    return slabs(p, alignment, slab_plan, allocate, stream);
  if (plan.teams == 0) return split(p, allocate, stream);
  return dispatch_floating(p.dtype, [&](auto tag) {
    return norm_gradients::stream<typename decltype(tag)::type>(p, alignment, plan, allocate,
                                                                stream);
  });
}

}  // namespace torchkiln::cuda
