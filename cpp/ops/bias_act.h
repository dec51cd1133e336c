#pragma once

#include "detail/composite_activations.h"
#include "torchkiln/kernels/bias_act.h"

namespace torchkiln::bias_act_ops {

/// Computes the wanted gradients of x and bias. `saved`: see kept_by_bias_act(). The kernel reads
/// `bias` only if `saved` is x.
struct Backward {
  using Wanted = std::array<bool, 2>;
  struct Arguments {
    Borrowed<at::Tensor> grad, saved;
    Borrowed<MaybeTensor> bias;
    double scale;
    Activation act;
    at::ScalarType bias_dtype;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.saved, self.bias, self.scale, self.act, self.bias_dtype,
                     self.wanted);
  };
  static constexpr const char* kSchema =
      "torchkiln::_bias_act_backward(Tensor grad, Tensor saved, Tensor? bias, float scale, "
      "str act, ScalarType bias_dtype, bool[2] wanted) -> (Tensor, Tensor)";
  static std::tuple<at::Tensor, at::Tensor> meta(const Arguments& call);
  static std::tuple<at::Tensor, at::Tensor> kernel(const Arguments& call);
};

}  // namespace torchkiln::bias_act_ops
