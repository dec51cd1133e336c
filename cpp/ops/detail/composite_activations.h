#pragma once

// Activations in ops: their names in schemas, their computation with torch's own ops, and the op
// activation_backward.

#include <ATen/ATen.h>

#include <string>

#include "torchkiln/core/activations.h"
#include "torchkiln/torch/op.h"

namespace torchkiln {

inline const char* name_of(Activation activation) {
  const char* name = "";
  with_activation(activation, [&](auto tag) { name = decltype(tag)::type::kName; }, Activations{});
  return name;
}

/// The activation of `list` with this name. Raises an error for other names.
template <class List = Activations>
Activation find_activation(const char* op, std::string_view name, List list = {}) {
  std::optional<Activation> found;
  std::string known;
  for_each_activation(
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if (name == Act::kName) found = kActivation<Act>;
      },
      list);
  if (found) return *found;
  for_each_activation(
      [&](auto tag) {
        known += std::string(known.empty() ? "" : ", ") + decltype(tag)::type::kName;
      },
      list);
  TORCH_CHECK_VALUE(false, "torchkiln.", op, ": act: got '", name, "', expected one of ", known);
}

/// An activation is a string in the schemas of ops.
template <>
struct InSchema<Activation> {
  using Type = c10::string_view;
  static Activation read(const char* op, c10::string_view name) {
    return find_activation(op, name);
  }
  static c10::string_view write(Activation activation) { return name_of(activation); }
};

/// activation(z) with torch's own ops.
inline at::Tensor composite_activation(Activation activation, const at::Tensor& z) {
  if (activation == kActivation<Square>) return z * z;
  if (activation == kActivation<Relu>) return at::relu(z);
  if (activation == kActivation<Relu2>) return at::relu(z).square();
  if (activation == kActivation<Gelu>) return at::gelu(z);
  if (activation == kActivation<GeluTanh>) return at::gelu(z, "tanh");
  if (activation == kActivation<QuickGelu>) return z * at::sigmoid(1.702 * z);
  if (activation == kActivation<Silu>) return at::silu(z);
  if (activation == kActivation<Sigmoid>) return at::sigmoid(z);
  if (activation == kActivation<Tanh>) return at::tanh(z);
  TORCH_INTERNAL_ASSERT(activation == kActivation<None>);
  return z;
}

/// out = activation(x) for checked tensors of one shape; `out` may be x.
void run_activation(const char* op, Activation activation, const at::Tensor& out,
                    const at::Tensor& x);

/// Writes the gradient of activation(x) to `to`, and the output over `grad`. Only on a GPU, where
/// one pass takes less time than two.
void write_gradient_and_output(const at::Tensor& grad, const at::Tensor& x, Activation activation,
                               const at::Tensor& to);

/// Computes the gradient of activation(x). `saved`: x or the output, see saved_by(activation).
struct ActivationBackward {
  static constexpr const char* kSchema =
      "torchkiln::_activation_backward(Tensor grad, Tensor saved, str act) -> Tensor";
  static at::Tensor meta(const at::Tensor& grad, const at::Tensor& saved, Activation act);
  static at::Tensor kernel(const at::Tensor& grad, const at::Tensor& saved, Activation act);
};

}  // namespace torchkiln
