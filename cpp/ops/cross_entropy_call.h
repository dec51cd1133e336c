#pragma once

// What a call of cross_entropy asks for, and the checks of it.

#include <ATen/ATen.h>

#include <optional>
#include <string_view>

#include "torchkiln/checks.h"

namespace torchkiln {

enum class LossReduction { none, mean, sum };

inline LossReduction find_loss_reduction(const char* op, std::string_view name) {
  if (name == "none") return LossReduction::none;
  if (name == "mean") return LossReduction::mean;
  TORCH_CHECK_VALUE(name == "sum", "torchkiln.", op, ": reduction: got '", name,
                    "', expected one of none, mean, sum");
  return LossReduction::sum;
}

inline const char* name_of(LossReduction reduction) {
  return reduction == LossReduction::none   ? "none"
         : reduction == LossReduction::mean ? "mean"
                                            : "sum";
}

/// The arguments beside logits and target.
struct LossCall {
  std::optional<at::Tensor> weight;
  int64_t ignore_index;
  LossReduction reduction;
  double label_smoothing;
  double z_loss;
  std::optional<at::ScalarType> dtype;
  bool check_target;
  bool inplace_backward;

  at::ScalarType loss_dtype(const at::Tensor& logits) const {
    return dtype.value_or(logits.scalar_type());
  }
};

/// The dimension of the logits in which their classes lie.
inline int64_t class_dim(const at::Tensor& logits) { return logits.dim() == 1 ? 0 : 1; }

/// The shape of one number for each row: that of the logits without their classes.
inline c10::SymDimVector row_shape(const at::Tensor& logits) {
  c10::SymDimVector shape(logits.sym_sizes());
  shape.erase(shape.begin() + class_dim(logits));
  return shape;
}

inline at::Tensor classes_last(const at::Tensor& tensor) {
  return tensor.dim() > 2 ? tensor.movedim(1, -1) : tensor;
}

inline at::Tensor classes_back(const at::Tensor& tensor) {
  return tensor.dim() > 2 ? tensor.movedim(-1, 1) : tensor;
}

inline void check_loss_weight(const char* op, const at::Tensor& logits, const at::Tensor& weight) {
  check_tensor(op, "weight", weight);
  check_same_device(op, "weight", weight, "logits", logits);
  const at::ScalarType dtype = logits.scalar_type();
  TORCH_CHECK(
      weight.scalar_type() == dtype || (is_half(dtype) && weight.scalar_type() == at::kFloat),
      "torchkiln.", op, ": weight: got dtype ", dtype_name(weight.scalar_type()), ", expected ",
      dtype_name(dtype), ", the dtype of logits", is_half(dtype) ? ", or float32" : "");
  const c10::SymInt classes = logits.sym_size(class_dim(logits));
  TORCH_CHECK(weight.dim() == 1 && weight.sym_size(0) == classes, "torchkiln.", op,
              ": weight: got shape ", weight.sym_sizes(), ", expected [", classes,
              "], the classes of logits");
}

inline void check_loss_target(const char* op, const at::Tensor& logits, const at::Tensor& target,
                              int64_t ignore_index) {
  check_tensor(op, "target", target);
  check_same_device(op, "target", target, "logits", logits);
  const at::ScalarType dtype = logits.scalar_type();
  TORCH_CHECK(target.scalar_type() == at::kLong || target.scalar_type() == dtype, "torchkiln.", op,
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
                    " beside probabilities, expected a negative number: no row has a class that "
                    "could be ignored; leave it out");
}

inline void check_loss(const char* op, const at::Tensor& logits, const at::Tensor& target,
                       const LossCall& call) {
  check_tensor(op, "logits", logits);
  check_dtype(op, "logits", logits);
  TORCH_CHECK(logits.dim() >= 1, "torchkiln.", op,
              ": logits: got a 0-dimensional tensor, expected [classes], [rows, classes] or "
              "[rows, classes, ...]");
  check_loss_target(op, logits, target, call.ignore_index);
  TORCH_CHECK(logits.sym_size(class_dim(logits)) != 0, "torchkiln.", op, ": logits: got shape ",
              logits.sym_sizes(), ", expected at least 1 class");
  if (call.weight.has_value()) check_loss_weight(op, logits, *call.weight);
  TORCH_CHECK_VALUE(call.label_smoothing >= 0 && call.label_smoothing <= 1, "torchkiln.", op,
                    ": label_smoothing: got ", call.label_smoothing,
                    ", expected a number between 0 and 1");
  TORCH_CHECK(!call.dtype.has_value() || is_supported_dtype(*call.dtype), "torchkiln.", op,
              ": dtype: got ", dtype_name(call.dtype.value_or(at::kFloat)), ", expected ",
              kSupportedDtypes);
}

}  // namespace torchkiln
