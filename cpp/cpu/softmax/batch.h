#pragma once

// Softmax and its gradient for short rows of adjacent elements. A batch of rows lies one after
// another in a buffer, so that conversions and exponentials are loops over all its elements.
// Registers are read and written whole: the last one of a row reaches into the next row, which is
// written after it, or into the padding.

#include <algorithm>

#include "detail/simd_exp.h"
#include "detail/simd_row.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Columns of rows that are computed in batches. For longer rows, loops over one row are as fast.
constexpr int64_t kFewestBatched = 5;
constexpr int64_t kMostBatched = 128;
// Elements per batch, whose buffers stay in the L1 cache.
constexpr int64_t kBatch = 2048;
constexpr int64_t kBatchRows = 256;
// Elements after a batch. Loops over all elements end after a multiple of it, without a remainder.
constexpr int64_t kPadding = 16;

inline int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

template <class C>
struct Batch {
  C at[kBatch + kPadding] = {};
  operator C*() { return at; }
};

template <class Arguments>
bool has_batches(const Arguments& p) {
  return !p.mask.any() && p.inner == 1 && p.stride == 1 && p.length >= kFewestBatched &&
         p.length <= kMostBatched;
}

/// Calls body(first, count) for the batches of the rows begin <= row < end.
template <class Body>
void for_batches(int64_t columns, int64_t begin, int64_t end, const Body& body) {
  const int64_t rows = std::min(kBatch / columns, kBatchRows);
  for (int64_t first = begin; first < end; first += rows) body(first, std::min(rows, end - first));
}

// Bytes per register. Buffers in the L1 cache are read faster with 64 than with 32.
#ifdef __AVX512F__
constexpr int64_t kBatchRegister = 64;
#else
constexpr int64_t kBatchRegister = kRegister;
#endif
template <class C>
using BatchLanes = Wide<C, kBatchRegister>;
template <class C>
constexpr int64_t kBatchLanes = kBatchRegister / sizeof(C);

template <class C>
BatchLanes<C> load_batch_lanes(const C* from) {
  return load_wide<BatchLanes<C>>(from);
}

/// Sets `to` to result(i) for the registers of a row.
template <class C, class Result>
void store_row(C* to, int64_t columns, const Result& result) {
  for (int64_t i = 0; i < columns; i += kBatchLanes<C>) {
    const BatchLanes<C> lanes = result(i);
    std::memcpy(to + i, &lanes, sizeof(lanes));
  }
}

/// Reductions of rows: combines the registers term(i), without the lanes of the last one that are
/// not in the row.
template <class C>
class RowReduction {
 public:
  explicit RowReduction(int64_t columns) : columns_(columns) {
    decltype(tail_) lane{};
    for (int64_t k = 0; k < kBatchLanes<C>; ++k) lane[k] = k;
    const int64_t last = (columns - 1) / kBatchLanes<C> * kBatchLanes<C>;
    tail_ = lane < static_cast<std::decay_t<decltype(lane[0])>>(columns - last);
  }

  template <class Term>
  C sum(const Term& term) const {
    const auto add = [](auto a, auto b) { return a + b; };
    return lane_sum<C, kBatchRegister>(combine(C(0), term, add));
  }

  /// The largest number; -infinity if there is none. NaN is skipped.
  template <class Term>
  C largest(const Term& term) const {
    const auto larger = [](auto a, auto b) { return b > a ? b : a; };
    return lane_largest<kBatchRegister>(combine(-kInfinity<C>, term, larger));
  }

 private:
  template <class Term, class Combine>
  BatchLanes<C> combine(C neutral, const Term& term, const Combine& both) const {
    constexpr int64_t kStep = kBatchLanes<C>;
    const BatchLanes<C> start = BatchLanes<C>{} + neutral;
    BatchLanes<C> a = start, b = start;
    int64_t i = 0;
    for (; i + 2 * kStep < columns_; i += 2 * kStep) {
      a = both(a, term(i));
      b = both(b, term(i + kStep));
    }
    if (i + kStep < columns_) {
      a = both(a, term(i));
      i += kStep;
    }
    const BatchLanes<C> last = term(i);
    return both(a, both(b, tail_ ? last : start));
  }

  template <int64_t bytes>
  static C lane_largest(const Wide<C, bytes>& lanes) {
    if constexpr (bytes == sizeof(C)) {
      return lanes[0];
    } else {
      using Part = Wide<C, bytes / 2>;
      const char* from = reinterpret_cast<const char*>(&lanes);
      const Part a = load_wide<Part>(from), b = load_wide<Part>(from + bytes / 2);
      return lane_largest<bytes / 2>(a > b ? a : b);
    }
  }

  int64_t columns_;
  decltype(BatchLanes<C>{} < BatchLanes<C>{}) tail_;
};

template <class T>
void softmax_batches(const Softmax& p, const T* x, T* y, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t columns = p.length;
  const bool is_log = p.log;
  const C scale = static_cast<C>(p.scale);
  const RowReduction<C> reduction(columns);
  Batch<C> values, centered;
  C largest[kBatchRows] = {}, finish[kBatchRows] = {};
  for_batches(columns, begin, end, [&](int64_t first, int64_t count) {
    const int64_t elements = padded(count * columns);
    widen_rows(values.at, x + first * p.outer_stride, p.outer_stride, columns, count);
    for (int64_t i = 0; scale != C(1) && i < elements; ++i) values.at[i] *= scale;
    for (int64_t row = 0; row < count; ++row) {
      const C* const from = values + row * columns;
      const auto load = [=](int64_t i) { return load_batch_lanes(from + i); };
      largest[row] = reduction.largest(load);
      const C shift = largest[row] > -kInfinity<C> ? largest[row] : C(0);
      store_row(centered + row * columns, columns, [=](int64_t i) { return load(i) - shift; });
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < elements; ++i) values.at[i] = ExactMath::exp_or_zero(centered.at[i]);
    for (int64_t row = 0; row < count; ++row) {
      const C* const powers = values + row * columns;
      finish[row] = reduction.sum([=](int64_t i) { return load_batch_lanes(powers + i); });
    }
    // A row without a number above -infinity has the sum NaN.
    for (int64_t row = 0; row < padded(count); ++row) {
      constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
      const double sum = largest[row] > -kInfinity<C> ? static_cast<double>(finish[row]) : kNan;
      finish[row] = static_cast<C>(is_log ? log_of<C>(sum) : 1 / sum);
    }
    for (int64_t row = 0; row < count; ++row) {
      C* const z = centered + row * columns;
      C* const powers = values + row * columns;
      const C by = finish[row];
      is_log ? store_row(powers, columns, [=](int64_t i) { return load_batch_lanes(z + i) - by; })
             : store_row(z, columns, [=](int64_t i) { return load_batch_lanes(powers + i) * by; });
    }
    narrow_run(y + first * columns, is_log ? values.at : centered.at, count * columns);
  });
}

/// The gradient of a row of whole registers. `y` are its results or, of log_softmax, their
/// exponentials.
template <class C>
void whole_row_gradient(const SoftmaxBackward& p, const RowReduction<C>& reduction, const C* grad,
                        const C* y, C* to) {
  const C scale = static_cast<C>(p.scale);
  const auto g = [=](int64_t i) { return load_batch_lanes(grad + i); };
  const auto out = [=](int64_t i) { return load_batch_lanes(y + i); };
  if (p.log) {
    const C sum = reduction.sum(g);
    store_row(to, p.length, [=](int64_t i) { return (g(i) - out(i) * sum) * scale; });
  } else {
    const C sum = reduction.sum([=](int64_t i) { return g(i) * out(i); });
    store_row(to, p.length, [=](int64_t i) { return (g(i) - sum) * out(i) * scale; });
  }
}

/// The gradient of any row. Its registers have at most 32 bytes, since most are not aligned.
/// step_of(step) is the step that loads and stores take for FullStep or PartialStep.
template <class C, class StepOf>
void row_gradient(const SoftmaxBackward& p, const C* grad, const C* y, C* to,
                  const StepOf& step_of) {
  const int64_t columns = p.length;
  const C scale = static_cast<C>(p.scale);
  const bool is_log = p.log;
  const auto term = [=](int64_t i, auto step) {
    const Lanes<C> g = load_lanes(grad + i, step);
    return is_log ? g : g * load_lanes(y + i, step);
  };
  Lanes<C> a{}, b{};
  int64_t done = 0;
  for (; done + 2 * kLanes<C> <= columns; done += 2 * kLanes<C>) {
    a += term(done, FullStep{});
    b += term(done + kLanes<C>, FullStep{});
  }
  for_lanes<C>(done, columns,
               [&](int64_t i, auto step) { a += within<C>(term(i, step_of(step)), step); });
  const C sum = lane_sum<C>(a + b);
  for_lanes<C>(0, columns, [&](int64_t i, auto part) {
    const auto step = step_of(part);
    const Lanes<C> g = load_lanes(grad + i, step), out = load_lanes(y + i, step);
    store_lanes(to + i, (is_log ? g - out * sum : (g - sum) * out) * scale, step);
  });
}

template <class T>
void softmax_backward_batches(const SoftmaxBackward& p, const T* grad, const T* y, T* grad_x,
                              int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t columns = p.length;
  const RowReduction<C> reduction(columns);
  const auto for_each_row = [&](int64_t count, const C* g, int64_t stride, const C* out, C* to,
                                const auto& step_of) {
    const bool is_whole = columns % kBatchLanes<C> == 0;
    for (int64_t row = 0; row < count; ++row, g += stride, out += columns, to += columns)
      is_whole ? whole_row_gradient(p, reduction, g, out, to)
               : row_gradient(p, g, out, to, step_of);
  };
  Batch<C> grads, outputs, results;
  for_batches(columns, begin, end, [&](int64_t first, int64_t count) {
    constexpr bool kIsDirect = std::is_same_v<T, C>;
    const int64_t elements = count * columns;
    const T* const g = grad + first * p.outer_stride;
    const T* const saved = y + first * columns;
    T* const to = grad_x + first * columns;
    if (p.log || !kIsDirect) widen_run(outputs.at, saved, 1, elements);
    if (p.log) {
      const int64_t limit = padded(elements);
#pragma GCC ivdep
      for (int64_t i = 0; i < limit; ++i) outputs.at[i] = ExactMath::exp_or_zero(outputs.at[i]);
    }
    if constexpr (kIsDirect) {
      for_each_row(count, g, p.outer_stride, p.log ? outputs.at : saved, to,
                   [](auto step) { return step; });
    } else {
      widen_rows(grads.at, g, p.outer_stride, columns, count);
      for_each_row(count, grads.at, columns, outputs.at, results.at,
                   [](auto) { return FullStep{}; });
      narrow_run(to, results.at, elements);
    }
  });
}

}  // namespace
}  // namespace TORCHKILN_ISA
}  // namespace torchkiln::cpu
