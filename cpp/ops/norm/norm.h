#pragma once

// What the two halves of the norms share: kernel.cpp has the checks and the kernels, norm.cpp the
// four ops and their derivatives.

#include "torchkiln/torch/op.h"

namespace torchkiln::norm_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The arguments of the four ops in one form.
struct Call {
  const Tensor& x;
  const Tensor* residual;     // null for the ops without one
  c10::SymIntArrayRef shape;  // the last sizes of x, which are normalized together
  const MaybeTensor& weight;  // ones (without the offset) where left out
  const MaybeTensor& bias;    // zeros where left out
  double eps;
  double offset;
  bool centered;  // layer norm; else RMS norm

  const char* op() const {
    if (residual) return centered ? "add_layer_norm" : "add_rms_norm";
    return centered ? "layer_norm" : "rms_norm";
  }
};

/// The checked, empty results: the normed rows, x + residual (undefined without a residual), and
/// the statistics of each row that backward needs (undefined unless wanted): {mean, rstd} for layer
/// norm, {rstd} for RMS norm, as one tensor [2 or 1, leading sizes of x].
Three outputs(const Call& call, bool wants_stats);

/// Computes them.
Three run(const Call& call, bool wants_stats);

/// The op that also returns the statistics; its results are {y, stats}.
struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::norm_forward(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps, float offset, bool centered) -> (Tensor, Tensor)";
  static Two meta(const Tensor& x, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, double offset, bool centered);
  static Two kernel(const Tensor& x, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                    const MaybeTensor& bias, double eps, double offset, bool centered);
};

/// The same of x + residual: {y, sum, stats}.
struct AddForward {
  static constexpr const char* kSchema =
      "torchkiln::add_norm_forward(Tensor x, Tensor residual, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor? bias, float eps, float offset, bool centered) -> "
      "(Tensor, Tensor, Tensor)";
  static Three meta(const Tensor& x, const Tensor& residual, c10::SymIntArrayRef shape,
                    const MaybeTensor& weight, const MaybeTensor& bias, double eps, double offset,
                    bool centered);
  static Three kernel(const Tensor& x, const Tensor& residual, c10::SymIntArrayRef shape,
                      const MaybeTensor& weight, const MaybeTensor& bias, double eps, double offset,
                      bool centered);
};

/// The gradients of z, weight and bias that are wanted. `z` is what was normalized: x, or
/// x + residual. The shape of `stats` tells which sizes of it were normalized together.
struct Backward {
  using Wanted = std::array<bool, 3>;
  static constexpr const char* kSchema =
      "torchkiln::norm_backward(Tensor grad, Tensor? grad_sum, Tensor z, Tensor stats, "
      "Tensor? weight, float offset, ScalarType weight_dtype, bool[3] wanted) -> "
      "(Tensor, Tensor, Tensor)";
  static Three meta(const Tensor& grad, const MaybeTensor& grad_sum, const Tensor& z,
                    const Tensor& stats, const MaybeTensor& weight, double offset,
                    at::ScalarType weight_dtype, Wanted wanted);
  static Three kernel(const Tensor& grad, const MaybeTensor& grad_sum, const Tensor& z,
                      const Tensor& stats, const MaybeTensor& weight, double offset,
                      at::ScalarType weight_dtype, Wanted wanted);
};

}  // namespace torchkiln::norm_ops
