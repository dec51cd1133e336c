#pragma once

// Partial sums of the columns, and the kernel that adds them to the gradients of weight and bias.

#include "backward_common.cuh"
#include "detail/reduce/columns.cuh"

namespace torchkiln::cuda::norm_gradients {

using namespace reduce;
namespace {

int result_count(const NormBackward& p) {
  return (p.grad_weight != nullptr ? 1 : 0) + (p.grad_bias != nullptr ? 1 : 0);
}

/// Allocates `chunks` rows of partial sums per gradient.
template <class C>
C* allocate_partials(const NormBackward& p, int64_t chunks, Allocate allocate) {
  return static_cast<C*>(
      allocate(static_cast<size_t>(chunks * p.columns * result_count(p)) * sizeof(C)));
}

template <class C>
Status finish_partials(const NormBackward& p, int64_t chunks, const C* partial,
                       CUstream_st* stream) {
  if (result_count(p) == 0) return {};
  const columns::Plan plan{1, 1, 1, chunks, p.rows, p.columns};
  const Result weight{p.grad_weight, p.weight_dtype, 1};
  const Result bias{p.grad_bias, p.weight_dtype, 1};
  if (result_count(p) == 2) return columns::queue_finish(partial, plan, weight, &bias, stream);
  return columns::queue_finish(partial, plan, p.grad_weight == nullptr ? bias : weight, nullptr,
                               stream);
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
