#include "torchkiln/kernels/spmm.h"

#include <algorithm>
#include <type_traits>

#include "detail/simd_row.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

constexpr const char* kOutside =
    "the pattern has indices outside of its entries or columns; check=True reports them";

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

/// The entries of one row of one matrix.
template <class Index>
struct RowEntries {
  const Index* col;
  int64_t begin;
  int64_t end;

  RowEntries(const CsrPattern& p, int64_t matrix, int64_t row) {
    const Index* crow = static_cast<const Index*>(p.crow) + matrix * p.crow_batch_stride;
    col = static_cast<const Index*>(p.col) + matrix * p.col_batch_stride;
    begin = crow[row];
    end = crow[row + 1];
  }

  /// Whether the entries of the row and their columns are in range, the first row begins at 0, and
  /// the last row ends at the number of entries.
  bool are_valid(const CsrPattern& p, int64_t row) const {
    return 0 <= begin && begin <= end && end <= p.entries && (row > 0 || begin == 0) &&
           (row + 1 < p.rows || end == p.entries) && are_below(p.columns, col, begin, end);
  }
};

/// Whether the index of each entry's value is in range.
template <class Index>
bool have_values(const Spmm& p, const RowEntries<Index>& entries, int64_t matrix) {
  return p.order == nullptr || are_below(p.pattern.entries, p.order + matrix * p.order_batch_stride,
                                         entries.begin, entries.end);
}

/// Computes `count` registers of a row of the result, from `column` on. The sums are in registers
/// while the loop runs over the entries of the row.
template <class T, class Index, int count, class Step>
void row_of_product(const Spmm& p, const RowEntries<Index>& entries, int64_t matrix, int64_t column,
                    T* out, Step step) {
  using C = Compute<T>;
  const T* values = static_cast<const T*>(p.values) + matrix * p.values_batch_stride;
  const int32_t* order = p.order == nullptr ? nullptr : p.order + matrix * p.order_batch_stride;
  const T* dense = static_cast<const T*>(p.dense.data) + matrix * p.dense.batch_stride + column;
  Lanes<C> sums[count] = {};
  for (int64_t e = entries.begin; e < entries.end; ++e) {
    const C weight = static_cast<C>(widen(values[order == nullptr ? e : order[e]]));
    const T* from = dense + static_cast<int64_t>(entries.col[e]) * p.dense.row_stride;
#pragma GCC unroll 4
    for (int k = 0; k < count; ++k) sums[k] += weight * load_lanes(from + k * kLanes<C>, step);
  }
#pragma GCC unroll 4
  for (int k = 0; k < count; ++k) store_lanes(out + column + k * kLanes<C>, sums[k], step);
}

template <class T, class Index>
Status spmm_rows(const Spmm& p, int64_t begin, int64_t end) {
  constexpr int kRegisters = 4;
  constexpr int64_t kStep = kRegisters * kLanes<Compute<T>>;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t matrix = i / p.pattern.rows;
    const int64_t row = i % p.pattern.rows;
    const RowEntries<Index> entries(p.pattern, matrix, row);
    if (!entries.are_valid(p.pattern, row) || !have_values(p, entries, matrix)) return {kOutside};
    T* out = static_cast<T*>(p.out) + i * p.width;
    int64_t column = 0;
    for (; column + kStep <= p.width; column += kStep)
      row_of_product<T, Index, kRegisters>(p, entries, matrix, column, out, FullStep{});
    for_lanes<Compute<T>>(column, p.width, [&](int64_t at, auto step) {
      row_of_product<T, Index, 1>(p, entries, matrix, at, out, step);
    });
  }
  return {};
}

template <class T, class Index>
Status sampled_rows(const SampledProduct& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t summed = p.summed ? p.batch : 1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t matrix = i / p.pattern.rows;
    const int64_t row = i % p.pattern.rows;
    const RowEntries<Index> entries(p.pattern, matrix, row);
    if (!entries.are_valid(p.pattern, row)) return {kOutside};
    T* out = static_cast<T*>(p.out) + matrix * p.pattern.entries;
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      double sum = 0;
      for (int64_t k = matrix; k < matrix + summed; ++k) {
        const T* left =
            static_cast<const T*>(p.left.data) + k * p.left.batch_stride + row * p.left.row_stride;
        const T* right = static_cast<const T*>(p.right.data) + k * p.right.batch_stride +
                         static_cast<int64_t>(entries.col[e]) * p.right.row_stride;
        double total[1];
        sum_lanes<C>(total, p.width, [&](int64_t at, auto step, auto& sums) {
          sums[0] += load_lanes(left + at, step) * load_lanes(right + at, step);
        });
        sum += total[0];
      }
      narrow(out + e, sum);
    }
  }
  return {};
}

/// Calls body(type, index) with the element type and the index type.
template <class Body>
Status dispatch_sparse(Dtype dtype, bool wide, const Body& body) {
  return dispatch_floating(dtype, [&](auto tag) {
    return wide ? body(tag, TypeTag<int64_t>{}) : body(tag, TypeTag<int32_t>{});
  });
}

}  // namespace

Status spmm(const Spmm& p, int64_t begin, int64_t end) {
  return dispatch_sparse(p.dtype, p.pattern.wide, [&](auto type, auto index) {
    return spmm_rows<typename decltype(type)::type, typename decltype(index)::type>(p, begin, end);
  });
}

Status sampled_product(const SampledProduct& p, int64_t begin, int64_t end) {
  return dispatch_sparse(p.dtype, p.pattern.wide, [&](auto type, auto index) {
    return sampled_rows<typename decltype(type)::type, typename decltype(index)::type>(p, begin,
                                                                                       end);
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(spmm, (const Spmm& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(sampled_product, (const SampledProduct& p, int64_t begin, int64_t end),
                    (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

namespace {

// Code without floating point, compiled for one instruction set only.

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
    if ((faults & ~kUnsorted) != 0) return {TORCHKILN_ISA::kOutside};
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
