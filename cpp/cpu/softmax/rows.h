#pragma once

// Loops over rows, or over adjacent rows as columns, for softmax and its gradient.

#include <algorithm>

#include "detail/row_mask.h"
#include "detail/simd_exp.h"
#include "detail/simd_row.h"
#include "softmax/columns.h"
#include "torchkiln/cpu/isa.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Adjacent rows are computed side by side, as columns, if enough of them lie along the innermost
// dimension, or if rows are too short to fill the registers.
constexpr int64_t kMinColumns = 16;
constexpr int64_t kMinNeighbours = 8;
constexpr int64_t kShort = 16;
// With at least this many rows along the innermost dimension, a group of columns ends where that
// dimension ends.
constexpr int64_t kManyNeighbours = 64;

/// Selects one of two values. Both are computed before, because g++ does not vectorise a loop with
/// a branch.
template <class C>
TORCHKILN_FUNCTION C where(bool condition, C yes, C no) {
  return condition ? yes : no;
}

/// Sets to[i * stride] to `value` for begin <= i < end.
template <class T>
void fill(T* to, int64_t stride, int64_t begin, int64_t end, Compute<T> value) {
  T rounded;
  narrow_run(&rounded, &value, 1);
  for (int64_t i = begin; i < end; ++i) to[i * stride] = rounded;
}

/// Calls row(x_offset, y_offset, range) for each of the rows begin <= row < end, or columns(row,
/// count) for groups of rows that are computed as columns.
template <class Arguments, class RowBody, class ColumnBody>
void for_rows(const Arguments& p, int64_t begin, int64_t end, const RowBody& row,
              const ColumnBody& columns) {
  const bool has_columns = !p.mask.any() && p.outer * p.inner >= kMinColumns &&
                           (p.inner >= kMinNeighbours || p.length <= kShort);
  if (has_columns) {
    for (int64_t at = begin; at < end;) {
      const int64_t limit = p.inner < kManyNeighbours ? kColumns : p.inner - at % p.inner;
      const int64_t count = std::min({kColumns, end - at, limit});
      columns(at, count);
      at += count;
    }
    return;
  }
  ActiveRangeIterator ranges(p.mask, p.length, begin);
  // The indices are incremented, because divisions would take as long as a short row.
  int64_t inner = begin % p.inner;
  int64_t outer = begin / p.inner;
  for (int64_t at = begin; at < end; ++at) {
    row(outer * p.outer_stride + inner * p.inner_stride, outer * p.length * p.inner + inner,
        ranges.next());
    if (++inner < p.inner) continue;
    inner = 0;
    ++outer;
  }
}

/// The rows as columns, for an operand with the strides of x, and for contiguous operands.
template <class T, class Arguments>
Columns<T> columns_of(const Arguments& p, T* data) {
  // If inner is 1, all rows are one group.
  if (p.inner == 1) return {data, p.stride, p.outer_stride, 0, p.outer};
  return {data, p.stride, p.inner_stride, p.outer_stride, p.inner};
}
template <class T, class Arguments>
Columns<T> contiguous_columns_of(const Arguments& p, T* data) {
  if (p.inner == 1) return {data, 1, p.length, 0, p.outer};
  return {data, p.inner, 1, p.length * p.inner, p.inner};
}

}  // namespace
}  // namespace TORCHKILN_ISA
}  // namespace torchkiln::cpu
