#pragma once

#include "detail/composite_activations.h"

namespace torchkiln::linear_ops {

/// Returns the output and the preactivation, which is empty if the derivative of the activation
/// needs another tensor, or none. On the CPU it does not include a bias of another dtype than x.
struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::linear_forward(Tensor x, Tensor weight, Tensor? bias, str act, float scale, "
      "Tensor? residual) -> (Tensor, Tensor)";

  static std::tuple<at::Tensor, at::Tensor> meta(const at::Tensor& x, const at::Tensor& weight,
                                                 const MaybeTensor& bias, Activation act,
                                                 double scale, const MaybeTensor& residual);
  static std::tuple<at::Tensor, at::Tensor> kernel(const at::Tensor& x, const at::Tensor& weight,
                                                   const MaybeTensor& bias, Activation act,
                                                   double scale, const MaybeTensor& residual);
};

}  // namespace torchkiln::linear_ops
