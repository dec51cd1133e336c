#pragma once

// Selects the kernel for the backward of dropout with a bias: bias_backward.cu has the table.
// Includes no header of CUDA.

#include <numeric>

#include "detail/reduce/plans.h"
#include "torchkiln/kernels/dropout.h"

namespace torchkiln::cuda {

/// Blocks per SM. Philox takes much arithmetic: more threads, with fewer rows in flight per thread.
inline constexpr int kDropoutBlocks = 3;
constexpr int dropout_rows_in_flight(int lanes) { return lanes > 1 ? 2 : 4; }

/// Fewest folded rows, of `fold` rows each. With fewer, the rows that are left over would take too
/// long.
inline constexpr int64_t kFewestDropoutFolds = 8;
/// Fewest elements whose Philox draws, one for each, take longer than the sums of folded columns.
inline constexpr int64_t kManyDraws = 1 << 21;

/// One pass over rows, or over `fold` adjacent rows as one: in vectors of `lanes` elements, or in
/// single ones.
struct DropoutPlan {
  int lanes;
  reduce::columns::Plan columns;
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
  if (in_vectors) return plan_of(widest, 1);
  const DropoutPlan single = plan_of(1, 1);
  // A single element takes a Philox draw of its own, which serves a whole vector as well. Folded
  // sums need the second kernel.
  const int fold = widest / static_cast<int>(std::gcd(p.columns, int64_t{widest}));
  const bool is_dense = p.grad_column_stride == 1 && p.grad_row_stride == p.columns &&
                        device::aligned(p.grad) && device::aligned(p.grad_x);
  const bool pays = !single.columns.is_single_pass() || p.rows * p.columns >= kManyDraws;
  return is_dense && pays && p.rows >= kFewestDropoutFolds * fold ? plan_of(widest, fold) : single;
}

}  // namespace torchkiln::cuda
