#include "torchkiln/kernels/reduction.h"

#include <algorithm>

#include "float16.h"
#include "isa.h"
#include "reduction_cut.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Elements whose sum is formed in the compute type; the sums of blocks are added in double.
constexpr int64_t kBlock = 1024;
// The same for rows of columns, in multiples of the four that are added at a time.
constexpr int64_t kBlockRows = 64;
// Rows of up to so many elements are converted together when they are dense.
constexpr int64_t kShort = 64;

/// The sum of at most kBlock values. Many running sums become wide instructions without leave to
/// reorder additions.
template <class C>
C sum_of(const C* values, int64_t count) {
  constexpr int kSums = 64;
  C sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int k = 0; k < kSums; ++k) sums[k] += values[i + k];
  }
  C rest = 0;
  for (; i < count; ++i) rest += values[i];
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0] + rest;
}

/// A double as a float whose last bit says whether anything was cut off (rounding to odd): it can
/// be rounded once more without rounding twice.
inline float sticky_float(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const uint32_t bits = bits_of(nearest);
  if (!(back != value) || value != value || (bits & 1u) != 0) return nearest;
  const bool toward_zero = (back < value) == (value > 0);
  return float_of(toward_zero ? bits + 1 : bits - 1);
}

inline void narrow(float* to, double value) { *to = static_cast<float>(value); }
inline void narrow(double* to, double value) { *to = value; }
inline void narrow(Half* to, double value) { *to = narrow_half(sticky_float(value)); }
inline void narrow(BFloat16* to, double value) { *to = narrow_bfloat16(sticky_float(value)); }

/// The sum of the elements begin <= r < end of the row at `offset`.
template <class C>
double sum_of_row(const Reduction& p, int64_t offset, int64_t begin, int64_t end) {
  C buffer[kBlock];
  double sum = 0;
  for (int64_t r = begin; r < end; r += kBlock) {
    const int64_t count = std::min(kBlock, end - r);
    sum += static_cast<double>(sum_of(
        read_run(buffer, p.in, offset + r * p.reduced_stride, p.reduced_stride, count, p.dtype),
        count));
  }
  return sum;
}

template <class C, class Out>
void short_rows(const Reduction& p, int64_t begin, int64_t end) {
  C buffer[kBlock];
  const int64_t step = kBlock / p.reduced;
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
void row_units(const Reduction& p, const Cut& cut, int64_t begin, int64_t end) {
  const bool is_dense = p.reduced_stride == 1 && (p.outer == 1 || p.outer_stride == p.reduced) &&
                        (p.inner == 1 || p.inner_stride == p.reduced) &&
                        (p.outer == 1 || p.inner == 1);
  if (is_dense && p.reduced <= kShort) return short_rows<C, Out>(p, begin, end);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / cut.chunks;
    const int64_t first = unit % cut.chunks * cut.chunk;
    const int64_t offset = row / p.inner * p.outer_stride + row % p.inner * p.inner_stride;
    const double sum = sum_of_row<C>(p, offset, first, std::min(first + cut.chunk, p.reduced));
    if (cut.has_partials()) {
      static_cast<double*>(p.workspace)[unit] = sum;
    } else {
      narrow(static_cast<Out*>(p.out) + row, sum / p.divisor);
    }
  }
}

template <class C>
void add_rows(C* sum, const C* a, const C* b, const C* c, const C* d, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) sum[i] += (a[i] + b[i]) + (c[i] + d[i]);
}

template <class C>
void add_row(C* sum, const C* a, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) sum[i] += a[i];
}

/// sum[i] += the elements (r, i) of rows begin <= r < end of the strip at `offset`.
template <class C>
void add_block(const Reduction& p, int64_t offset, int64_t row_stride, int64_t begin, int64_t end,
               int64_t count, C* sum) {
  C buffers[4][kStrip];
  const auto row_at = [&](int64_t r, C* buffer) {
    return read_run(buffer, p.in, offset + r * row_stride, p.inner_stride, count, p.dtype);
  };
  int64_t r = begin;
  for (; r + 4 <= end; r += 4) {
    const C* a = row_at(r, buffers[0]);
    const C* b = row_at(r + 1, buffers[1]);
    const C* c = row_at(r + 2, buffers[2]);
    const C* d = row_at(r + 3, buffers[3]);
    add_rows(sum, a, b, c, d, count);
  }
  for (; r < end; ++r) add_row(sum, row_at(r, buffers[0]), count);
}

template <class C, class Out>
void column_units(const Reduction& p, const Cut& cut, int64_t begin, int64_t end) {
  const int64_t width = p.inner * cut.fold;
  const int64_t rows = p.reduced / cut.fold;
  const int64_t row_stride = p.reduced_stride * cut.fold;
  C block[kStrip];
  double sum[kStrip];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t column = unit % cut.strips * kStrip;
    const int64_t chunk = unit / cut.strips % cut.chunks;
    const int64_t outer = unit / cut.strips / cut.chunks;
    const int64_t count = std::min(kStrip, width - column);
    const int64_t offset = outer * p.outer_stride + column * p.inner_stride;
    const int64_t last = std::min((chunk + 1) * cut.chunk, rows);
    std::fill_n(sum, count, 0.0);
    for (int64_t row = chunk * cut.chunk; row < last; row += kBlockRows) {
      std::fill_n(block, count, C(0));
      add_block(p, offset, row_stride, row, std::min(row + kBlockRows, last), count, block);
      for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block[i]);
    }
    // Where rows are folded there is one strip; the elements after the last whole row go to chunk
    // 0.
    const int64_t rest = chunk == 0 ? p.reduced % cut.fold * p.inner : 0;
    if (rest > 0) {
      std::fill_n(block, rest, C(0));
      add_block(p, offset, row_stride, rows, rows + 1, rest, block);
      for (int64_t i = 0; i < rest; ++i) sum[i] += static_cast<double>(block[i]);
    }
    for (int64_t folded = 1; folded < cut.fold; ++folded) {
      for (int64_t i = 0; i < p.inner; ++i) sum[i] += sum[folded * p.inner + i];
    }
    const int64_t stored = cut.fold > 1 ? p.inner : count;
    if (cut.has_partials()) {
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
  const Cut cut = cut_of(p);
  const int64_t first = begin * cut.units_per_task;
  const int64_t last = std::min(end * cut.units_per_task, cut.units);
  return dispatch<float, double, Half, BFloat16>(p.out_dtype, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    const bool wide = p.dtype == Dtype::float64 || p.out_dtype == Dtype::float64;
    if (cut.is_rows) {
      wide ? row_units<double, Out>(p, cut, first, last)
           : row_units<float, Out>(p, cut, first, last);
    } else {
      wide ? column_units<double, Out>(p, cut, first, last)
           : column_units<float, Out>(p, cut, first, last);
    }
    return Status{};
  });
}

Status reduce_finish(const Reduction& p, int64_t begin, int64_t end) {
  const Cut cut = cut_of(p);
  const double* partial = static_cast<const double*>(p.workspace);
  // Of rows the partial sums are [output, chunk], of columns [chunk, output].
  const int64_t output_stride = cut.is_rows ? cut.chunks : 1;
  const int64_t chunk_stride = cut.is_rows ? 1 : p.outer * p.inner;
  return dispatch<float, double, Half, BFloat16>(p.out_dtype, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk)
        sum += partial[i * output_stride + chunk * chunk_stride];
      narrow(static_cast<Out*>(p.out) + i, sum / p.divisor);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(reduce)
TORCHKILN_DECLARE_VARIANTS(reduce_finish)

int64_t task_count(const Reduction& p) {
  const TORCHKILN_ISA::Cut cut = TORCHKILN_ISA::cut_of(p);
  return (cut.units + cut.units_per_task - 1) / cut.units_per_task;
}

size_t workspace_bytes(const Reduction& p) {
  const TORCHKILN_ISA::Cut cut = TORCHKILN_ISA::cut_of(p);
  return cut.has_partials() ? static_cast<size_t>(cut.chunks * p.outer * p.inner) * sizeof(double)
                            : 0;
}

Status reduce(const Reduction& p, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(reduce)(p, begin, end);
}

Status reduce_finish(const Reduction& p, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(reduce_finish)(p, begin, end);
}

#endif

}  // namespace torchkiln::cpu
