#pragma once

// The logarithm of the probability of a class and the entropy, per row: functions for logprob() and
// linear_logprob().

#include "cross_entropy/composite.h"
#include "cross_entropy/kernel.h"
#include "torchkiln/torch/empty.h"

namespace torchkiln {

/// The options with which the kernels compute log-probabilities.
inline LossOptions logprob_options(double temperature, int64_t ignore_index) {
  LossOptions options;
  options.reduction = LossReduction::none;
  options.ignore_index = ignore_index;
  options.is_logprob = true;
  options.scale = 1 / temperature;
  return options;
}

/// Uninitialised results of this shape, and the state of each row: see state_size().
inline std::array<at::Tensor, 3> empty_logprob(const at::Tensor& like, c10::SymIntArrayRef shape,
                                               bool entropy) {
  const auto wide = like.options().dtype(compute_dtype(like.scalar_type()));
  const c10::SymInt rows = c10::multiply_integers(shape);
  at::Tensor logp = empty_of(shape, wide);
  at::Tensor second = entropy ? empty_of(shape, wide) : no_output(logp);
  return {logp, second, empty_of({state_size(rows, LossReduction::none, false)}, wide)};
}

/// The incoming gradients per row, in the compute dtype. An undefined gradient of a log-probability
/// becomes zeros.
struct LogprobGrads {
  at::Tensor logp, entropy;  // [rows]; `entropy` may be undefined

  LogprobGrads(const MaybeTensor& of_logp, const MaybeTensor& of_entropy, const at::Tensor& state) {
    const int64_t rows = state.numel() / 3;
    logp = of_logp ? of_logp->reshape({rows}) : at::zeros({rows}, state.options());
    if (of_entropy) entropy = of_entropy->to(state.scalar_type()).reshape({rows}).contiguous();
  }
};

/// Checks a tensor that forward saved: kernels read it as contiguous numbers of this dtype.
inline void check_kept(const char* op, const char* name, const at::Tensor& kept,
                       at::ScalarType dtype) {
  TORCH_CHECK(kept.scalar_type() == dtype && kept.is_contiguous(), "torchkiln.", op, ": ", name,
              ": got ", dtype_name(kept.scalar_type()), " ", kept.sym_sizes(),
              ", expected contiguous ", dtype_name(dtype), ", from the forward op");
}

/// Checks the incoming gradients, and the tensors that forward saved for logits of this dtype.
inline void check_logprob_grads(const char* op, at::ScalarType logits, const at::Tensor& target,
                                const at::Tensor& entropy, const at::Tensor& state,
                                const MaybeTensor& grad, const MaybeTensor& grad_entropy) {
  const auto check = [&](const char* name, const MaybeTensor& given) {
    if (!given) return;
    check_tensors(op, {{"state", state}, {name, *given}});
    check_dtype(op, name, *given);
    check_same_shape(op, name, *given, "target", target);
  };
  check("grad", grad);
  check("grad_entropy", grad_entropy);
  check_vector(op, "state", state, target.sym_numel() * 3, "the numbers of each row");
  check_kept(op, "state", state, compute_dtype(logits));
  if (!grad_entropy) return;
  check_same_shape(op, "entropy", entropy, "grad_entropy", *grad_entropy);
  check_kept(op, "entropy", entropy, compute_dtype(logits));
}

/// Both results with torch's own ops, from logits [rows, classes] that were divided by the
/// temperature, and targets of any shape. Without `entropy` the second result is empty.
inline std::tuple<at::Tensor, at::Tensor> composite_logprob(const at::Tensor& logits,
                                                            const at::Tensor& target,
                                                            int64_t ignore_index, bool entropy) {
  LossOptions options;
  options.ignore_index = ignore_index;
  const WideLoss wide = widen(logits, target.reshape({-1}), options);
  const at::Tensor logs = wide.logits - wide.log_sum_exp.unsqueeze(-1);
  const auto finish = [&](const at::Tensor& rows) {
    return rows.masked_fill(wide.ignored, 0).reshape_symint(target.sym_sizes());
  };
  const at::Tensor logp = finish(logs.gather(-1, wide.index.unsqueeze(-1)).squeeze(-1));
  if (!entropy) return {logp, no_output(logp)};
  const at::Tensor p = logs.exp();
  // A probability of 0 adds 0, although its logarithm is infinite.
  return {logp, finish((p * logs.masked_fill(p.eq(0), 0)).sum(-1).neg())};
}

}  // namespace torchkiln
