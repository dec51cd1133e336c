#pragma once

#include "detail/composite_activations.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::gate_products {

/// Computes act(gate) * up for [gate, up] = x weight^T + bias in one kernel, and returns [gate, up]
/// if `keeps`. Returns nullopt if two kernels take less time, or if a tensor is not plain.
std::optional<std::tuple<at::Tensor, at::Tensor>> layer_with_gate(const at::Tensor& x,
                                                                  const at::Tensor& weight,
                                                                  const MaybeTensor& bias,
                                                                  Activation act, bool keeps);

/// Computes, in one kernel, the product of grad and weight, which is the gradient of act(gate) *
/// up, and from it the gradient of [gate, up] and, again, act(gate) * up. If `overwrites`, the
/// gradient overwrites `gate_up`. Returns nullopt as layer_with_gate() does.
std::optional<std::tuple<at::Tensor, at::Tensor>> gradient_through_gate(const at::Tensor& grad,
                                                                        const at::Tensor& weight,
                                                                        const at::Tensor& gate_up,
                                                                        Activation act,
                                                                        bool overwrites);

}  // namespace torchkiln::gate_products
