#pragma once

// Losses and log-probabilities of several rows at a time, as columns of registers: for rows too
// short to be vectorised one by one, and for rows whose classes are not adjacent.

#include <algorithm>

#include "cross_entropy/logprob.h"
#include "cross_entropy/target.h"
#include "detail/columns.h"
#include "detail/transpose.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Scaled logits of adjacent classes, a block of classes at a time, exchanged in registers.
template <class T>
class ExchangedRows {
 public:
  using C = Compute<T>;

  ExchangedRows(const T* from, int64_t row_stride, int64_t count, C scale)
      : from_(from), row_stride_(row_stride), count_(count), scale_(scale) {}

  /// Reads the classes first <= r < last.
  void read(int64_t first, int64_t last) {
    first_ = first;
    const T* const from = from_ + first;
    if constexpr (std::is_same_v<T, C>) {
      transpose_tile(rows_[0], kColumns, from, row_stride_, last - first, count_);
    } else {
      T tile[kColumnBlock * kColumns];
      transpose_tile(tile, kColumns, from, row_stride_, last - first, count_);
      for (int64_t r = 0; r < last - first; ++r)
        widen_run(rows_[r], tile + r * kColumns, /*stride=*/1, count_);
    }
    if (scale_ == C(1)) return;
    for (int64_t r = 0; r < last - first; ++r)
      for (int64_t i = 0; i < count_; ++i) rows_[r][i] *= scale_;
  }

  template <class Body>
  void with(int64_t r, bool, const Body& body) {
    body(static_cast<const C*>(rows_[r - first_]));
  }

 private:
  const T* from_;
  int64_t row_stride_, count_;
  C scale_;
  int64_t first_ = 0;
  C rows_[kColumnBlock][kColumns];
};

/// The target classes of a strip, and the scaled logits of these classes.
template <class T>
struct ColumnTargets {
  using C = Compute<T>;

  int64_t index[kColumns];  // 0 if the row is ignored
  C logits[kColumns];
  C weights[kColumns];  // of the classes
  int64_t ignored[kColumns];
  int64_t ignored_count = 0;

  /// Returns false if a target is not a class.
  template <class Arguments>
  bool read(const Arguments& p, const Strip<const T>& strip, int64_t row, int64_t count, C scale) {
    const C* const of_class = static_cast<const C*>(p.target.weight);
    for (int64_t i = 0; i < count; ++i) {
      if (!read_target(p.target, row + i, p.classes, index[i])) return false;
      if (index[i] == kIgnored) ignored[ignored_count++] = i;
      index[i] = std::max<int64_t>(index[i], 0);
      widen_run(logits + i, &strip.element(index[i], i), /*stride=*/1, 1);
      weights[i] = of_class == nullptr ? C(1) : of_class[index[i]];
    }
    for (int64_t i = 0; i < count; ++i) logits[i] *= scale;  // a separate loop: see row_logprob
    return true;
  }
};

/// Computes losses from the logarithms of the sums: w * (log_sum_exp - logit) for each row.
template <class T>
void compute_losses(const CrossEntropy& p, double* losses, const ColumnTargets<T>& targets,
                    const ColumnSums<T>& sums, const double* logarithm, int64_t count) {
  using C = Compute<T>;
  double alone[kColumns];
  for (int64_t i = 0; i < count; ++i) {
    const double relative =
        static_cast<double>(targets.logits[i]) - static_cast<double>(sums.shift[i]);
    alone[i] = logarithm[i] - relative;
  }
  if (p.is_logprob) {
    for (int64_t i = 0; i < count; ++i) losses[i] = 0.0 - alone[i];
  } else if (p.target.weight == nullptr) {
    std::copy_n(alone, count, losses);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      // As in torch's formula, a share of 0 times a value that overflows the compute type is NaN.
      const double w = static_cast<double>(targets.weights[i]);
      const double rounded = static_cast<double>(static_cast<C>(alone[i]));
      losses[i] = w * (w == 0 ? rounded : alone[i]);
    }
  }
}

/// Stores the results of `count` rows from `row` on. Its loops are short and have no branches, so
/// that the compiler vectorises them.
template <class T>
void store_columns(const CrossEntropy& p, const ColumnTargets<T>& targets,
                   const ColumnSums<T>& sums, int64_t row, int64_t count) {
  using C = Compute<T>;
  const auto of_rows = [&](void* all) { return static_cast<C*>(all) + row; };
  double logarithm[kColumns], log_sum_exp[kColumns], mass[kColumns], rounding[kColumns];
  for (int64_t i = 0; i < count; ++i) logarithm[i] = log_of<C>(sums.sum[i]);
  for (int64_t i = 0; i < count; ++i)
    log_sum_exp[i] = static_cast<double>(sums.shift[i]) + logarithm[i];
  double losses[kColumns];
  compute_losses(p, losses, targets, sums, logarithm, count);
  for (int64_t i = 0; i < count; ++i) mass[i] = static_cast<double>(targets.weights[i]);
  if (p.z_loss != 0) {
    for (int64_t i = 0; i < count; ++i) {
      const double slope = p.z_loss * mass[i] * log_sum_exp[i];
      losses[i] += slope * log_sum_exp[i];
      mass[i] += 2 * slope;
    }
  }
  const auto store = [&](void* all, const double* numbers) {
    C* const to = of_rows(all);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<C>(numbers[i]);
  };
  store(p.loss, losses);
  store(p.log_sum_exp, log_sum_exp);
  const C* const stored = of_rows(p.log_sum_exp);
  // The rounding of log_sum_exp changes exp(logit - stored) by this factor.
  for (int64_t i = 0; i < count; ++i)
    rounding[i] =
        (static_cast<double>(stored[i]) - static_cast<double>(sums.shift[i])) - logarithm[i];
  for (int64_t i = 0; i < count; ++i) mass[i] *= ExactMath::exp(rounding[i]);
  store(p.mass, mass);
  std::copy_n(targets.weights, count, of_rows(p.target_weight));
  if (p.entropy == nullptr) return;
  C* const entropies = of_rows(p.entropy);
  for (int64_t i = 0; i < count; ++i)
    entropies[i] = static_cast<C>(logarithm[i] - sums.moment[i] / sums.sum[i]);
}

/// Stores 1 for a column if no logit exceeds that of the target class, else 0. NaN gives 0.
template <class T, class Rows>
void store_correct(Rows& rows, const ColumnTargets<T>& targets, int64_t classes,
                   Compute<T>* correct, int64_t count) {
  using C = Compute<T>;
  C is_largest[kColumns];
  std::fill_n(is_largest, count, C(1));
  for (int64_t first = 0; first < classes; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, classes);
    rows.read(first, last);
    for (int64_t r = first; r < last; ++r) {
      rows.with(r, /*again=*/false, [&](const auto* values) {
        for (int64_t i = 0; i < count; ++i)
          is_largest[i] = widen(values[i]) <= targets.logits[i] ? is_largest[i] : C(0);
      });
    }
  }
  std::copy_n(is_largest, count, correct);
}

/// Whether the rows are computed as columns.
inline bool has_columns(const CrossEntropy& p, const ClassLayout& layout) {
  constexpr int64_t kShort = 256;
  const bool is_plain =
      p.target.index != nullptr && p.target.label_smoothing == 0 && p.sum == nullptr;
  return is_plain && (layout.class_stride != 1 || p.classes <= kShort);
}
inline bool has_columns(const CrossEntropyBackward& p, const ClassLayout& layout) {
  constexpr int64_t kShort = 16;  // with more classes, exchanging the gradients takes longer
  const bool is_plain = p.target.index != nullptr && p.target.label_smoothing == 0 &&
                        p.target.all_classes == p.classes && !p.is_logprob;
  return is_plain && (layout.class_stride != 1 || p.classes <= kShort);
}

/// The rows of the logits as columns.
template <class T, class Arguments>
Columns<const T> logit_columns(const Arguments& p, const ClassLayout& layout) {
  return {static_cast<const T*>(p.logits), layout.class_stride, p.row_stride, layout.group_stride,
          layout.group == 0 ? p.rows : layout.group};
}

/// Calls body(row, count) for strips of the rows begin <= row < end. Large groups have strips of
/// their own, which are read in registers.
template <class Body>
Status for_strips(int64_t group, int64_t begin, int64_t end, const Body& body) {
  for (int64_t row = begin; row < end;) {
    const int64_t limit = group < kColumns ? kColumns : group - row % group;
    const int64_t count = std::min({kColumns, end - row, limit});
    if (!body(row, count)) return kOutOfRange;
    row += count;
  }
  return {};
}

/// Calls body(rows) with the logits of a strip, which are multiplied by `scale`.
template <class T, class Arguments, class Body>
void with_rows(const Arguments& p, const ClassLayout& layout, const Strip<const T>& strip,
               int64_t count, Compute<T> scale, const Body& body) {
  if (layout.class_stride == 1 && p.classes > 1) {
    ExchangedRows<T> rows(strip.row(0), p.row_stride, count, scale);
    body(rows);
  } else {
    BufferedRows<T> rows(strip, p.classes, count, scale);
    body(rows);
  }
}

/// Computes the rows begin <= row < end as columns.
template <class T>
Status column_losses(const CrossEntropy& p, const ClassLayout& layout, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const Columns<const T> columns = logit_columns<T>(p, layout);
  const C scale = p.is_logprob ? static_cast<C>(p.scale) : C(1);
  return for_strips(columns.group, begin, end, [&](int64_t row, int64_t count) {
    const Strip<const T> strip(columns, row, count);
    ColumnTargets<T> targets;
    if (!targets.read(p, strip, row, count, scale)) return false;
    ColumnSums<T> sums;
    with_rows<T>(p, layout, strip, count, scale, [&](auto& rows) {
      C powers[kColumns];
      sums.add(rows, p.classes, count, p.entropy != nullptr, [&](int64_t) { return powers; });
      if (p.correct != nullptr)
        store_correct<T>(rows, targets, p.classes, static_cast<C*>(p.correct) + row, count);
    });
    store_columns(p, targets, sums, row, count);
    for (int64_t i = 0; i < targets.ignored_count; ++i) {
      for (void* out : {p.loss, p.log_sum_exp, p.mass, p.target_weight, p.correct, p.entropy})
        if (out != nullptr) static_cast<C*>(out)[row + targets.ignored[i]] = C(0);
    }
    return true;
  });
}

/// Computes the gradients of the rows begin <= row < end as columns.
template <class T>
Status column_gradients(const CrossEntropyBackward& p, const ClassLayout& layout, int64_t begin,
                        int64_t end) {
  using C = Compute<T>;
  const Columns<const T> columns = logit_columns<T>(p, layout);
  const Columns<T> grad_columns{static_cast<T*>(p.grad_logits), 1, p.grad_logits_row_stride, 0,
                                p.rows};
  const C divisor = p.divisor == nullptr ? C(1) : *static_cast<const C*>(p.divisor);
  C grads[kColumns], factors[kColumns], results[kColumns];
  T tile[kColumnBlock * kColumns];
  return for_strips(columns.group, begin, end, [&](int64_t row, int64_t count) {
    const Strip<const T> strip(columns, row, count);
    const Strip<T> found(grad_columns, row, count);
    ColumnTargets<T> targets;
    if (!targets.read(p, strip, row, count, C(1))) return false;
    const C* const log_sum_exp = static_cast<const C*>(p.log_sum_exp) + row;
    const C* const masses = static_cast<const C*>(p.mass) + row;
    const C* const scales =
        read_run(grads, p.grad, row * p.grad_stride, p.grad_stride, count, p.grad_dtype);
    for (int64_t i = 0; i < count; ++i) grads[i] = scales[i] / divisor;
    for (int64_t i = 0; i < count; ++i) factors[i] = masses[i] * grads[i];
    const auto softmax = [&](C logit, int64_t i) {
      return factors[i] * ExactMath::exp_or_zero(logit - log_sum_exp[i]);
    };
    with_rows<T>(p, layout, strip, count, C(1), [&](auto& rows) {
      for (int64_t first = 0; first < p.classes; first += kColumnBlock) {
        const int64_t last = std::min(first + kColumnBlock, p.classes);
        rows.read(first, last);
        for (int64_t r = first; r < last; ++r) {
          rows.with(r, /*again=*/false, [&](const auto* values) {
            store_run(tile + (r - first) * kColumns, /*stride=*/1, count, results,
                      [&](int64_t i) { return softmax(widen(values[i]), i); });
          });
        }
        transpose_tile(&found.element(first, 0), p.grad_logits_row_stride, tile, kColumns, count,
                       last - first);
      }
    });
    for (int64_t i = 0; i < count; ++i) {
      const C at_target = softmax(targets.logits[i], i) - grads[i] * targets.weights[i];
      narrow_run(&found.element(targets.index[i], i), &at_target, 1);
    }
    for (int64_t k = 0; k < targets.ignored_count; ++k)
      std::fill_n(&found.element(0, targets.ignored[k]), p.classes, T{});
    return true;
  });
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
