#include "torchkiln/kernels/spmm.h"

#include <algorithm>

#include "detail/simd_row.h"
#include "spmm/checks.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

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
};

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

constexpr int64_t kPiece = 512;  // elements of a row that are not adjacent, converted at a time

/// Computes a row of the result from rows of p.dense whose elements are not adjacent.
template <class T, class Index>
void row_of_columns(const Spmm& p, const RowEntries<Index>& entries, int64_t matrix, T* out) {
  using C = Compute<T>;
  const T* values = static_cast<const T*>(p.values) + matrix * p.values_batch_stride;
  const int32_t* order = p.order == nullptr ? nullptr : p.order + matrix * p.order_batch_stride;
  const T* dense = static_cast<const T*>(p.dense.data) + matrix * p.dense.batch_stride;
  C read[kPiece];
  for (int64_t column = 0; column < p.width; column += kPiece) {
    const int64_t count = std::min(kPiece, p.width - column);
    C sums[kPiece] = {};
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const C weight = static_cast<C>(widen(values[order == nullptr ? e : order[e]]));
      const int64_t row = static_cast<int64_t>(entries.col[e]) * p.dense.row_stride;
      widen_run(read, dense + row + column * p.column_stride, p.column_stride, count);
      for (int64_t i = 0; i < count; ++i) sums[i] += weight * read[i];
    }
    narrow_run(out + column, sums, count);
  }
}

template <class T, class Index>
Status spmm_rows(const Spmm& p, int64_t begin, int64_t end) {
  constexpr int kRegisters = 4;
  constexpr int64_t kStep = kRegisters * kLanes<Compute<T>>;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t matrix = i / p.pattern.rows;
    const int64_t row = i % p.pattern.rows;
    if (i == begin || row == 0) {
      const int64_t last = std::min(p.pattern.rows, row + end - i);
      if (!are_valid_rows<Index>(p.pattern, matrix, row, last, p.order, p.order_batch_stride))
        return {kOutside};
    }
    const RowEntries<Index> entries(p.pattern, matrix, row);
    T* out = static_cast<T*>(p.out) + i * p.width;
    if (p.column_stride != 1) {
      row_of_columns(p, entries, matrix, out);
      continue;
    }
    int64_t column = 0;
    for (; column + kStep <= p.width; column += kStep)
      row_of_product<T, Index, kRegisters>(p, entries, matrix, column, out, FullStep{});
    for_lanes<Compute<T>>(column, p.width, [&](int64_t at, auto step) {
      row_of_product<T, Index, 1>(p, entries, matrix, at, out, step);
    });
  }
  return {};
}

template <class C, class Left, class Right>
double dot(const Left* left, const Right* right, int64_t count) {
  double total[1];
  sum_lanes<C>(total, count, [&](int64_t at, auto step, auto& sums) {
    sums[0] += load_lanes(left + at, step) * load_lanes(right + at, step);
  });
  return total[0];
}

/// dot() with elements of `right` that are not adjacent.
template <class C, class T>
double dot_of_columns(const T* left, const T* right, int64_t stride, int64_t count) {
  C read[kPiece];
  double sum = 0;
  for (int64_t at = 0; at < count; at += kPiece) {
    const int64_t part = std::min(kPiece, count - at);
    widen_run(read, right + at * stride, stride, part);
    sum += dot<C>(left + at, read, part);
  }
  return sum;
}

// Most registers of a short row, which are held while a loop runs over the entries of the row.
constexpr int kHeld = 8;

/// Loads register `k` of a row; lanes beyond the end are zero.
template <class T>
Lanes<Compute<T>> load_register(const T* row, int64_t k, int64_t width) {
  using C = Compute<T>;
  const int64_t at = k * kLanes<C>;
  return at + kLanes<C> <= width ? load_lanes(row + at, FullStep{})
                                 : load_lanes(row + at, PartialStep{width - at});
}

/// Calls body(std::integral_constant<int, registers>{}) for rows of at most kHeld registers.
/// Returns false, and does nothing, for longer rows, and without elements.
template <class C, class Body, int count = 1>
bool with_registers(int64_t width, const Body& body) {
  if (width == 0) return false;
  if (width <= count * kLanes<C>) {
    body(std::integral_constant<int, count>{});
    return true;
  }
  if constexpr (count < kHeld) return with_registers<C, Body, count + 1>(width, body);
  return false;
}

/// The products of one row of `left` with rows of `right`, for rows that fit in `count` registers:
/// the row of `left` is converted once.
template <int count, class T, class Index>
void dots_of_short_rows(const T* left, const T* right, int64_t row_stride, int64_t width,
                        const RowEntries<Index>& entries, T* out) {
  using C = Compute<T>;
  Lanes<C> held[count];
  for (int k = 0; k < count; ++k) held[k] = load_register(left, k, width);
  for (int64_t e = entries.begin; e < entries.end; ++e) {
    const T* const from = right + static_cast<int64_t>(entries.col[e]) * row_stride;
    Lanes<C> sum = held[count - 1] * load_register(from, count - 1, width);
    for (int k = 0; k < count - 1; ++k)
      sum += held[k] * load_lanes(from + k * kLanes<C>, FullStep{});
    const C total = lane_sum<C>(sum);
    narrow_run(out + e, &total, 1);
  }
}

template <class T, class Index>
Status sampled_rows(const SampledProduct& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t summed = p.summed ? p.batch : 1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t matrix = i / p.pattern.rows;
    const int64_t row = i % p.pattern.rows;
    if (i == begin || row == 0) {
      const int64_t last = std::min(p.pattern.rows, row + end - i);
      if (!are_valid_rows<Index>(p.pattern, matrix, row, last)) return {kOutside};
    }
    const RowEntries<Index> entries(p.pattern, matrix, row);
    T* out = static_cast<T*>(p.out) + matrix * p.pattern.entries;
    if (entries.begin == entries.end) continue;
    if (summed == 1 && p.column_stride == 1) {
      const T* const left = static_cast<const T*>(p.left.data) + matrix * p.left.batch_stride +
                            row * p.left.row_stride;
      const T* const right = static_cast<const T*>(p.right.data) + matrix * p.right.batch_stride;
      const bool is_short = with_registers<C>(p.width, [&](auto count) {
        dots_of_short_rows<count>(left, right, p.right.row_stride, p.width, entries, out);
      });
      if (is_short) continue;
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      double sum = 0;
      for (int64_t k = matrix; k < matrix + summed; ++k) {
        const T* left =
            static_cast<const T*>(p.left.data) + k * p.left.batch_stride + row * p.left.row_stride;
        const T* right = static_cast<const T*>(p.right.data) + k * p.right.batch_stride +
                         static_cast<int64_t>(entries.col[e]) * p.right.row_stride;
        sum += p.column_stride == 1 ? dot<C>(left, right, p.width)
                                    : dot_of_columns<C>(left, right, p.column_stride, p.width);
      }
      narrow(out + e, sum);
    }
  }
  return {};
}

// Rows of sums are padded to a multiple of this many elements: whole registers of every instruction
// set, because split() is compiled for one of them and allocates for all.
constexpr int64_t kSumPadding = 16;
static_assert(kSumPadding % kLanes<float> == 0 && kSumPadding % kLanes<double> == 0);

/// The chunks of rows of spmm_columns(). Their number depends only on the sizes, so that the result
/// has the same bits for every number of threads.
struct ColumnPlan {
  int64_t chunks;
  int64_t rows_per_chunk;
  int64_t pitch;  // elements from one row of sums to the next

  explicit ColumnPlan(const SpmmColumns& p)
      : pitch((p.width + kSumPadding - 1) / kSumPadding * kSumPadding) {
    constexpr int64_t kProducts = 1 << 16;  // of a chunk: they take longer than starting a thread
    constexpr int64_t kMostChunks = 32, kFewestEntries = 4;  // of a column in a chunk
    const int64_t most = std::min(p.pattern.entries * p.width / kProducts,
                                  p.pattern.entries / (kFewestEntries * p.pattern.columns));
    chunks = std::clamp<int64_t>(std::min(most, p.pattern.rows), 1, kMostChunks);
    rows_per_chunk = (p.pattern.rows + chunks - 1) / chunks;
  }

  int64_t elements(const SpmmColumns& p) const { return p.pattern.columns * pitch; }

  template <class C>
  C* sums(const SpmmColumns& p, int64_t chunk) const {
    return static_cast<C*>(p.workspace) + chunk * elements(p);
  }
};

/// Adds a row of at most `count` registers, times the value of each entry, to the sums of the
/// entry's column.
template <int count, class T, class Index>
void add_short_row(const T* x, const T* values, int64_t width, const RowEntries<Index>& entries,
                   Compute<T>* sums, int64_t pitch) {
  using C = Compute<T>;
  if (entries.begin == entries.end) return;
  Lanes<C> held[count];
  for (int k = 0; k < count; ++k) held[k] = load_register(x, k, width);
  for (int64_t e = entries.begin; e < entries.end; ++e) {
    C* const to = sums + static_cast<int64_t>(entries.col[e]) * pitch;
    const C weight = static_cast<C>(widen(values[e]));
    for (int k = 0; k < count; ++k) {
      C* const sum = to + k * kLanes<C>;
      store_lanes(sum, load_lanes(sum, FullStep{}) + weight * held[k], FullStep{});
    }
  }
}

template <class T, class Index>
Status sum_chunk(const SpmmColumns& p, const ColumnPlan& plan, int64_t chunk) {
  using C = Compute<T>;
  C* const sums = plan.sums<C>(p, chunk);
  std::fill_n(sums, plan.elements(p), C(0));
  const T* const values = static_cast<const T*>(p.values);
  const int64_t first = std::min(chunk * plan.rows_per_chunk, p.pattern.rows);
  const int64_t last = std::min(first + plan.rows_per_chunk, p.pattern.rows);
  if (!are_valid_rows<Index>(p.pattern, /*matrix=*/0, first, last)) return {kOutside};
  for (int64_t row = first; row < last; ++row) {
    const RowEntries<Index> entries(p.pattern, 0, row);
    const T* const x = static_cast<const T*>(p.x.data) + row * p.x.row_stride;
    const bool is_short = with_registers<C>(p.width, [&](auto count) {
      add_short_row<count>(x, values, p.width, entries, sums, plan.pitch);
    });
    if (is_short) continue;
    for_lanes<C>(0, p.width, [&](int64_t at, auto step) {
      const Lanes<C> lanes = load_lanes(x + at, step);
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        C* const sum = sums + static_cast<int64_t>(entries.col[e]) * plan.pitch + at;
        const C weight = static_cast<C>(widen(values[e]));
        store_lanes(sum, load_lanes(sum, FullStep{}) + weight * lanes, FullStep{});
      }
    });
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

Status spmm_columns(const SpmmColumns& p, int64_t begin, int64_t end) {
  const ColumnPlan plan(p);
  return dispatch_sparse(p.dtype, p.pattern.wide, [&](auto type, auto index) {
    Status status;
    for (int64_t chunk = begin; chunk < end && status.ok(); ++chunk)
      status =
          sum_chunk<typename decltype(type)::type, typename decltype(index)::type>(p, plan, chunk);
    return status;
  });
}

Status spmm_columns_finish(const SpmmColumns& p, int64_t begin, int64_t end) {
  const ColumnPlan plan(p);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t column = begin; column < end; ++column) {
      T* const out = static_cast<T*>(p.out) + column * p.width;
      for (int64_t i = 0; i < p.width; ++i) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < plan.chunks; ++chunk)
          sum += static_cast<double>(plan.sums<Compute<T>>(p, chunk)[column * plan.pitch + i]);
        narrow(out + i, sum);
      }
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(spmm_columns, (const SpmmColumns& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(spmm_columns_finish, (const SpmmColumns& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(spmm, (const Spmm& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(sampled_product, (const SampledProduct& p, int64_t begin, int64_t end),
                    (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const SpmmColumns& p) {
  const TORCHKILN_ISA::ColumnPlan plan(p);
  const size_t element = p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float);
  return {plan.chunks, static_cast<size_t>(plan.chunks * plan.elements(p)) * element,
          p.pattern.columns};
}

#endif

}  // namespace torchkiln::cpu
