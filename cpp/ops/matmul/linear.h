#pragma once

#include "detail/composite_activations.h"

namespace torchkiln::linear_ops {

/// The arguments of the op and of its forward.
struct Call {
  Borrowed<at::Tensor> x;
  Borrowed<at::Tensor> weight;
  Borrowed<MaybeTensor> bias;
  Activation act;
  double scale;
  Borrowed<MaybeTensor> residual;

  TORCHKILN_FIELDS(self.x, self.weight, self.bias, self.act, self.scale, self.residual);
};

/// Returns the output and the preactivation. The preactivation is empty if the derivative of the
/// activation does not need it. On the CPU it excludes a bias whose dtype is not that of x.
struct Forward {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_linear_forward(Tensor x, Tensor weight, Tensor? bias, str act, float scale, "
      "Tensor? residual) -> (Tensor, Tensor)";

  static std::tuple<at::Tensor, at::Tensor> meta(const Call& call);
  static std::tuple<at::Tensor, at::Tensor> kernel(const Call& call);
};

}  // namespace torchkiln::linear_ops
