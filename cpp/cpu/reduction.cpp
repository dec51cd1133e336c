#include "torchkiln/kernels/reduction.h"

#include <algorithm>

#include "detail/reduction_plan.h"
#include "detail/simd.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Rows per block of column sums, a multiple of the four rows that are added at a time. The sums of
// a block have the compute type; the sums of blocks are added in double.
constexpr int64_t kBlockRows = 64;
// Dense rows of up to this many elements are converted several at a time.
constexpr int64_t kShort = 31;

/// The sum of the elements begin <= r < end of the row at `offset`.
template <class C>
double sum_of_row(const Reduction& p, int64_t offset, int64_t begin, int64_t end) {
  C buffer[kBlock<C>];
  const auto block = [&](int64_t r, int64_t count) -> double {
    if constexpr (std::is_same_v<C, float>) {
      if (p.dtype == Dtype::bfloat16 && p.reduced_stride == 1)
        return sum_of(static_cast<const BFloat16*>(p.in) + offset + r, count);
    }
    return sum_of(
        read_run(buffer, p.in, offset + r * p.reduced_stride, p.reduced_stride, count, p.dtype),
        count);
  };
  if (end - begin <= kBlock<C>) return block(begin, end - begin);
  Cascade sum;
  for (int64_t r = begin; r < end; r += kBlock<C>) sum.add(block(r, std::min(kBlock<C>, end - r)));
  return sum.total();
}

template <class C, class Out>
void short_rows(const Reduction& p, int64_t begin, int64_t end) {
  C buffer[kBlock<C>];
  const int64_t step = kBlock<C> / p.reduced;
  for (int64_t row = begin; row < end; row += step) {
    const int64_t count = std::min(step, end - row);
    const C* values =
        read_run(buffer, p.in, row * p.reduced, /*stride=*/1, count * p.reduced, p.dtype);
    for (int64_t k = 0; k < count; ++k) {
      C sum = 0;
      for (int64_t r = 0; r < p.reduced; ++r) sum += values[k * p.reduced + r];
      narrow(static_cast<Out*>(p.out) + row + k, static_cast<double>(sum) / p.divisor);
    }
  }
}

template <class C, class Out>
void row_units(const Reduction& p, const Plan& plan, int64_t begin, int64_t end) {
  const bool is_dense = p.reduced_stride == 1 && (p.outer == 1 || p.outer_stride == p.reduced) &&
                        (p.inner == 1 || p.inner_stride == p.reduced) &&
                        (p.outer == 1 || p.inner == 1);
  if (is_dense && p.reduced <= kShort) return short_rows<C, Out>(p, begin, end);
  // The indices are incremented, because divisions would take as long as a short row.
  int64_t row = begin / plan.chunks;
  int64_t chunk = begin % plan.chunks;
  int64_t inner = row % p.inner;
  int64_t offset = row / p.inner * p.outer_stride + inner * p.inner_stride;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = chunk * plan.chunk;
    const double sum = sum_of_row<C>(p, offset, first, std::min(first + plan.chunk, p.reduced));
    if (plan.has_partials()) {
      static_cast<double*>(p.workspace)[unit] = sum;
    } else {
      narrow(static_cast<Out*>(p.out) + row, sum / p.divisor);
    }
    if (++chunk < plan.chunks) continue;
    chunk = 0;
    ++row;
    offset += p.inner_stride;
    if (++inner < p.inner) continue;
    inner = 0;
    offset += p.outer_stride - p.inner * p.inner_stride;
  }
}

/// Adds the elements (r, i) of the rows begin <= r < end to sum[i], four rows at a time. row(r, k)
/// returns row r; the results for different k must be valid at the same time.
template <class C, class Row>
void add_rows(C* sum, int64_t begin, int64_t end, int64_t count, const Row& row) {
  int64_t r = begin;
  for (; r + 4 <= end; r += 4) {
    const auto *a = row(r, 0), *b = row(r + 1, 1), *c = row(r + 2, 2), *d = row(r + 3, 3);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i)
      sum[i] += (widen(a[i]) + widen(b[i])) + (widen(c[i]) + widen(d[i]));
  }
  for (; r < end; ++r) {
    const auto* a = row(r, 0);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) sum[i] += widen(a[i]);
  }
}

/// Adds the rows begin <= r < end of the strip at `offset`.
template <class C>
void add_block(const Reduction& p, int64_t offset, int64_t row_stride, int64_t begin, int64_t end,
               int64_t count, C* sum) {
  if constexpr (std::is_same_v<C, float>) {
    if (p.dtype == Dtype::bfloat16 && p.inner_stride == 1) {
      const BFloat16* in = static_cast<const BFloat16*>(p.in) + offset;
      add_rows(sum, begin, end, count, [&](int64_t r, int) { return in + r * row_stride; });
      return;
    }
  }
  C buffers[4][kStrip];
  add_rows(sum, begin, end, count, [&](int64_t r, int k) {
    return read_run(buffers[k], p.in, offset + r * row_stride, p.inner_stride, count, p.dtype);
  });
}

/// Stores the sums of few rows as results, without partial sums.
template <class C, class Out>
void store_columns(Out* out, C* sum, double divisor, int64_t count) {
  if constexpr (std::is_same_v<C, Compute<Out>>) {
    const C by = static_cast<C>(divisor);
    for (int64_t i = 0; i < count && by != 1; ++i) sum[i] /= by;
    narrow_run(out, sum, count);
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(out + i, static_cast<double>(sum[i]) / divisor);
  }
}

template <class C, class Out>
void column_units(const Reduction& p, const Plan& plan, int64_t begin, int64_t end) {
  const int64_t width = p.inner * plan.fold;
  const int64_t rows = p.reduced / plan.fold;
  const int64_t row_stride = p.reduced_stride * plan.fold;
  C block[kStrip];
  double sum[kStrip];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t column = unit % plan.strips * kStrip;
    const int64_t chunk = unit / plan.strips % plan.chunks;
    const int64_t outer = unit / plan.strips / plan.chunks;
    const int64_t count = std::min(kStrip, width - column);
    const int64_t offset = outer * p.outer_stride + column * p.inner_stride;
    const int64_t last = std::min((chunk + 1) * plan.chunk, rows);
    if (rows <= kBlockRows && plan.fold == 1) {
      std::fill_n(block, count, C(0));
      add_block(p, offset, row_stride, 0, rows, count, block);
      store_columns(static_cast<Out*>(p.out) + outer * p.inner + column, block, p.divisor, count);
      continue;
    }
    std::fill_n(sum, count, 0.0);
    for (int64_t row = chunk * plan.chunk; row < last; row += kBlockRows) {
      std::fill_n(block, count, C(0));
      add_block(p, offset, row_stride, row, std::min(row + kBlockRows, last), count, block);
      for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block[i]);
    }
    // Folded rows have one strip. Chunk 0 also adds the elements after the last whole group of
    // `fold` rows.
    const int64_t rest = chunk == 0 ? p.reduced % plan.fold * p.inner : 0;
    if (rest > 0) {
      std::fill_n(block, rest, C(0));
      add_block(p, offset, row_stride, rows, rows + 1, rest, block);
      for (int64_t i = 0; i < rest; ++i) sum[i] += static_cast<double>(block[i]);
    }
    for (int64_t folded = 1; folded < plan.fold; ++folded) {
      for (int64_t i = 0; i < p.inner; ++i) sum[i] += sum[folded * p.inner + i];
    }
    const int64_t stored = plan.fold > 1 ? p.inner : count;
    if (plan.has_partials()) {
      double* partial =
          static_cast<double*>(p.workspace) + (chunk * p.outer + outer) * p.inner + column;
      std::copy_n(sum, stored, partial);
    } else {
      Out* out = static_cast<Out*>(p.out) + outer * p.inner + column;
      for (int64_t i = 0; i < stored; ++i) narrow(out + i, sum[i] / p.divisor);
    }
  }
}

}  // namespace

Status reduce(const Reduction& p, int64_t begin, int64_t end) {
  const Plan plan = make_plan(p);
  const int64_t first = begin * plan.units_per_task;
  const int64_t last = std::min(end * plan.units_per_task, plan.units);
  return dispatch<float, double, Half, BFloat16>(p.out_dtype, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    const bool wide = p.dtype == Dtype::float64 || p.out_dtype == Dtype::float64;
    if (plan.is_rows) {
      wide ? row_units<double, Out>(p, plan, first, last)
           : row_units<float, Out>(p, plan, first, last);
    } else {
      wide ? column_units<double, Out>(p, plan, first, last)
           : column_units<float, Out>(p, plan, first, last);
    }
    return Status{};
  });
}

Status reduce_finish(const Reduction& p, int64_t begin, int64_t end) {
  const Plan plan = make_plan(p);
  const double* partial = static_cast<const double*>(p.workspace);
  // Partial sums are [output, chunk] for row sums, [chunk, output] for column sums.
  const int64_t output_stride = plan.is_rows ? plan.chunks : 1;
  const int64_t chunk_stride = plan.is_rows ? 1 : p.outer * p.inner;
  return dispatch<float, double, Half, BFloat16>(p.out_dtype, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    for (int64_t i = begin; i < end; ++i) {
      Cascade sum;
      for (int64_t chunk = 0; chunk < plan.chunks; ++chunk)
        sum.add(partial[i * output_stride + chunk * chunk_stride]);
      narrow(static_cast<Out*>(p.out) + i, sum.total() / p.divisor);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(reduce, (const Reduction& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(reduce_finish, (const Reduction& p, int64_t begin, int64_t end),
                    (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const Reduction& p) {
  const TORCHKILN_ISA::Plan plan = TORCHKILN_ISA::make_plan(p);
  const int64_t tasks = (plan.units + plan.units_per_task - 1) / plan.units_per_task;
  if (!plan.has_partials()) return {tasks, 0, 0};
  const int64_t outputs = p.outer * p.inner;
  return {tasks, static_cast<size_t>(plan.chunks * outputs) * sizeof(double), outputs};
}

#endif

}  // namespace torchkiln::cpu
