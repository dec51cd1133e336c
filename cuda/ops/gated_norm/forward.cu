// RMS norm of the groups of a token, and their gate, in one pass over x and gate. A team of threads
// holds a group in registers, sums the squares and writes the product: one plan for all groups that
// a team can hold. For longer groups, where holds_rows() is false, cpp/ops/gated_norm composes
// other ops. forward_by_dtype.cuh has the kernel, common.cuh the order of the groups.

#include "common.cuh"

namespace torchkiln::cuda {

bool holds_rows(const GatedNorm& p) {
  return choose(p, alignment_of_groups(p), current_device()).has_value();
}

Status gated_norm(const GatedNorm& p, CUstream_st* stream) {
  if (p.tokens == 0 || p.groups == 0 || p.columns == 0) return {};
  const auto plan = choose(p, alignment_of_groups(p), current_device());
  if (!plan) return {kNotHeld};
  return dispatch_floating(p.dtype, [&](auto tag) {
    return GatedNormForwardByDtype<typename decltype(tag)::type>::launch(p, *plan, stream);
  });
}

}  // namespace torchkiln::cuda
