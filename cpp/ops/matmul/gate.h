#pragma once

#include "detail/composite_activations.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::gate_products {

/// act(gate) * up for [gate, up] = x weight^T + bias by one kernel, and [gate, up] if `keeps`, else
/// undefined. Nothing if two kernels take less time, or if the tensors are not plain.
std::optional<std::tuple<at::Tensor, at::Tensor>> layer_with_gate(const at::Tensor& x,
                                                                  const at::Tensor& weight,
                                                                  const MaybeTensor& bias,
                                                                  Activation act, bool keeps);

/// The gradient of [gate, up], and act(gate) * up, by one kernel; the gradient of act(gate) * up is
/// the product grad weight. `overwrites`: the result overwrites `gate_up`. Nothing as above.
std::optional<std::tuple<at::Tensor, at::Tensor>> gradient_through_gate(const at::Tensor& grad,
                                                                        const at::Tensor& weight,
                                                                        const at::Tensor& gate_up,
                                                                        Activation act,
                                                                        bool overwrites);

}  // namespace torchkiln::gate_products
