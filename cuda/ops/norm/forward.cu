#include "forward.cuh"
#include "forward_slabs.cuh"

namespace torchkiln::cuda {

extern template Status norm_rows_of<__half>(const Norm&, Alignment, Allocate, CUstream_st*);
extern template Status norm_rows_of<__nv_bfloat16>(const Norm&, Alignment, Allocate, CUstream_st*);

Status norm(const Norm& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  const TensorRows tensors[] = {
      {p.x, p.x_row_stride},
      {p.residual_dtype == p.dtype ? p.residual : nullptr, p.residual_row_stride},
      {p.sum, p.columns},
      {p.y, p.columns}};
  Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  const norm_slabs::SlabPlan slabs = plan_norm_slabs(p, alignment);
  if (slabs.blocks > 0) return norm_in_slabs(p, alignment, slabs, allocate, stream);
  if (!aligned(p.weight) || !aligned(p.bias)) alignment = Alignment::scalar;
  if (p.residual_dtype != p.dtype && alignment == Alignment::vector &&
      !rows_in_vectors(p.residual, vector_lanes(p.dtype), {p.columns, p.residual_row_stride}))
    alignment = Alignment::scalar;
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return norm_rows_of<T>(p, alignment, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
