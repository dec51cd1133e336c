#pragma once

// The losses of ops.h, which includes this header.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "torchkiln/core/status.h"
#include "torchkiln/torch/options.h"

namespace torchkiln {

struct CrossEntropyOptions {
  std::optional<at::Tensor> weight;  // [classes]; dtype as logits, or float32 for half precision
  int64_t ignore_index = -100;
  std::string_view reduction = "mean";  // none, mean or sum
  double label_smoothing = 0.0;
  double z_loss = 0.0;                       // adds z_loss * log(sum of exp(logits))^2 per row
  std::optional<at::ScalarType> loss_dtype;  // default: dtype of the logits
  bool check_target = false;                 // checks the target first; synchronises with the GPU
  bool inplace_backward = false;             // backward writes the gradient over the logits
  std::optional<double> softcap;             // replaces logits by softcap * tanh(logits / softcap)

  TORCHKILN_FIELDS(self.weight, self.ignore_index, self.reduction, self.label_smoothing,
                   self.z_loss, self.loss_dtype, self.check_target, self.inplace_backward,
                   self.softcap);
};

/// Cross-entropy of logits [classes], [rows, classes] or [rows, classes, ...] and a target: one
/// int64 class per row, or probabilities of the logits' shape and dtype. Without a softcap, the
/// only tensor of the logits' size that it allocates is their gradient. Differentiable in logits
/// and probabilities.
TORCHKILN_EXPORT at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                          const CrossEntropyOptions& options = {});

struct LinearCrossEntropyOptions {
  std::optional<at::Tensor> linear_bias;  // [classes]; dtype as x, or float32
  std::optional<at::Tensor> weight;       // [classes], a factor for each; dtype as linear_bias
  int64_t ignore_index = -100;
  std::string_view reduction = "mean";  // none, mean or sum
  double label_smoothing = 0.0;
  double z_loss = 0.0;                       // adds z_loss * log(sum of exp(logits))^2 per row
  std::optional<at::ScalarType> loss_dtype;  // default: dtype of x
  bool check_target = false;                 // checks the target first; synchronises with the GPU
  std::optional<double> softcap;             // replaces logits by softcap * tanh(logits / softcap)
  double temperature = 1.0;                  // divides the logits, after the softcap

  TORCHKILN_FIELDS(self.linear_bias, self.weight, self.ignore_index, self.reduction,
                   self.label_smoothing, self.z_loss, self.loss_dtype, self.check_target,
                   self.softcap, self.temperature);
};

/// Cross-entropy of the logits linear(x, linear_weight, options.linear_bias) for x [..., features],
/// linear_weight [classes, features] and int64 classes [...]. Logits are computed for some thousand
/// rows at a time. The gradients of x and of the layer are computed with the loss and kept until
/// backward.
TORCHKILN_EXPORT at::Tensor linear_cross_entropy(const at::Tensor& x,
                                                 const at::Tensor& linear_weight,
                                                 const at::Tensor& target,
                                                 const LinearCrossEntropyOptions& options = {});

struct LogprobOptions {
  double temperature = 1.0;  // divides the logits
  int64_t ignore_index = -100;
  bool entropy = false;  // if false, the second result is empty

  TORCHKILN_FIELDS(self.temperature, self.ignore_index, self.entropy);
};

/// {log(p[target]), -sum of p * log(p)} with p = softmax(logits / temperature) for logits
/// [..., classes] and int64 classes [...]. The results are float32, or float64 for float64 logits,
/// and 0 where the target is ignore_index. The logits are read once; backward reads them once and
/// writes their gradient.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> logprob(const at::Tensor& logits,
                                                            const at::Tensor& target,
                                                            const LogprobOptions& options = {});

struct LinearLogprobOptions {
  double temperature = 1.0;        // divides the logits, after the softcap
  std::optional<double> softcap;   // replaces logits by softcap * tanh(logits / softcap)
  std::optional<at::Tensor> rows;  // rows to compute: int64 indices or a bool mask
  int64_t ignore_index = -100;
  bool entropy = false;                 // if false, the second result is empty
  std::optional<at::ScalarType> dtype;  // dtype of the logits; default: that of the results

  TORCHKILN_FIELDS(self.temperature, self.softcap, self.rows, self.ignore_index, self.entropy,
                   self.dtype);
};

/// logprob() of the logits linear(x, weight, bias) for x [..., features], weight [classes,
/// features] and int64 classes [...]. Logits are computed for some thousand rows at a time, in
/// forward and again in backward. Rows that options.rows leaves out are not computed: their results
/// are 0, and they have no gradient.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> linear_logprob(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearLogprobOptions& options = {});

struct LinearKlOptions {
  double temperature = 1.0;                // divides the logits of both layers
  std::string_view direction = "forward";  // forward, reverse or js
  double beta = 0.5;               // share of the teacher in the mixture of js, between 0 and 1
  std::optional<at::Tensor> rows;  // rows to compute: int64 indices or a bool mask

  TORCHKILN_FIELDS(self.temperature, self.direction, self.beta, self.rows);
};

/// The divergence per row of p, the softmax of the logits linear(x, weight, bias) of a student, and
/// q, that of linear(y, weight_y, bias_y) of a teacher:
///   forward  KL(q || p)
///   reverse  KL(p || q)
///   js       beta * KL(q || m) + (1 - beta) * KL(p || m) with m = beta * q + (1 - beta) * p
/// x is [..., features], y [..., any], both weights have the same classes. The result is float32,
/// or float64 for float64 x. Logits are computed for some thousand rows at a time. If only x
/// requires a gradient, forward computes it, for an incoming gradient of 1 per row; else backward
/// computes the logits again. Rows that do not count have the result 0 and no gradient, and cost no
/// product.
TORCHKILN_EXPORT at::Tensor linear_kl(const at::Tensor& x, const at::Tensor& weight,
                                      const at::Tensor& y, const at::Tensor& weight_y,
                                      const std::optional<at::Tensor>& bias = std::nullopt,
                                      const std::optional<at::Tensor>& bias_y = std::nullopt,
                                      const LinearKlOptions& options = {});

}  // namespace torchkiln
