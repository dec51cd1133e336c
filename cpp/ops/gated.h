#pragma once

#include "detail/composite_activations.h"
#include "torchkiln/torch/autograd.h"

namespace torchkiln {

/// The activation of a gate, act(gate) * up.
struct Gate {
  Activation act;
};

/// A gate is a string in the schemas of ops.
template <>
struct InSchema<Gate> {
  using Type = c10::string_view;
  static Gate read(const char* op, c10::string_view name) {
    return {find_activation(op, name, Gates{})};
  }
  static c10::string_view write(Gate gate) { return name_of(gate.act); }
};

namespace gated_ops {

/// Computes the gradients of gate and up, in the dtype of `grad`. For a packed tensor, the first
/// result is its gradient and the second is empty.
struct GatedBackward {
  static constexpr const char* kSchema =
      "torchkiln::_gated_backward(Tensor grad, Tensor gate, Tensor? up, str act) -> "
      "(Tensor, Tensor)";
  static constexpr const char* kName = "gated_backward";

  static std::tuple<at::Tensor, at::Tensor> meta(const at::Tensor& grad, const at::Tensor& gate,
                                                 const MaybeTensor& up, Activation act);
  static std::tuple<at::Tensor, at::Tensor> kernel(const at::Tensor& grad, const at::Tensor& gate,
                                                   const MaybeTensor& up, Activation act);
};

/// Computes the gradient of a packed tensor and, without reading more, the output.
struct GatedBackwardWithOutput {
  static constexpr const char* kSchema =
      "torchkiln::_gated_backward_with_output(Tensor grad, Tensor packed, str act) -> "
      "(Tensor, Tensor)";
  static constexpr const char* kName = "gated_backward_with_output";

  static std::tuple<at::Tensor, at::Tensor> meta(const at::Tensor& grad, const at::Tensor& packed,
                                                 Activation act);
  static std::tuple<at::Tensor, at::Tensor> kernel(const at::Tensor& grad, const at::Tensor& packed,
                                                   Activation act);
};

/// GatedBackwardWithOutput in place: the gradient overwrites `packed`, the output overwrites
/// `grad`. Both tensors are contiguous.
void overwrite_with_gradient(const at::Tensor& grad, const at::Tensor& packed, Activation act);

/// act(gate) * up. Without `up`, gate and up are the halves of `gate`.
at::Tensor gated(const at::Tensor& gate, Gate act, const MaybeTensor& up = std::nullopt);

/// The gradients of `kept`, that is gate and up, for the incoming gradient of act(gate) * up.
variable_list gradients(const Incoming& in, const Kept<2>& kept, Activation act);

/// Checks gate and up, and returns the shape and the options of act(gate) * up.
std::pair<c10::SymDimVector, at::TensorOptions> checked_result(const char* op,
                                                               const at::Tensor& gate,
                                                               const MaybeTensor& up);

/// Gate and up as two tensors, given as two or as the halves of one.
std::array<at::Tensor, 2> halves(const at::Tensor& gate, const MaybeTensor& up);

}  // namespace gated_ops
}  // namespace torchkiln
