#include "backward.cuh"

namespace torchkiln::cuda {

extern template Status gated_norm_gradients_of<__half>(const GatedNormBackward&, Alignment,
                                                       Allocate, CUstream_st*);
extern template Status gated_norm_gradients_of<__nv_bfloat16>(const GatedNormBackward&, Alignment,
                                                              Allocate, CUstream_st*);

namespace {

Alignment backward_alignment(const GatedNormBackward& p) {
  const int64_t elements = p.groups * p.columns;
  const TensorRows tensors[] = {{p.grad, p.grad_stride},
                                {p.x, p.x_stride},
                                {p.gate, p.gate_stride},
                                {p.grad_x, elements},
                                {p.grad_gate, elements}};
  return alignment_of_groups(p, tensors);
}

}  // namespace

bool holds_rows(const GatedNormBackward& p) {
  const Status status = dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_gradient_tile<T>(backward_alignment(p), [&](auto tile) {
      const bool held = plan_gradients<typename decltype(tile)::type>(p).chunks > 0;
      return held ? Status{} : Status{kNotHeld};
    });
  });
  return status.ok();
}

Status gated_norm_backward(const GatedNormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.tokens == 0 || p.groups == 0 || p.columns == 0) return {};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return gated_norm_gradients_of<T>(p, backward_alignment(p), allocate, stream);
  });
}

}  // namespace torchkiln::cuda
