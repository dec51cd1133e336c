#pragma once

#include "detail/composite_activations.h"
#include "torchkiln/kernels/bias_act.h"

namespace torchkiln::bias_act_ops {

/// The gradients of x and bias that are wanted. `saved` is what kept_by_bias_act() says; `bias` is
/// read beside x, and left out where x has it in it.
struct Backward {
  using Wanted = std::array<bool, 2>;

  static constexpr const char* kSchema =
      "torchkiln::bias_act_backward(Tensor grad, Tensor saved, Tensor? bias, float scale, str act, "
      "ScalarType bias_dtype, bool[2] wanted) -> (Tensor, Tensor)";

  static std::tuple<at::Tensor, at::Tensor> meta(const at::Tensor& grad, const at::Tensor& saved,
                                                 const MaybeTensor& bias, double scale,
                                                 Activation act, at::ScalarType bias_dtype,
                                                 Wanted wanted);
  static std::tuple<at::Tensor, at::Tensor> kernel(const at::Tensor& grad, const at::Tensor& saved,
                                                   const MaybeTensor& bias, double scale,
                                                   Activation act, at::ScalarType bias_dtype,
                                                   Wanted wanted);
};

}  // namespace torchkiln::bias_act_ops
