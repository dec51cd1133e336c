#pragma once

// Selects the kernel for a sum over the middle dimension of [outer, reduced, inner]: reduction.cu
// has the table. Includes no header of CUDA.

#include <algorithm>
#include <numeric>

#include "detail/reduce/plans.h"
#include "torchkiln/kernels/reduction.h"

namespace torchkiln::cuda {

/// Blocks per SM. A sum needs few registers, so four blocks fit, with 64 KiB or more in flight per
/// SM.
inline constexpr int kColumnBlocks = 4;
/// Fewest rows per fold. Each folded column costs a partial sum, so there must be many rows to add.
/// Narrow rows gain more from folding: if they were read element by element, most of each memory
/// access would be unused.
inline constexpr int64_t kNarrowColumns = 32;
inline constexpr int64_t kFewestFoldsOfNarrow = 4;
inline constexpr int64_t kFewestFolds = 32;

/// The access to columns: in vectors of `lanes` elements, with `fold` rows read as one.
struct ColumnAccess {
  int lanes = 1;
  int fold = 1;
};

struct ReductionPlan {
  bool in_rows;  // else in columns
  reduce::rows::Shape shape;
  reduce::rows::Plan rows;
  ColumnAccess access;
  reduce::columns::Plan columns;
};

/// Whether the reduced dimension has the smaller stride, so that rows are summed.
inline bool is_rows(const Reduction& p) {
  return p.inner == 1 || p.reduced_stride <= p.inner_stride;
}

/// Whether one block sums columns in vectors of less than 16 bytes before a second kernel could
/// start: with at most 64 rows per thread, eight rounds of loads.
inline bool suits_one_block(const Reduction& p, int lanes) {
  const int64_t vectors = p.outer * p.inner / lanes;
  return lanes < device::vector_lanes(p.dtype) && vectors <= reduce::columns::kThreadsX &&
         p.reduced <= 64 * (reduce::columns::kThreads / vectors);
}

/// Selects the widest vectors that divide every row of a batch. If these are narrower than 16 bytes
/// and the rows are dense, `fold` rows are read as one row whose length is a multiple of 16 bytes;
/// their sums are added at the end.
inline ColumnAccess column_access(const Reduction& p) {
  if (is_rows(p) || p.inner_stride != 1) return {};
  const int64_t widest = device::vector_lanes(p.dtype);
  const int64_t batch_stride = p.outer == 1 ? 0 : p.outer_stride;
  const int lanes = device::widest_lanes(p.in, p.dtype, {p.inner, p.reduced_stride, batch_stride});
  const ColumnAccess access{lanes};
  if (lanes == widest || suits_one_block(p, lanes) || p.reduced_stride != p.inner ||
      !device::rows_in_vectors(p.in, widest, {batch_stride})) {
    return access;
  }
  int64_t fold = widest / std::gcd(p.inner, widest);
  if (p.reduced < fold * (p.inner < kNarrowColumns ? kFewestFoldsOfNarrow : kFewestFolds))
    return access;
  while (p.inner * fold < kNarrowColumns * widest / 2 && p.reduced >= 2 * kFewestFolds * fold)
    fold *= 2;
  return {static_cast<int>(widest), static_cast<int>(fold)};
}

/// Gives blocks more rows as long as the second kernel, which adds `fold` sums of every block,
/// would take longer than the first. With 5 columns, the second kernel is a single block.
inline void balance_folded(reduce::columns::Plan& plan) {
  // A thread of the first kernel loads kRows rows at once; the second loads kSums sums of a column.
  constexpr int64_t kSums = 512;
  constexpr int64_t kRows = reduce::columns::kMinRows;
  const auto rounds = [&] { return plan.rows / (plan.chunks * plan.threads_y * kRows); };
  while (plan.chunks > 1 && plan.chunks * plan.fold / kSums > 2 * rounds()) plan.chunks /= 2;
}

/// The largest batch of one launch: the kernels locate rows and columns by 32-bit division.
inline int64_t largest_batch(const Reduction& p) {
  if (p.outer == 1 || p.inner == 1) return p.outer;
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  return std::max<int64_t>(kMax / (p.inner * column_access(p).fold), 1);
}

/// The plan of a batch of at most largest_batch() matrices.
inline ReductionPlan choose(const Reduction& p, const device::Device& device) {
  ReductionPlan plan{};
  plan.in_rows = is_rows(p);
  if (plan.in_rows) {
    plan.shape = {p.in,           static_cast<int64_t>(size_of(p.dtype)),
                  p.outer,        p.inner,
                  p.reduced,      p.outer_stride,
                  p.inner_stride, p.reduced_stride};
    plan.rows = reduce::rows::make_plan(plan.shape, device);
    return plan;
  }
  plan.access = column_access(p);
  const int fold = plan.access.fold;
  plan.columns = reduce::columns::make_plan(p.reduced / fold, p.outer * p.inner * fold,
                                            plan.access.lanes, kColumnBlocks, device);
  plan.columns.fold = fold;
  plan.columns.period = p.inner;
  if (fold > 1) balance_folded(plan.columns);
  if (suits_one_block(p, plan.access.lanes)) plan.columns.chunks = 1;
  return plan;
}

}  // namespace torchkiln::cuda
