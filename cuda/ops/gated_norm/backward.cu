// Gradients of gated norms in one pass: a team processes the tokens of its group one by one and
// keeps the sums of its columns in registers. A second kernel adds the sums of all blocks. One plan
// serves all groups that fit in the registers of a block; for longer groups cpp/ops/gated_norm
// composes other ops. backward_by_dtype.cuh has the kernel, common.cuh the order of the groups.

#include "common.cuh"

namespace torchkiln::cuda {

bool holds_rows(const GatedNormBackward& p) {
  return choose(p, alignment_of_groups(p), current_device()).has_value();
}

Status gated_norm_backward(const GatedNormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.tokens == 0 || p.groups == 0 || p.columns == 0) return {};
  const auto plan = choose(p, alignment_of_groups(p), current_device());
  if (!plan) return {kNotHeld};
  return dispatch_floating(p.dtype, [&](auto tag) {
    return GatedNormBackwardByDtype<typename decltype(tag)::type>::launch(p, *plan, allocate,
                                                                          stream);
  });
}

}  // namespace torchkiln::cuda
