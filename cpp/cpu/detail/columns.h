#pragma once

// Several rows at a time, as columns of registers: for dimensions that are not the innermost one,
// and for rows too short to be vectorised one by one.

#include <algorithm>
#include <limits>

#include "detail/simd_exp.h"

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

  /// Rows are read one by one, not in blocks: does nothing.
  void read(int64_t, int64_t) {}

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

/// For each column the maximum of its numbers z, the sum of exp(z - shift) and, if `has_moment`,
/// the sum of exp(z - shift) * (z - shift).
template <class T>
class ColumnSums {
 public:
  using C = Compute<T>;

  /// Adds rows of BufferedRows, or of a class with its read() and with(). powers_of(r) is memory
  /// for exp(z - shift) of row r, at the shift of its block.
  template <class Rows, class PowersOf>
  void add(Rows& rows, int64_t length, int64_t count, bool has_moment, const PowersOf& powers_of) {
    std::fill_n(maximum_, count, -kInfinity<C>);
    for (int64_t first = 0; first < length; first += kColumnBlock) {
      const int64_t last = std::min(first + kColumnBlock, length);
      rows.read(first, last);
      raise_maximum(rows, first, last, count);
      first == 0 ? set_shift(count) : move_shift(count, has_moment);
      has_moment ? add_block<true>(rows, first, last, count, powers_of)
                 : add_block<false>(rows, first, last, count, powers_of);
    }
    for (int64_t i = 0; i < count; ++i)
      sum[i] = maximum_[i] > -kInfinity<C> ? sum[i] : std::numeric_limits<double>::quiet_NaN();
  }

  C shift[kColumns];  // the maximum, or 0 if there is nothing above -infinity
  double sum[kColumns], moment[kColumns];

 private:
  template <class Rows>
  void raise_maximum(Rows& rows, int64_t first, int64_t last, int64_t count) {
    for (int64_t r = first; r < last; ++r) {
      rows.with(r, /*again=*/false, [&](const auto* values) {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i)
          maximum_[i] = widen(values[i]) > maximum_[i] ? widen(values[i]) : maximum_[i];
      });
    }
  }

  C next_shift(int64_t i) const { return maximum_[i] > -kInfinity<C> ? maximum_[i] : C(0); }

  void set_shift(int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) shift[i] = next_shift(i);
  }

  /// Sets the shift to the maximum, and corrects the sums of the blocks before. They are 0 as long
  /// as all numbers are -infinity. Then the shift may grow by any amount; the clamp keeps exp()
  /// finite.
  void move_shift(int64_t count, bool has_moment) {
    for (int64_t i = 0; i < count; ++i) {
      const C next = next_shift(i);
      const double step = static_cast<double>(shift[i]) - static_cast<double>(next);
      const double moved = step < 0 ? step : 0.0;
      const double factor = ExactMath::exp(moved);
      if (has_moment) moment[i] = factor * (moment[i] + bounded(moved) * sum[i]);
      sum[i] *= factor;
      shift[i] = next;
    }
  }

  template <bool has_moment, class Rows, class PowersOf>
  void add_block(Rows& rows, int64_t first, int64_t last, int64_t count,
                 const PowersOf& powers_of) {
    C block_sum[kColumns], block_moment[kColumns];
    std::fill_n(block_sum, count, C(0));
    std::fill_n(block_moment, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      rows.with(r, /*again=*/true, [&](const auto* values) {
        C* const powers = powers_of(r);
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) {
          const C exponent = widen(values[i]) - shift[i];
          powers[i] = ExactMath::exp_or_zero(exponent);
          block_sum[i] += powers[i];
          if constexpr (has_moment) block_moment[i] += powers[i] * bounded(exponent);
        }
      });
    }
    const bool is_first = first == 0;
    for (int64_t i = 0; i < count; ++i) {
      sum[i] = static_cast<double>(block_sum[i]) + (is_first ? 0.0 : sum[i]);
      if constexpr (has_moment)
        moment[i] = static_cast<double>(block_moment[i]) + (is_first ? 0.0 : moment[i]);
    }
  }

  C maximum_[kColumns];
};

}  // namespace torchkiln::cpu::TORCHKILN_ISA
