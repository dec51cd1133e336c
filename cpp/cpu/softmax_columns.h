#pragma once

// Softmax of rows that lie side by side, one a column: where the dimension is not the innermost
// one, or where rows are too short to be computed one at a time.

#include <algorithm>
#include <limits>

#include "exponentials.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

inline constexpr int64_t kColumns = 256;
// Elements of each column that are summed in the compute type.
inline constexpr int64_t kColumnBlock = 32;

/// Rows side by side: element r of row i lies at r * stride + i * column_stride.
template <class T>
struct Columns {
  T* data;
  int64_t stride;
  int64_t column_stride;

  /// with_run, or store_run, of the elements r.
  template <class C, class Body>
  void with(int64_t r, int64_t count, C* buffer, const Body& body) const {
    with_run(buffer, static_cast<const std::remove_const_t<T>*>(data + r * stride), column_stride,
             count, body);
  }
  template <class C, class Result>
  void store(int64_t r, int64_t count, C* buffer, const Result& result) const {
    store_run(data + r * stride, column_stride, count, buffer, result);
  }
};

/// The same as a row, for each column.
template <class T>
void softmax_columns(const Softmax& p, const Columns<const T>& x, const Columns<T>& y,
                     int64_t count) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C buffer[kColumns], top[kColumns], shift[kColumns], block[kColumns];
  double sum[kColumns];
  const auto with_scaled = [&](int64_t r, const auto& body) {
    x.with(r, count, buffer, [&](const auto* values) {
      if (scale == C(1)) return body(values);
      for (int64_t i = 0; i < count; ++i) buffer[i] = widen(values[i]) * scale;
      body(static_cast<const C*>(buffer));
    });
  };
  std::fill_n(top, count, -kInfinity<C>);
  std::fill_n(shift, count, C(0));
  std::fill_n(sum, count, 0.0);
  for (int64_t first = 0; first < p.length; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, p.length);
    for (int64_t r = first; r < last; ++r) {
      with_scaled(r, [&](const auto* values) {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i)
          top[i] = widen(values[i]) > top[i] ? widen(values[i]) : top[i];
      });
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const C next = top[i] > -kInfinity<C> ? top[i] : C(0);
      // Where all was -infinity, the sum is 0 and the shift may grow by anything.
      const double step = static_cast<double>(shift[i]) - static_cast<double>(next);
      sum[i] *= ExactMath::exp(step < 0 ? step : 0.0);
      shift[i] = next;
    }
    std::fill_n(block, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      with_scaled(r, [&](const auto* values) {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i)
          block[i] += ExactMath::exp_or_zero(widen(values[i]) - shift[i]);
      });
    }
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block[i]);
  }
  C last_step[kColumns];
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) sum[i] = top[i] > -kInfinity<C> ? sum[i] : kNan;
  if (p.log) {
    for (int64_t i = 0; i < count; ++i) last_step[i] = static_cast<C>(log_of(sum[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) last_step[i] = static_cast<C>(1.0 / sum[i]);
  }
  C* const results = block;
  for (int64_t r = 0; r < p.length; ++r) {
    with_scaled(r, [&](const auto* values) {
      if (p.log) {
        y.store(r, count, results,
                [&](int64_t i) { return (widen(values[i]) - shift[i]) - last_step[i]; });
      } else {
        y.store(r, count, results, [&](int64_t i) {
          return ExactMath::exp_or_zero(widen(values[i]) - shift[i]) * last_step[i];
        });
      }
    });
  }
}

template <class T>
void softmax_backward_columns(const SoftmaxBackward& p, const Columns<const T>& grad,
                              const Columns<const T>& y, const Columns<T>& grad_x, int64_t count) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C grad_buffer[kColumns], y_buffer[kColumns], block[kColumns], total[kColumns];
  double sum[kColumns];
  const auto with_both = [&](int64_t r, const auto& body) {
    grad.with(r, count, grad_buffer, [&](const auto* g) {
      y.with(r, count, y_buffer, [&](const auto* out) { body(g, out); });
    });
  };
  std::fill_n(sum, count, 0.0);
  for (int64_t first = 0; first < p.length; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, p.length);
    std::fill_n(block, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      with_both(r, [&](const auto* g, const auto* out) {
        if (p.log) {
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) block[i] += widen(g[i]);
        } else {
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) block[i] += widen(g[i]) * widen(out[i]);
        }
      });
    }
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block[i]);
  }
  for (int64_t i = 0; i < count; ++i) total[i] = static_cast<C>(sum[i]);
  C* const results = block;
  for (int64_t r = 0; r < p.length; ++r) {
    with_both(r, [&](const auto* g, const auto* out) {
      if (p.log) {
        grad_x.store(r, count, results, [&](int64_t i) {
          return (widen(g[i]) - ExactMath::exp_or_zero(widen(out[i])) * total[i]) * scale;
        });
      } else {
        grad_x.store(r, count, results,
                     [&](int64_t i) { return (widen(g[i]) - total[i]) * widen(out[i]) * scale; });
      }
    });
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
