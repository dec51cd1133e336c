#pragma once

// Metrics that are returned with the loss, for the log of a training run.

#include "cross_entropy/composite.h"
#include "cross_entropy/kernel.h"
#include "torchkiln/torch/empty.h"

namespace torchkiln {

/// Metrics before their reduction: one number per row, in any shape.
struct RowMetrics {
  at::Tensor log_sum_exp;
  at::Tensor weight;   // weight of the target class, 0 if the row is ignored
  at::Tensor ignored;  // undefined with probabilities
  at::Tensor correct;  // whether the target class has the largest logit; undefined if not wanted
};

/// Metrics from the state that forward saves, so that the logits are not read again.
inline RowMetrics metrics_of_state(const c10::SymInt& rows, const at::Tensor& target,
                                   const at::Tensor& state, const LossOptions& options) {
  const int64_t divisors = options.reduction == LossReduction::mean ? 1 : 0;
  RowMetrics metrics;
  metrics.log_sum_exp = state.narrow_symint(0, 0, rows);
  metrics.weight = state.narrow_symint(0, rows * 2, rows);
  if (target.scalar_type() == at::kLong)
    metrics.ignored = target.reshape({-1}).eq(options.ignore_index);
  if (!options.accuracy) return metrics;
  metrics.correct = state.narrow_symint(0, rows * 3 + divisors, rows);
  // Without a reduction these numbers are the result, which must not be a view of the saved state.
  if (options.reduction == LossReduction::none) metrics.correct = metrics.correct.clone();
  return metrics;
}

/// RowMetrics with torch's own ops.
inline RowMetrics composite_metrics(const at::Tensor& logits, const at::Tensor& target,
                                    const LossOptions& options) {
  const WideLoss wide = widen(logits, target, options);
  RowMetrics metrics{wide.log_sum_exp, wide.row_weight, wide.ignored, at::Tensor()};
  if (!options.accuracy) return metrics;
  const at::Tensor own = wide.logits.gather(-1, wide.index.unsqueeze(-1)).squeeze(-1);
  metrics.correct = own.ge(wide.logits.amax(-1)).logical_and(wide.ignored.logical_not());
  metrics.correct = metrics.correct.to(wide.logits.scalar_type());
  return metrics;
}

/// The z-loss and the accuracy, reduced in the same way as the loss. The mean accuracy is over the
/// rows that are not ignored.
inline std::array<at::Tensor, 2> reduced_metrics(const RowMetrics& metrics, const at::Tensor& loss,
                                                 const LossOptions& options) {
  const auto reduced = [&](const at::Tensor& each, const auto& count) {
    if (options.reduction == LossReduction::none) return each.view_symint(loss.sym_sizes());
    return options.reduction == LossReduction::mean ? each.sum() / count() : each.sum();
  };
  at::Tensor z = metrics.log_sum_exp.square() * metrics.weight * options.z_loss;
  if (metrics.ignored.defined()) z = z.masked_fill(metrics.ignored, 0);
  z = reduced(z, [&] { return metrics.weight.sum(); });
  if (z.scalar_type() != loss.scalar_type()) z = z.to(loss.scalar_type());
  if (!metrics.correct.defined()) return {z, no_output(z)};
  return {z, reduced(metrics.correct, [&] { return metrics.ignored.logical_not().sum(); })};
}

}  // namespace torchkiln
