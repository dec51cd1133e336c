// Transposed patterns of sparse matrices, and their checks: code without floating point, compiled
// for one instruction set only.

#include "torchkiln/kernels/spmm.h"

#include <algorithm>

#include "spmm/checks.h"

namespace torchkiln::cpu {

#ifdef TORCHKILN_CPU_ENTRIES

namespace {

/// Counts the entries of each column, then writes the entries to their columns in the order of the
/// rows.
template <class Index>
void transpose(const CsrTranspose& p, int64_t matrix) {
  const int64_t columns = p.pattern.columns;
  const int64_t entries = p.pattern.entries;
  const Index* crow =
      static_cast<const Index*>(p.pattern.crow) + matrix * p.pattern.crow_batch_stride;
  const Index* col = static_cast<const Index*>(p.pattern.col) + matrix * p.pattern.col_batch_stride;
  int32_t* begin = p.out + matrix * packed_size(columns, entries);
  int32_t* row_of = begin + columns + 1;
  int32_t* order = row_of + entries;
  std::fill_n(begin, columns + 1, 0);
  for (int64_t e = 0; e < entries; ++e) ++begin[col[e] + 1];
  for (int64_t c = 0; c < columns; ++c) begin[c + 1] += begin[c];
  for (int64_t row = 0; row < p.pattern.rows; ++row) {
    for (int64_t e = crow[row]; e < static_cast<int64_t>(crow[row + 1]); ++e) {
      const int32_t at = begin[col[e]]++;
      row_of[at] = static_cast<int32_t>(row);
      order[at] = static_cast<int32_t>(e);
    }
  }
  // Here begin[c] is the start of column c + 1.
  std::copy_backward(begin, begin + columns, begin + columns + 1);
  begin[0] = 0;
}

template <class Index>
int32_t faults_of(const CsrCheck& p, int64_t matrix) {
  const Index* crow =
      static_cast<const Index*>(p.pattern.crow) + matrix * p.pattern.crow_batch_stride;
  const Index* col = static_cast<const Index*>(p.pattern.col) + matrix * p.pattern.col_batch_stride;
  int32_t faults = 0;
  const auto report = [&](CsrFault fault, bool is_there) {
    if (is_there) faults |= static_cast<int32_t>(fault);
  };
  report(CsrFault::begin, crow[0] != 0);
  report(CsrFault::end, crow[p.pattern.rows] != p.pattern.entries);
  for (int64_t row = 0; row < p.pattern.rows; ++row) {
    report(CsrFault::order, crow[row] > crow[row + 1]);
    // Row ends that are out of range are clamped to the entries.
    const int64_t begin = std::max<int64_t>(crow[row], 0);
    const int64_t end = std::min<int64_t>(crow[row + 1], p.pattern.entries);
    for (int64_t e = begin; e < end; ++e) {
      report(CsrFault::column, col[e] < 0 || col[e] >= p.pattern.columns);
      report(CsrFault::unsorted, e > begin && col[e - 1] >= col[e]);
    }
  }
  return faults;
}

}  // namespace

Status csr_transpose(const CsrTranspose& p, int64_t begin, int64_t end) {
  if (p.pattern.entries >= int64_t{1} << 31)
    return {"the transposed pattern of 2^31 entries or more is not built, expected fewer"};
  // Columns may have any order and occur twice, but with an index out of range transpose() would
  // write out of bounds.
  constexpr auto kUnsorted = static_cast<int32_t>(CsrFault::unsorted);
  const CsrCheck check{p.pattern, p.batch, nullptr};
  for (int64_t matrix = begin; matrix < end; ++matrix) {
    const int32_t faults =
        p.pattern.wide ? faults_of<int64_t>(check, matrix) : faults_of<int32_t>(check, matrix);
    if ((faults & ~kUnsorted) != 0) return {kOutside};
    p.pattern.wide ? transpose<int64_t>(p, matrix) : transpose<int32_t>(p, matrix);
  }
  return {};
}

Status csr_check(const CsrCheck& p, int64_t begin, int64_t end) {
  for (int64_t matrix = begin; matrix < end; ++matrix)
    *p.faults |= p.pattern.wide ? faults_of<int64_t>(p, matrix) : faults_of<int32_t>(p, matrix);
  return {};
}

#endif

}  // namespace torchkiln::cpu
