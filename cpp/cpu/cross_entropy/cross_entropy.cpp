#include "torchkiln/kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "cross_entropy/columns.h"
#include "cross_entropy/logprob.h"
#include "cross_entropy/target.h"
#include "detail/simd_row.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// The target distribution q of a row, except the share 1 - label_smoothing, which belongs to the
/// target class alone.
template <class T>
class Distribution {
 public:
  using C = Compute<T>;

  Distribution(const ClassTarget& target, int64_t classes)
      : target_(target),
        weight_(static_cast<const C*>(target.weight)),
        confidence_(1.0 - target.label_smoothing),
        uniform_(target.label_smoothing / static_cast<double>(target.all_classes)) {
    if (is_uniform()) std::fill_n(uniform_q_, std::min(kPiece, classes), static_cast<C>(uniform_));
  }

  /// Whether q is not 0 outside of the target class.
  bool is_spread() const { return target_.index == nullptr || target_.label_smoothing != 0; }
  /// The share of q that belongs only to a target class of weight w.
  double target_share(double w) const { return confidence_ * w; }
  /// The whole of q for a target class of weight w.
  double target_q(double w) const { return confidence_ * w + uniform_ * w; }
  double weight(int64_t index) const {
    return weight_ == nullptr ? 1.0 : static_cast<double>(weight_[index]);
  }

  /// Returns q for `count` classes from `at` on, at most kPiece classes.
  const C* read(C* buffer, int64_t row, int64_t at, int64_t count) const {
    if (is_uniform()) return uniform_q_;
    const C confidence = static_cast<C>(confidence_);
    const C uniform = static_cast<C>(uniform_);
    if (target_.index == nullptr) {
      const int64_t offset = row * target_.probabilities_row_stride + at;
      const C* probabilities = read_run(buffer, target_.probabilities, offset, /*stride=*/1, count,
                                        target_.probabilities_dtype);
      if (weight_ == nullptr && target_.label_smoothing == 0) return probabilities;
      for (int64_t i = 0; i < count; ++i) buffer[i] = confidence * probabilities[i] + uniform;
      for (int64_t i = 0; weight_ != nullptr && i < count; ++i) buffer[i] *= weight_[at + i];
    } else {
      for (int64_t i = 0; i < count; ++i) buffer[i] = uniform * weight_[at + i];
    }
    return buffer;
  }

  /// The sum of q over the first `classes` classes. It is exact if all q are equal; else it is
  /// `added`, the sum that the caller has accumulated.
  double mass(double added, int64_t classes) const {
    return is_uniform() ? uniform_ * static_cast<double>(classes) : added;
  }

 private:
  bool is_uniform() const { return target_.index != nullptr && weight_ == nullptr; }

  const ClassTarget& target_;
  const C* weight_;
  double confidence_;
  double uniform_;
  C uniform_q_[kPiece];
};

/// 1 if no logit exceeds logits[index], else 0. NaN in the row gives 0.
template <class T>
Compute<T> is_largest(const T* logits, int64_t classes, int64_t index) {
  using C = Compute<T>;
  C own;
  widen_run(&own, logits + index, /*stride=*/1, 1);
  C buffer[kPiece];
  int64_t larger = 0;
  for (int64_t at = 0; at < classes; at += kPiece) {
    const int64_t count = std::min(kPiece, classes - at);
    widen_run(buffer, logits + at, /*stride=*/1, count);
    for (int64_t i = 0; i < count; ++i) larger += !(buffer[i] <= own);
  }
  return larger == 0 ? C(1) : C(0);
}

/// Sums over the classes of a shard, without the share that only the target class has.
struct Parts {
  double mass;   // sum of q
  double below;  // sum of q * (logit - shift)
  double shift;  // the maximum of the logits
  double sum;    // sum of exp(logit - shift)
};

/// Stores the numbers of a row of a shard.
template <class T>
void store_parts(const CrossEntropy& p, const Distribution<T>& distribution, int64_t row,
                 int64_t index, Parts parts) {
  using C = Compute<T>;
  const double w = index == kElsewhere ? 0.0 : distribution.weight(index);
  if (index != kElsewhere) {
    C logit;
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    widen_run(&logit, logits + index, /*stride=*/1, 1);
    const double own = distribution.target_share(w);
    parts.mass += own;
    parts.below += own * (static_cast<double>(logit) - parts.shift);
  }
  static_cast<C*>(p.loss)[row] = static_cast<C>(parts.below);
  static_cast<C*>(p.log_sum_exp)[row] = static_cast<C>(parts.shift);
  static_cast<C*>(p.sum)[row] = static_cast<C>(parts.sum);
  static_cast<C*>(p.mass)[row] = static_cast<C>(parts.mass);
  static_cast<C*>(p.target_weight)[row] = static_cast<C>(w);
}

template <class T>
void row_loss(const CrossEntropy& p, const Distribution<T>& distribution, int64_t row,
              int64_t index) {
  using C = Compute<T>;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  C buffer[kPiece], q_buffer[kPiece], powers[kPiece];
  ExponentialSum<C> sum;
  // The sums of q and of q * (logit - shift). `below` is corrected when the shift changes.
  double mass = 0;
  double below = 0;
  for (int64_t at = 0; at < p.classes; at += kPiece) {
    const int64_t count = std::min(kPiece, p.classes - at);
    with_run(buffer, logits + at, /*stride=*/1, count, [&](const auto* values) {
      const C before = sum.shift();
      sum.add(values, count, powers);
      if (!distribution.is_spread()) return;
      const C shift = sum.shift();
      if (shift != before)
        below -= mass * (static_cast<double>(shift) - static_cast<double>(before));
      const C* q = distribution.read(q_buffer, row, at, count);
      double sums[2];
      sum_lanes<C>(sums, count, [&](int64_t i, auto lanes, Lanes<C>* terms) {
        const Lanes<C> shares = load_lanes(q + i, lanes);
        terms[0] += shares * (load_lanes(values + i, lanes) - shift);
        terms[1] += shares;
      });
      below += sums[0];
      mass = distribution.mass(mass + sums[1], at + count);
    });
  }
  const double shift = static_cast<double>(sum.shift());
  const double logarithm = log_of<C>(sum.sum());
  const double log_sum_exp = shift + logarithm;
  if (p.sum != nullptr) {
    store_parts(p, distribution, row, index, {mass, below, shift, sum.sum_or_zero()});
    return;
  }
  const double w = index == kNoClass ? 1.0 : distribution.weight(index);
  double loss = distribution.is_spread() ? mass * logarithm - below : 0.0;
  // The loss is NaN if the largest logit, whose logit - shift is 0, has an infinite probability.
  // The true loss is infinite.
  if (std::isinf(mass) && logarithm > 0) loss = mass;
  if (index != kNoClass) {
    const double own = distribution.target_share(w);
    C logit;
    widen_run(&logit, logits + index, /*stride=*/1, 1);
    const double alone = logarithm - (static_cast<double>(logit) - shift);
    mass += own;
    // As in torch's formula, a share of 0 times a value that overflows the compute type is NaN.
    loss += own * (own == 0 ? static_cast<double>(static_cast<C>(alone)) : alone);
  }
  if (p.z_loss != 0) loss += p.z_loss * w * log_sum_exp * log_sum_exp;
  const C stored = static_cast<C>(log_sum_exp);
  // The stored log_sum_exp is rounded, which changes exp(logit - stored) by this factor.
  const double correction = ExactMath::exp((static_cast<double>(stored) - shift) - logarithm);
  static_cast<C*>(p.loss)[row] = static_cast<C>(loss);
  static_cast<C*>(p.log_sum_exp)[row] = stored;
  static_cast<C*>(p.mass)[row] =
      static_cast<C>((mass + 2 * p.z_loss * w * log_sum_exp) * correction);
  static_cast<C*>(p.target_weight)[row] = static_cast<C>(w);
  if (p.correct != nullptr) static_cast<C*>(p.correct)[row] = is_largest(logits, p.classes, index);
}

template <class T>
Status losses(const CrossEntropy& p, const ClassLayout& layout, int64_t begin, int64_t end) {
  using C = Compute<T>;
  if (has_columns(p, layout)) return column_losses<T>(p, layout, begin, end);
  const Distribution<T> distribution(p.target, p.classes);
  for (int64_t row = begin; row < end; ++row) {
    int64_t index;
    if (!read_target(p.target, row, p.classes, index)) return kOutOfRange;
    if (index == kIgnored) {
      for (void* out :
           {p.loss, p.log_sum_exp, p.mass, p.target_weight, p.correct, p.sum, p.entropy})
        if (out != nullptr) static_cast<C*>(out)[row] = C(0);
    } else if (p.is_logprob) {
      row_logprob<T>(p, row, index >= 0 ? std::optional(index) : std::nullopt);
    } else {
      row_loss(p, distribution, row, index);
    }
  }
  return {};
}

template <class T>
void row_gradient(const CrossEntropyBackward& p, const Distribution<T>& distribution, int64_t row,
                  int64_t index, Compute<T> scale) {
  using C = Compute<T>;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  T* grad_logits = static_cast<T*>(p.grad_logits) + row * p.grad_logits_row_stride;
  const C log_sum_exp = static_cast<const C*>(p.log_sum_exp)[row];
  const C factor = static_cast<const C*>(p.mass)[row] * scale;
  // Computed before the loop, because the gradient may overwrite the logits.
  C at_target = 0;
  if (index >= 0) {
    C logit;
    widen_run(&logit, logits + index, /*stride=*/1, 1);
    const C q = static_cast<C>(distribution.target_q(distribution.weight(index)));
    at_target = factor * ExactMath::exp_or_zero(logit - log_sum_exp) - scale * q;
  }
  C buffer[kPiece], q_buffer[kPiece], results[kPiece];
  for (int64_t at = 0; at < p.classes; at += kPiece) {
    const int64_t count = std::min(kPiece, p.classes - at);
    with_run(buffer, logits + at, /*stride=*/1, count, [&](const auto* values) {
      const auto softmax = [=](int64_t i) {
        return factor * ExactMath::exp_or_zero(widen(values[i]) - log_sum_exp);
      };
      if (distribution.is_spread()) {
        const C* q = distribution.read(q_buffer, row, at, count);
        store_run(grad_logits + at, /*stride=*/1, count, results,
                  [=](int64_t i) { return softmax(i) - scale * q[i]; });
      } else {
        store_run(grad_logits + at, /*stride=*/1, count, results, softmax);
      }
    });
  }
  if (index >= 0) narrow_run(grad_logits + index, &at_target, 1);
}

template <class T, class To>
Status gradients(const CrossEntropyBackward& p, const ClassLayout& layout, int64_t begin,
                 int64_t end) {
  using C = Compute<T>;
  if constexpr (std::is_same_v<T, To>) {
    if (has_columns(p, layout)) return column_gradients<T>(p, layout, begin, end);
  }
  const Distribution<T> distribution(p.target, p.classes);
  const C divisor = p.divisor == nullptr ? C(1) : *static_cast<const C*>(p.divisor);
  for (int64_t row = begin; row < end; ++row) {
    int64_t index;
    if (!read_target(p.target, row, p.classes, index)) return kOutOfRange;
    if (index == kIgnored) {
      To* grad_logits = static_cast<To*>(p.grad_logits) + row * p.grad_logits_row_stride;
      std::fill_n(grad_logits, p.classes, To{});
      continue;
    }
    C grad = 0;
    const C scale =
        *read_run(&grad, p.grad, row * p.grad_stride, /*stride=*/1, 1, p.grad_dtype) / divisor;
    if (p.is_logprob) {
      row_logprob_gradient<T, To>(p, row, index, scale);
    } else if constexpr (std::is_same_v<T, To>) {
      row_gradient(p, distribution, row, index, scale);
    }
  }
  return {};
}

template <class C>
double sum_of_rows(const void* values, int64_t rows) {
  Cascade sum;
  for (int64_t row = 0; row < rows; row += kBlock<C>)
    sum.add(static_cast<double>(
        sum_of(static_cast<const C*>(values) + row, std::min(kBlock<C>, rows - row))));
  return sum.total();
}

}  // namespace

Status cross_entropy(const CrossEntropy& p, const ClassLayout& layout, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    return losses<typename decltype(tag)::type>(with_all_classes(p), layout, begin, end);
  });
}

Status cross_entropy_backward(const CrossEntropyBackward& given, const ClassLayout& layout,
                              int64_t begin, int64_t end) {
  const CrossEntropyBackward p = with_all_classes(given);
  return dispatch_floating(p.grad_logits_dtype, [&](auto tag) {
    using To = typename decltype(tag)::type;
    return p.dtype == p.grad_logits_dtype ? gradients<To, To>(p, layout, begin, end)
                                          : gradients<Compute<To>, To>(p, layout, begin, end);
  });
}

Status loss_sum(const LossSum& p) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using C = Compute<typename decltype(tag)::type>;
    return dispatch_floating(p.out_dtype, [&](auto out_tag) {
      using Out = typename decltype(out_tag)::type;
      double total = sum_of_rows<C>(p.loss, p.rows);
      if (p.mean) {
        const double divisor = sum_of_rows<C>(p.target_weight, p.rows);
        total /= divisor;
        *static_cast<C*>(p.divisor) = static_cast<C>(divisor);
      }
      narrow(static_cast<Out*>(p.out), total);
      return Status{};
    });
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(cross_entropy,
                    (const CrossEntropy& p, const ClassLayout& layout, int64_t begin, int64_t end),
                    (p, layout, begin, end))
TORCHKILN_CPU_ENTRY(cross_entropy_backward,
                    (const CrossEntropyBackward& p, const ClassLayout& layout, int64_t begin,
                     int64_t end),
                    (p, layout, begin, end))
TORCHKILN_CPU_ENTRY(loss_sum, (const LossSum& p), (p))

}  // namespace torchkiln::cpu
