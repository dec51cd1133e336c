#include "forward.cuh"

namespace torchkiln::cuda {

extern template Status gated_norm_of<__half>(const GatedNorm&, Alignment, CUstream_st*);
extern template Status gated_norm_of<__nv_bfloat16>(const GatedNorm&, Alignment, CUstream_st*);

namespace {

Alignment forward_alignment(const GatedNorm& p) {
  const TensorRows tensors[] = {
      {p.x, p.x_stride}, {p.gate, p.gate_stride}, {p.y, p.groups * p.columns}};
  return alignment_of_groups(p, tensors);
}

}  // namespace

bool holds_rows(const GatedNorm& p) {
  const Status status = dispatch_floating(p.dtype, [&](auto tag) {
    return with_rows<typename decltype(tag)::type>(p, forward_alignment(p),
                                                   [](auto, const TeamShape&) { return Status{}; });
  });
  return status.ok();
}

Status gated_norm(const GatedNorm& p, CUstream_st* stream) {
  if (p.tokens == 0 || p.groups == 0 || p.columns == 0) return {};
  return dispatch_floating(p.dtype, [&](auto tag) {
    return gated_norm_of<typename decltype(tag)::type>(p, forward_alignment(p), stream);
  });
}

}  // namespace torchkiln::cuda
