#pragma once

// Softmax and its gradient of several rows at a time, as columns.

#include "detail/columns.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Computes the softmax of each column.
template <class T>
void softmax_columns(const Softmax& p, const Strip<const T>& x, const Strip<T>& y, int64_t count) {
  using C = Compute<T>;
  BufferedRows<T> rows(x, p.length, count, static_cast<C>(p.scale));
  ColumnSums<T> sums;
  C results[kColumns];
  const bool keeps = !p.log && rows.buffers_all();
  sums.add(rows, p.length, count, /*has_moment=*/false,
           [&](int64_t r) { return keeps ? rows.buffer_of(r) : results; });
  const C* const shift = sums.shift;
  C finish[kColumns];
  if (p.log) {
    for (int64_t i = 0; i < count; ++i) finish[i] = static_cast<C>(log_of<C>(sums.sum[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) finish[i] = C(1) / static_cast<C>(sums.sum[i]);
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
