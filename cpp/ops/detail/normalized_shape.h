#pragma once

// Checks of the norms: the last sizes of x, over which they normalize, and parameters of that
// shape.

#include <ATen/core/Tensor.h>

#include <limits>
#include <string>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln {

inline void check_normalized_shape(const char* op, const at::Tensor& x, c10::SymIntArrayRef shape) {
  const auto dims = static_cast<int64_t>(shape.size());
  TORCH_CHECK(dims >= 1, "torchkiln.", op,
              ": normalized_shape: got [], expected at least 1 dimension");
  TORCH_CHECK(dims <= x.dim(), "torchkiln.", op, ": normalized_shape: got ", shape,
              ", expected the last sizes of x, which has shape ", x.sym_sizes());
  const c10::SymIntArrayRef last = x.sym_sizes().slice(x.dim() - dims);
  TORCH_CHECK(shape.equals(last), "torchkiln.", op, ": normalized_shape: got ", shape,
              ", expected ", last, ", the last ",
              dims == 1 ? std::string("dimension") : c10::str(dims, " dimensions"), " of x");
}

/// Checks a parameter's dtype against that of `like`, which has the dtype of the result and is
/// called `name_of_like` in errors.
inline void check_normalized_parameter(const char* op, const char* name,
                                       const MaybeTensor& parameter, c10::SymIntArrayRef shape,
                                       const char* name_of_like, const at::Tensor& like) {
  if (!parameter) return;
  check_tensor(op, name, *parameter);
  check_same_device(op, name, *parameter, "x", like);
  check_parameter_dtype(op, name, parameter->scalar_type(), name_of_like, like.scalar_type());
  TORCH_CHECK(parameter->sym_sizes().equals(shape), "torchkiln.", op, ": ", name, ": got shape ",
              parameter->sym_sizes(), ", expected ", shape, ", the normalized_shape");
}

inline void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps >= 0, "torchkiln.", op, ": eps: got ", eps,
                    ", expected a number of at least 0");
}

/// The eps if None is given: the machine epsilon of the compute dtype, so for half precision that
/// of float32.
inline double default_eps(const at::Tensor& x) {
  return x.defined() && x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                       : std::numeric_limits<float>::epsilon();
}

}  // namespace torchkiln
