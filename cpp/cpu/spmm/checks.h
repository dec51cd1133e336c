#pragma once

// Checks of the indices of sparse matrices, before kernels read and write at them.

#include <algorithm>
#include <type_traits>

#include "torchkiln/kernels/spmm.h"

namespace torchkiln::cpu {

inline constexpr const char* kOutside =
    "the pattern has indices outside of its entries or columns; check=True reports them";

namespace TORCHKILN_ISA {

/// Whether all indices are from 0 to size - 1. Compares them as unsigned numbers, where negative
/// ones are large.
template <class Index>
bool are_below(int64_t size, const Index* indices, int64_t begin, int64_t end) {
  using Unsigned = std::make_unsigned_t<Index>;
  Unsigned largest = 0;
  for (int64_t i = begin; i < end; ++i)
    largest = std::max(largest, static_cast<Unsigned>(indices[i]));
  return begin == end || static_cast<uint64_t>(largest) < static_cast<uint64_t>(size);
}

/// Whether the rows first <= row < last of a matrix have entries and columns in range, the first
/// row of all begins at 0, and the last one ends at the number of entries. `order`: the indices of
/// the values of the entries, which are checked if it is not null. The rows are checked together,
/// in two loops over adjacent indices: a loop for each row would take longer than a short row.
template <class Index>
bool are_valid_rows(const CsrPattern& p, int64_t matrix, int64_t first, int64_t last,
                    const int32_t* order = nullptr, int64_t order_batch_stride = 0) {
  const Index* const crow = static_cast<const Index*>(p.crow) + matrix * p.crow_batch_stride;
  const Index* const col = static_cast<const Index*>(p.col) + matrix * p.col_batch_stride;
  const int64_t begin = crow[first], end = crow[last];
  bool ascends = true;
  for (int64_t row = first; row < last; ++row) ascends &= crow[row] <= crow[row + 1];
  if (!ascends || begin < 0 || end > p.entries || (first == 0 && begin != 0) ||
      (last == p.rows && end != p.entries))
    return false;
  return are_below(p.columns, col, begin, end) &&
         (order == nullptr ||
          are_below(p.entries, order + matrix * order_batch_stride, begin, end));
}

}  // namespace TORCHKILN_ISA
}  // namespace torchkiln::cpu
