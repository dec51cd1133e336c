#pragma once

// The options of cross_entropy and the checks of its arguments.

#include <ATen/ATen.h>

#include <cmath>

#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln {

enum class LossReduction { none, mean, sum };

/// A reduction is a string in the schemas of ops.
template <>
struct InSchema<LossReduction> {
  using Type = c10::string_view;
  static LossReduction read(const char* op, c10::string_view name) {
    if (name == "none") return LossReduction::none;
    if (name == "mean") return LossReduction::mean;
    TORCH_CHECK_VALUE(name == "sum", "torchkiln.", op, ": reduction: got '", name,
                      "', expected one of none, mean, sum");
    return LossReduction::sum;
  }
  static c10::string_view write(LossReduction reduction) {
    return reduction == LossReduction::none   ? "none"
           : reduction == LossReduction::mean ? "mean"
                                              : "sum";
  }
};

/// The options of cross_entropy and of its other forms.
struct LossOptions : CrossEntropyOptions {
  LossReduction reduction = LossReduction::mean;
  bool accuracy = false;  // whether the state has a number for this per row
  // The logits have the classes from first_class on, out of all_classes; all_classes is 0 if the
  // logits have all classes.
  int64_t first_class = 0;
  int64_t all_classes = 0;
  bool is_logprob = false;  // compute log-probabilities of logits * scale, not losses
  double scale = 1;
};

/// The class dimension of logits.
inline int64_t class_dim(const at::Tensor& logits) { return logits.dim() == 1 ? 0 : 1; }

/// The shape of one number per row: the shape of logits without the class dimension.
inline c10::SymDimVector row_shape(const at::Tensor& logits) {
  c10::SymDimVector shape(logits.sym_sizes());
  shape.erase(shape.begin() + class_dim(logits));
  return shape;
}

/// The shape of the loss.
inline c10::SymDimVector loss_shape(const at::Tensor& logits, LossReduction reduction) {
  return reduction == LossReduction::none ? row_shape(logits) : c10::SymDimVector{};
}

inline at::Tensor classes_last(const at::Tensor& tensor) {
  return tensor.dim() > 2 ? tensor.movedim(1, -1) : tensor;
}

inline at::Tensor classes_back(const at::Tensor& tensor) {
  return tensor.dim() > 2 ? tensor.movedim(-1, 1) : tensor;
}

inline void check_loss_weight(const char* op, const at::Tensor& logits, const at::Tensor& weight) {
  check_tensors(op, {{"logits", logits}, {"weight", weight}});
  check_parameter_dtype(op, "weight", weight.scalar_type(), "logits", logits.scalar_type());
  check_vector(op, "weight", weight, logits.sym_size(class_dim(logits)), "the classes of logits");
}

inline void check_loss_target(const char* op, const at::Tensor& logits, const at::Tensor& target,
                              int64_t ignore_index) {
  check_tensors(op, {{"logits", logits}, {"target", target}});
  const at::ScalarType dtype = logits.scalar_type();
  const bool matches = target.scalar_type() == dtype || is_mixed(target.scalar_type(), dtype);
  TORCH_CHECK(target.scalar_type() == at::kLong || matches, "torchkiln.", op,
              ": target: got dtype ", dtype_name(target.scalar_type()),
              ", expected int64, of classes, or ", dtype_name(dtype),
              ", of probabilities, the dtype of logits");
  if (target.scalar_type() == at::kLong) {
    const c10::SymDimVector rows = row_shape(logits);
    TORCH_CHECK(target.sym_sizes().equals(rows), "torchkiln.", op, ": target: got shape ",
                target.sym_sizes(), ", expected ", c10::SymIntArrayRef(rows),
                " for logits of shape ", logits.sym_sizes(), ": a class for each row");
    return;
  }
  TORCH_CHECK(target.sym_sizes().equals(logits.sym_sizes()), "torchkiln.", op,
              ": target: got shape ", target.sym_sizes(), ", expected ", logits.sym_sizes(),
              ", the shape of logits, for probabilities");
  TORCH_CHECK_VALUE(ignore_index < 0, "torchkiln.", op, ": ignore_index: got ", ignore_index,
                    " with a target of probabilities, expected a negative number: only classes can "
                    "be ignored; leave it out");
}

inline void check_loss_numbers(const char* op, const LossOptions& options) {
  const double label_smoothing = options.label_smoothing;
  const auto& dtype = options.loss_dtype;
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, "torchkiln.", op,
                    ": label_smoothing: got ", label_smoothing,
                    ", expected a number between 0 and 1");
  TORCH_CHECK(!dtype.has_value() || is_supported_dtype(*dtype), "torchkiln.", op,
              ": loss_dtype: got ", dtype_name(dtype.value_or(at::kFloat)), ", expected ",
              kSupportedDtypes);
}

inline void check_softcap(const char* op, double softcap) {
  TORCH_CHECK_VALUE(softcap > 0, "torchkiln.", op, ": softcap: got ", softcap,
                    ", expected a number greater than 0, or None");
}

/// Kernels multiply by the reciprocal of the temperature in float32, so both must be normal
/// numbers.
inline void check_temperature(const char* op, double temperature) {
  const bool is_usable = temperature > 0 && std::isnormal(static_cast<float>(temperature)) &&
                         std::isnormal(static_cast<float>(1 / temperature));
  TORCH_CHECK_VALUE(is_usable, "torchkiln.", op, ": temperature: got ", temperature,
                    ", expected a finite number greater than 0");
}

inline void check_loss(const char* op, const at::Tensor& logits, const at::Tensor& target,
                       const LossOptions& options) {
  check_tensor(op, "logits", logits);
  check_dtype(op, "logits", logits);
  TORCH_CHECK(logits.dim() >= 1, "torchkiln.", op,
              ": logits: got a 0-dimensional tensor, expected [classes], [rows, classes] or "
              "[rows, classes, ...]");
  check_loss_target(op, logits, target, options.ignore_index);
  TORCH_CHECK(logits.sym_size(class_dim(logits)) != 0, "torchkiln.", op, ": logits: got shape ",
              logits.sym_sizes(), ", expected at least 1 class");
  if (options.weight.has_value()) check_loss_weight(op, logits, *options.weight);
  check_loss_numbers(op, options);
}

}  // namespace torchkiln
