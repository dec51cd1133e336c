#pragma once

// Softmax of several rows at a time, as columns of registers: for dimensions that are not the
// innermost one, and for rows too short to be vectorised one by one.

#include <algorithm>
#include <limits>

#include "detail/simd_exp.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

inline constexpr int64_t kColumns = 256;
// Elements per column that are buffered together, and summed in the compute type.
inline constexpr int64_t kColumnBlock = 32;

/// The rows of an operand as columns, in groups of equally spaced columns.
template <class T>
struct Columns {
  T* data;
  int64_t stride;  // elements from one element of a column to the next
  int64_t column_stride;
  int64_t group_stride;
  int64_t group;  // columns per group
};

/// A strip of an operand: the columns begin <= i < begin + count, at most kColumns.
template <class T>
class Strip {
 public:
  using C = Compute<std::remove_const_t<T>>;

  Strip(const Columns<T>& columns, int64_t begin, int64_t count)
      : columns_(columns),
        data_(columns.data + begin / columns.group * columns.group_stride +
              begin % columns.group * columns.column_stride),
        count_(count),
        first_count_(std::min(count, columns.group - begin % columns.group)) {}

  /// Whether the compiler can vectorise a loop that accesses row(r) directly.
  bool is_direct() const {
    return !std::is_same_v<std::remove_const_t<T>, Half> && columns_.column_stride == 1 &&
           first_count_ == count_;
  }
  T* row(int64_t r) const { return data_ + r * columns_.stride; }
  /// Element r of column i.
  T& element(int64_t r, int64_t i) const {
    if (i < first_count_) return row(r)[i * columns_.column_stride];
    const int64_t left = i - first_count_ + columns_.group;
    return row(
        r)[left / columns_.group * columns_.group_stride +
           (left % columns_.group - (columns_.group - first_count_)) * columns_.column_stride];
  }

  /// Reads element r of each column i into to[i].
  void read(int64_t r, C* to) const {
    for_groups(r, [&](int64_t at, T* from, int64_t count) {
      widen_run(to + at, from, columns_.column_stride, count);
    });
  }

  /// Stores result(i), rounded, as element r of each column i.
  template <class Result>
  void store(int64_t r, C* buffer, const Result& result) const {
    if (first_count_ == count_)
      return store_run(row(r), columns_.column_stride, count_, buffer, result);
    for (int64_t i = 0; i < count_; ++i) buffer[i] = result(i);
    for_groups(r, [&](int64_t at, T* to, int64_t count) {
      if (columns_.column_stride == 1) {
        narrow_run(to, buffer + at, count);
      } else {
        scatter_run(to, columns_.column_stride, buffer + at, count);
      }
    });
  }

 private:
  template <class Body>
  void for_groups(int64_t r, const Body& body) const {
    T* from = row(r);
    int64_t count = first_count_;
    body(0, from, count);
    from += columns_.group_stride - (columns_.group - count) * columns_.column_stride;
    for (int64_t done = count; done < count_; done += count, from += columns_.group_stride) {
      count = std::min(count_ - done, columns_.group);
      body(done, from, count);
    }
  }

  const Columns<T>& columns_;
  T* data_;
  int64_t count_;
  int64_t first_count_;  // columns of the strip in the first group
};

/// The rows of a strip, scaled, in the compute type. If they need a copy and a column is no longer
/// than a block, the copies are kept for later passes.
template <class T>
class BufferedRows {
 public:
  using C = Compute<T>;

  BufferedRows(const Strip<const T>& strip, int64_t length, int64_t count, C scale)
      : strip_(strip),
        count_(count),
        scale_(scale),
        is_direct_(strip.is_direct() && scale == C(1)),
        buffers_all_(length <= kColumnBlock) {}

  bool buffers_all() const { return buffers_all_; }
  C* buffer_of(int64_t r) { return rows_[buffers_all_ ? r : 0]; }
  /// Whether row(r) can be used directly, because widen() of its elements gives the scaled numbers.
  bool is_direct() const { return is_direct_; }
  const T* row(int64_t r) const { return strip_.row(r); }

  /// The numbers of row r. `again`: whether the row was read before. Inlining is forced, because a
  /// call would take a fifth of the time of short rows.
  TORCHKILN_FUNCTION const C* numbers(int64_t r, bool again) {
    if constexpr (std::is_same_v<T, C>) {
      if (is_direct_) return row(r);
    }
    C* values = buffer_of(r);
    if (!again || !buffers_all_) {
      strip_.read(r, values);
      for (int64_t i = 0; scale_ != C(1) && i < count_; ++i) values[i] *= scale_;
    }
    return values;
  }

  /// Calls body(values), where widen(values[i]) is the scaled number of row r in column i of the
  /// strip. `again`: see numbers().
  template <class Body>
  void with(int64_t r, bool again, const Body& body) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (is_direct_) return body(row(r));
    }
    body(numbers(r, again));
  }

 private:
  const Strip<const T>& strip_;
  int64_t count_;
  C scale_;
  bool is_direct_;
  bool buffers_all_;
  C rows_[kColumnBlock][kColumns];
};

/// Computes the softmax of each column.
template <class T>
void softmax_columns(const Softmax& p, const Strip<const T>& x, const Strip<T>& y, int64_t count) {
  using C = Compute<T>;
  BufferedRows<T> rows(x, p.length, count, static_cast<C>(p.scale));
  C maximum[kColumns], shift[kColumns], block_sum[kColumns], results[kColumns];
  double sum[kColumns];
  const bool keeps = !p.log && rows.buffers_all();
  std::fill_n(maximum, count, -kInfinity<C>);
  for (int64_t first = 0; first < p.length; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, p.length);
    for (int64_t r = first; r < last; ++r) {
      rows.with(r, /*again=*/false, [&](const auto* values) {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i)
          maximum[i] = widen(values[i]) > maximum[i] ? widen(values[i]) : maximum[i];
      });
    }
    for (int64_t i = 0; i < count; ++i) {
      const C next = maximum[i] > -kInfinity<C> ? maximum[i] : C(0);
      if (first > 0) {
        // The sum is 0 as long as all elements are -infinity. Then the shift may grow by any
        // amount; the clamp keeps exp() finite.
        const double step = static_cast<double>(shift[i]) - static_cast<double>(next);
        sum[i] *= ExactMath::exp(step < 0 ? step : 0.0);
      }
      shift[i] = next;
    }
    std::fill_n(block_sum, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      rows.with(r, /*again=*/true, [&](const auto* values) {
        C* powers = keeps ? rows.buffer_of(r) : results;
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) {
          powers[i] = ExactMath::exp_or_zero(widen(values[i]) - shift[i]);
          block_sum[i] += powers[i];
        }
      });
    }
    for (int64_t i = 0; i < count; ++i)
      sum[i] = static_cast<double>(block_sum[i]) + (first > 0 ? sum[i] : 0.0);
  }
  C finish[kColumns];
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) sum[i] = maximum[i] > -kInfinity<C> ? sum[i] : kNan;
  if (p.log) {
    for (int64_t i = 0; i < count; ++i) finish[i] = static_cast<C>(log_of<C>(sum[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) finish[i] = C(1) / static_cast<C>(sum[i]);
  }
  for (int64_t r = 0; r < p.length; ++r) {
    if (keeps) {
      const C* powers = rows.buffer_of(r);
      y.store(r, results, [&](int64_t i) { return powers[i] * finish[i]; });
      continue;
    }
    rows.with(r, /*again=*/true, [&](const auto* values) {
      if (p.log) {
        y.store(r, results, [&](int64_t i) { return (widen(values[i]) - shift[i]) - finish[i]; });
      } else {
        y.store(r, results, [&](int64_t i) {
          return ExactMath::exp_or_zero(widen(values[i]) - shift[i]) * finish[i];
        });
      }
    });
  }
}

template <class T>
void softmax_backward_columns(const SoftmaxBackward& p, const Strip<const T>& grad,
                              const Strip<const T>& y, const Strip<T>& grad_x, int64_t count) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  BufferedRows<T> grads(grad, p.length, count, C(1));
  BufferedRows<T> outputs(y, p.length, count, C(1));
  C block_sum[kColumns], total[kColumns], results[kColumns];
  double sum[kColumns];
  const auto with_both = [&](int64_t r, bool again, const auto& body) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (grads.is_direct() && outputs.is_direct()) return body(grads.row(r), outputs.row(r));
    }
    const C* const g = grads.numbers(r, again);
    const C* const out = outputs.numbers(r, again);
    body(g, out);
  };
  std::fill_n(sum, count, 0.0);
  for (int64_t first = 0; first < p.length; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, p.length);
    std::fill_n(block_sum, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      with_both(r, /*again=*/false, [&](const auto* g, const auto* out) {
        if (p.log) {
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) block_sum[i] += widen(g[i]);
        } else {
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) block_sum[i] += widen(g[i]) * widen(out[i]);
        }
      });
    }
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block_sum[i]);
  }
  for (int64_t i = 0; i < count; ++i) total[i] = static_cast<C>(sum[i]);
  for (int64_t r = 0; r < p.length; ++r) {
    with_both(r, /*again=*/true, [&](const auto* g, const auto* out) {
      if (p.log) {
        grad_x.store(r, results, [&](int64_t i) {
          return (widen(g[i]) - ExactMath::exp_or_zero(widen(out[i])) * total[i]) * scale;
        });
      } else {
        grad_x.store(r, results,
                     [&](int64_t i) { return (widen(g[i]) - total[i]) * widen(out[i]) * scale; });
      }
    });
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
