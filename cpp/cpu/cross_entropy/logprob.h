#pragma once

// The logarithm of the probability of a row's target class, the entropy of the row, and their
// gradients.

#include <algorithm>
#include <optional>

#include "detail/simd_exp.h"
#include "torchkiln/kernels/cross_entropy.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Computes the log-probability of class `index` and the entropy. Without an index, another shard
/// has the class.
template <class T>
void row_logprob(const CrossEntropy& p, int64_t row, std::optional<int64_t> index) {
  using C = Compute<T>;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  const C scale = static_cast<C>(p.scale);
  C scaled[kPiece], powers[kPiece];
  ExponentialSum<C> sum;
  double moment = 0;  // the sum of exp(z - shift) * (z - shift)
  double own = 0;
  for (int64_t at = 0; at < p.classes; at += kPiece) {
    const int64_t count = std::min(kPiece, p.classes - at);
    widen_run(scaled, logits + at, /*stride=*/1, count);
    // A separate loop, so that the product is rounded: a fused multiply-subtract would return its
    // rounding error for equal logits, 1e31 for logits of 1e38.
    for (int64_t i = 0; i < count; ++i) scaled[i] *= scale;
    if (index && *index >= at && *index < at + count)
      own = static_cast<double>(scaled[*index - at]);
    const double before = static_cast<double>(sum.shift()), sum_before = sum.sum_or_zero();
    sum.add(scaled, count, powers);
    const C shift = sum.shift();
    const double moved = before - static_cast<double>(shift);
    if (moved != 0 && sum_before > 0)
      moment = ExactMath::exp(moved) * (moment + bounded(moved) * sum_before);
    for (int64_t i = 0; i < count; ++i) powers[i] *= bounded(scaled[i] - shift);
    moment += piece_sum(powers, count);
  }
  const double shift = static_cast<double>(sum.shift());
  const double relative = index ? own - shift : 0;
  const double logarithm = log_of<C>(sum.sum());
  const C stored = p.sum != nullptr ? sum.shift() : static_cast<C>(shift + logarithm);
  const auto store = [&](void* to, double value) {
    if (to != nullptr) static_cast<C*>(to)[row] = static_cast<C>(value);
  };
  static_cast<C*>(p.log_sum_exp)[row] = stored;
  store(p.target_weight, index ? 1.0 : 0.0);
  if (p.sum != nullptr) {
    store(p.loss, relative);
    store(p.sum, sum.sum_or_zero());
    store(p.mass, index ? 1.0 : 0.0);
    store(p.entropy, moment);
    return;
  }
  store(p.loss, relative - logarithm);
  store(p.mass, ExactMath::exp((static_cast<double>(stored) - shift) - logarithm));
  store(p.entropy, logarithm - moment / sum.sum());
}

/// The gradient of the logits, of type To, for incoming gradients of a log-probability (`grad`) and
/// of an entropy.
template <class T, class To>
void row_logprob_gradient(const CrossEntropyBackward& p, int64_t row, int64_t index,
                          Compute<T> grad) {
  using C = Compute<T>;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  To* grad_logits = static_cast<To*>(p.grad_logits) + row * p.grad_logits_row_stride;
  const auto number = [&](const void* from) { return static_cast<const C*>(from)[row]; };
  const C factor = static_cast<C>(p.factor), log_sum_exp = number(p.log_sum_exp);
  const C own = grad * factor;
  C slope = -own * number(p.mass), tilt = 0;
  if (p.grad_entropy != nullptr) {
    tilt = -number(p.grad_entropy) * factor * number(p.mass);
    slope += tilt * number(p.entropy);
  }
  const auto gradient = [=](C scaled) {
    const C exponent = scaled - log_sum_exp;
    return (slope + tilt * bounded(exponent)) * ExactMath::exp_or_zero(exponent);
  };
  C at_target = 0;
  C scaled[kPiece], results[kPiece];
  for (int64_t at = 0; at < p.classes; at += kPiece) {
    const int64_t count = std::min(kPiece, p.classes - at);
    widen_run(scaled, logits + at, /*stride=*/1, count);
    for (int64_t i = 0; i < count; ++i) scaled[i] *= factor;  // a separate loop: see row_logprob
    if (index >= at && index < at + count) at_target = gradient(scaled[index - at]) + own;
    store_run(grad_logits + at, /*stride=*/1, count, results,
              [&](int64_t i) { return gradient(scaled[i]); });
  }
  if (index >= 0) narrow_run(grad_logits + index, &at_target, 1);
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
