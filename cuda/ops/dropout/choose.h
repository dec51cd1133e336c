#pragma once

// Selects the kernel for the backward of dropout with a bias: bias_backward.cu has the table.
// Includes no header of CUDA.

#include "detail/reduce/plans.h"
#include "torchkiln/kernels/dropout.h"

namespace torchkiln::cuda {

/// Blocks per SM. Philox takes much arithmetic: more threads, with fewer rows in flight per thread.
inline constexpr int kDropoutBlocks = 3;
constexpr int dropout_rows_in_flight(int lanes) { return lanes > 1 ? 2 : 4; }

/// One pass over rows: in vectors of `lanes` elements, or in single ones.
struct DropoutPlan {
  int lanes;
  reduce::columns::Plan columns;
};

inline DropoutPlan choose(const DropoutBackward& p, const device::Device& device) {
  const int widest = device::vector_lanes(p.dtype);
  const bool in_vectors = p.grad_column_stride == 1 &&
                          device::rows_in_vectors(p.grad, widest, {p.columns, p.grad_row_stride}) &&
                          device::aligned(p.grad_x);
  const int lanes = in_vectors ? widest : 1;
  return {lanes, reduce::columns::make_plan(p.rows, p.columns, lanes, kDropoutBlocks, device)};
}

}  // namespace torchkiln::cuda
