#pragma once

// Cross-entropy with torch's own ops, in the compute dtype, for transforms and second derivatives.

#include <ATen/ATen.h>

#include "cross_entropy/options.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// The logits with a softcap, computed with torch's ops in the compute dtype.
inline at::Tensor capped(const char* op, const at::Tensor& logits, double softcap) {
  check_softcap(op, softcap);
  trace::note("passes more: the softcap is applied before the loss");
  return at::tanh(logits.to(compute_dtype(logits.scalar_type())) / softcap) * softcap;
}

/// The tensors of a call in the compute dtype, with classes last; [...] are the rows.
struct WideLoss {
  at::Tensor logits;        // [..., classes]
  at::Tensor index;         // [...]: target classes, 0 if ignored; undefined with
                            // probabilities
  at::Tensor probability;   // [..., classes]
  at::Tensor class_weight;  // [classes]; undefined if none was given
  at::Tensor ignored;       // [...]; undefined with probabilities
  at::Tensor row_weight;    // [...]: weight of the target class, 0 if ignored
  at::Tensor log_sum_exp;   // [...]
};

inline WideLoss widen(const at::Tensor& logits, const at::Tensor& target,
                      const LossOptions& options) {
  const at::ScalarType compute = compute_dtype(logits.scalar_type());
  WideLoss wide;
  wide.logits = classes_last(logits).to(compute);
  if (options.weight.has_value()) wide.class_weight = options.weight->detach().to(compute);
  if (target.is_floating_point()) {
    wide.probability = classes_last(target).to(compute);
    wide.log_sum_exp = at::logsumexp(wide.logits, -1);
    wide.row_weight = at::ones_like(wide.log_sum_exp.detach());
    return wide;
  }
  wide.ignored = target.eq(options.ignore_index);
  // A masked logit gives ignored rows a gradient of 0 even if their logits are not finite.
  wide.logits = wide.logits.masked_fill(wide.ignored.unsqueeze(-1), 0);
  wide.log_sum_exp = at::logsumexp(wide.logits, -1);
  wide.index = target.masked_fill(wide.ignored, 0);
  wide.row_weight = wide.class_weight.defined() ? at::index(wide.class_weight, {wide.index})
                                                : at::ones_like(wide.index, wide.logits.options());
  wide.row_weight = wide.row_weight.masked_fill(wide.ignored, 0);
  return wide;
}

/// The target distribution of each row: [..., classes].
inline at::Tensor distribution(const WideLoss& wide, const LossOptions& options) {
  at::Tensor q = wide.probability;
  if (wide.index.defined()) {
    const at::Tensor at_target = wide.index.unsqueeze(-1);
    q = at::zeros_like(wide.logits.detach()).scatter(-1, at_target, 1);
  }
  const auto classes = at::Scalar(wide.logits.sym_size(-1));
  if (options.label_smoothing > 0) {
    const at::Tensor even =
        at::full_like(wide.log_sum_exp.detach(), options.label_smoothing).div(classes);
    q = q * (1 - options.label_smoothing) + even.unsqueeze(-1);
  }
  if (wide.class_weight.defined()) q = q * wide.class_weight;
  return wide.ignored.defined() ? q.masked_fill(wide.ignored.unsqueeze(-1), 0) : q;
}

inline at::Tensor composite_loss(const at::Tensor& logits, const at::Tensor& target,
                                 const LossOptions& options, at::ScalarType dtype) {
  const WideLoss wide = widen(logits, target, options);
  const at::Tensor surprise = wide.log_sum_exp.unsqueeze(-1) - wide.logits;
  at::Tensor loss;
  if (wide.index.defined()) {
    // gather() instead of a product with the distribution, where 0 * infinity would be NaN.
    loss = wide.row_weight * surprise.gather(-1, wide.index.unsqueeze(-1)).squeeze(-1);
    if (options.label_smoothing > 0) {
      const at::Tensor even = wide.class_weight.defined() ? surprise * wide.class_weight : surprise;
      loss = loss * (1 - options.label_smoothing) + even.mean(-1) * options.label_smoothing;
    }
  } else {
    loss = (distribution(wide, options) * surprise).sum(-1);
  }
  if (options.z_loss != 0) {
    loss = loss + wide.row_weight * wide.log_sum_exp * wide.log_sum_exp * options.z_loss;
  }
  if (wide.ignored.defined()) loss = loss.masked_fill(wide.ignored, 0);
  if (options.reduction != LossReduction::none) loss = loss.sum();
  if (options.reduction == LossReduction::mean) loss = loss / wide.row_weight.sum();
  return loss.to(dtype);
}

/// The gradient of target probabilities from the gradient of the loss.
inline at::Tensor probability_gradient(const at::Tensor& grad, const at::Tensor& logits,
                                       const at::Tensor& target, const LossOptions& options) {
  const WideLoss wide = widen(logits, target, options);
  at::Tensor scale = grad.to(wide.logits.scalar_type());
  if (options.reduction == LossReduction::mean) scale = scale / wide.row_weight.sum();
  at::Tensor passed = (wide.log_sum_exp.unsqueeze(-1) - wide.logits) * scale.unsqueeze(-1);
  if (wide.class_weight.defined()) passed = passed * wide.class_weight;
  return classes_back(passed * (1 - options.label_smoothing)).to(target.scalar_type());
}

}  // namespace torchkiln
