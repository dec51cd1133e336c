#pragma once

#include "detail/composite_activations.h"
#include "torchkiln/kernels/bias_act.h"

namespace torchkiln::bias_act_ops {

/// The wanted gradients of x and bias. `saved` is chosen by kept_by_bias_act(). If `saved` is x,
/// the kernel adds `bias` to it; else `bias` is not used.
struct Backward {
  using Wanted = std::array<bool, 2>;

  static constexpr const char* kSchema =
      "torchkiln::_bias_act_backward(Tensor grad, Tensor saved, Tensor? bias, float scale, "
      "str act, ScalarType bias_dtype, bool[2] wanted) -> (Tensor, Tensor)";

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
