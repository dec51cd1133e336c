#pragma once

// Selects the kernel for the backward of dropout with a bias: bias_backward.cu has the table.
// Includes no header of CUDA.

#include <numeric>

#include "detail/reduce/plans.h"
#include "torchkiln/kernels/dropout.h"

namespace torchkiln::cuda {

/// Blocks per SM. Philox takes much arithmetic, so more threads help; they leave registers for
/// fewer rows in flight per thread.
inline constexpr int kDropoutBlocks = 3;
constexpr int dropout_rows_in_flight(int lanes) { return lanes > 1 ? 2 : 4; }

/// Fewest folded rows, of `fold` rows each. With fewer, the remaining rows, which are read element
/// by element, would take too long.
inline constexpr int64_t kFewestDropoutFolds = 8;
/// Fewest elements for which folding is faster than one Philox draw per element, although folded
/// sums need a second kernel.
inline constexpr int64_t kManyDraws = 1 << 21;

/// One pass over all rows, or over groups of `fold` adjacent rows that are read as one row: in
/// vectors of `lanes` elements, or in single elements. With `one_row` both gradients are equal, and
/// an elementwise kernel computes them.
struct DropoutPlan {
  int lanes;
  reduce::columns::Plan columns;
  bool one_row = false;
};

inline DropoutPlan choose(const DropoutBackward& p, const device::Device& device) {
  const int widest = device::vector_lanes(p.dtype);
  const bool in_vectors = p.grad_column_stride == 1 &&
                          device::rows_in_vectors(p.grad, widest, {p.columns, p.grad_row_stride}) &&
                          device::aligned(p.grad_x);
  const auto plan_of = [&](int lanes, int fold) {
    DropoutPlan plan{lanes, reduce::columns::make_plan(p.rows / fold, p.columns * fold, lanes,
                                                       kDropoutBlocks, device)};
    plan.columns.fold = fold;
    plan.columns.period = p.columns;
    return plan;
  };
  if (p.rows == 1 && p.columns >= reduce::columns::kLongRow && p.bias_dtype == p.dtype) {
    DropoutPlan plan = plan_of(in_vectors ? widest : 1, 1);
    plan.one_row = true;
    return plan;
  }
  if (in_vectors) return plan_of(widest, 1);
  const DropoutPlan single = plan_of(1, 1);
  // Without vectors each element takes a Philox draw of its own; with vectors, one draw serves a
  // vector. Folded rows have vectors, but their sums need a second kernel.
  const int fold = widest / static_cast<int>(std::gcd(p.columns, int64_t{widest}));
  const bool is_dense = p.grad_column_stride == 1 && p.grad_row_stride == p.columns &&
                        device::aligned(p.grad) && device::aligned(p.grad_x);
  const bool pays = !single.columns.is_single_pass() || p.rows * p.columns >= kManyDraws;
  return is_dense && pays && p.rows >= kFewestDropoutFolds * fold ? plan_of(widest, fold) : single;
}

}  // namespace torchkiln::cuda
