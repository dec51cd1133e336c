#pragma once

#include <ATen/ATen.h>

#include <string>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln {

/// Checks the dtype of a weight. The error suggests autocast if the weight is float32 and x half
/// precision.
inline void check_weight_dtype(const char* op, const at::Tensor& x, const char* name,
                               const at::Tensor& weight) {
  const at::ScalarType from = weight.scalar_type(), to = x.scalar_type();
  if (is_half(to) && from == at::kFloat) {
    const std::string dtype = "torch." + dtype_name(to);
    TORCH_CHECK(false, "torchkiln.", op, ": ", name, ": got dtype float32, expected ",
                dtype_name(to), ", the dtype of x; cast the layer with .to(", dtype,
                "), or call it under torch.autocast(x.device.type, ", dtype, ")");
  }
  check_same_dtype(op, name, weight, "x", x);
}

/// The names of a linear layer's arguments, for errors.
struct LinearNames {
  const char* weight = "weight";
  const char* bias = "bias";
  const char* rows = "the first size of weight";
  const char* x = "x";
};

/// Checks the arguments of a linear layer: x [..., k], weight [n, k], bias [n].
inline void check_linear(const char* op, const at::Tensor& x, const at::Tensor& weight,
                         const MaybeTensor& bias, const LinearNames& names = {}) {
  check_tensors(op, {{names.x, x}, {names.weight, weight}});
  check_dtype(op, names.x, x);
  check_weight_dtype(op, x, names.weight, weight);
  check_not_0_dim(op, names.x, x);
  TORCH_CHECK(weight.dim() == 2, "torchkiln.", op, ": ", names.weight, ": got ", weight.dim(),
              " dimensions (shape ", weight.sym_sizes(), "), expected 2");
  TORCH_CHECK(weight.sym_size(1) == x.sym_size(-1), "torchkiln.", op, ": ", names.weight,
              ": got shape ", weight.sym_sizes(), ", expected ", x.sym_size(-1),
              " as the second size, the last size of ", names.x);
  if (!bias) return;
  check_tensors(op, {{names.x, x}, {names.bias, *bias}});
  check_parameter_dtype(op, names.bias, bias->scalar_type(), "x", x.scalar_type());
  check_vector(op, names.bias, *bias, weight.sym_size(0), names.rows);
}

}  // namespace torchkiln
