#pragma once

// What the two halves of the norms share: norm.cpp has the checks and the kernels,
// norm_autograd.cpp the ops and their derivatives.

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

namespace torchkiln {

/// The arguments of all four ops in one form.
struct NormCall {
  const at::Tensor& x;
  const at::Tensor* residual;  // null for the ops without one
  c10::SymIntArrayRef shape;   // the last sizes of x, which are normalized together
  const at::Tensor* weight;    // null for ones (without the offset)
  const at::Tensor* bias;      // null for zeros
  double eps;
  double offset;
  bool centered;  // layer norm; else RMS norm

  const char* op() const {
    if (residual) return centered ? "add_layer_norm" : "add_rms_norm";
    return centered ? "layer_norm" : "rms_norm";
  }
};

using MaybeTensor = std::optional<at::Tensor>;

inline const at::Tensor* pointer_to(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? &*tensor : nullptr;
}
inline MaybeTensor maybe(const at::Tensor* tensor) {
  return tensor ? MaybeTensor(*tensor) : std::nullopt;
}
inline MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// The normed rows and x + residual; the latter is not defined where there is no residual.
using NormResult = std::tuple<at::Tensor, at::Tensor>;

void check_norm(const NormCall& call);

/// The checked, empty results; on Meta and symbolic tensors, too.
NormResult norm_outputs(const NormCall& call);

/// By the kernels.
NormResult norm_real(const NormCall& call);

/// Of x or residual, weight and bias.
using NormWanted = std::array<bool, 3>;

// What backward needs of each row beside its elements: {mean, rstd} for layer norm, {rstd} for RMS
// norm, as one tensor [2 or 1, leading sizes of x].

using NormForwardSchema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& x,
                                                             c10::SymIntArrayRef normalized_shape,
                                                             const MaybeTensor& weight,
                                                             const MaybeTensor& bias, double eps,
                                                             double offset, bool centered);

using AddNormForwardSchema = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& x, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const MaybeTensor& weight, const MaybeTensor& bias, double eps, double offset, bool centered);

using NormBackwardSchema = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& grad, const MaybeTensor& grad_sum, const at::Tensor& z,
    const at::Tensor& stats, const MaybeTensor& weight, double offset, at::ScalarType weight_dtype,
    NormWanted wanted);

}  // namespace torchkiln
