#pragma once

// The activations as torch knows them: by name, and in torch's own ops for transforms and for the
// derivative of a derivative.

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <string>

#include "torchkiln/activations.h"

namespace torchkiln {

/// An activation in torch's own ops, and its gradient from what saved_by() says.
struct Composite {
  at::Tensor (*value)(const at::Tensor& z);
  at::Tensor (*gradient)(const at::Tensor& grad, const at::Tensor& saved);
};

// clang-format off
inline Composite composite_of(TypeTag<None>) { return {[](auto& z) { return z; }, [](auto& grad, auto&) { return grad; }}; }
inline Composite composite_of(TypeTag<Square>) { return {[](auto& z) { return z * z; }, [](auto& grad, auto& z) { return grad * (z + z); }}; }
inline Composite composite_of(TypeTag<Relu>) { return {[](auto& z) { return at::relu(z); }, [](auto& grad, auto& out) { return at::threshold_backward(grad, out, 0); }}; }
inline Composite composite_of(TypeTag<Gelu>) { return {[](auto& z) { return at::gelu(z); }, [](auto& grad, auto& z) { return at::gelu_backward(grad, z); }}; }
inline Composite composite_of(TypeTag<GeluTanh>) { return {[](auto& z) { return at::gelu(z, "tanh"); }, [](auto& grad, auto& z) { return at::gelu_backward(grad, z, "tanh"); }}; }
inline Composite composite_of(TypeTag<Silu>) { return {[](auto& z) { return at::silu(z); }, [](auto& grad, auto& z) { const auto s = at::sigmoid(z); return grad * (s * (1 + z * (1 - s))); }}; }
inline Composite composite_of(TypeTag<Sigmoid>) { return {[](auto& z) { return at::sigmoid(z); }, [](auto& grad, auto& out) { return at::sigmoid_backward(grad, out); }}; }
inline Composite composite_of(TypeTag<Tanh>) { return {[](auto& z) { return at::tanh(z); }, [](auto& grad, auto& out) { return at::tanh_backward(grad, out); }}; }
// clang-format on

inline Composite composite_of(Activation activation) {
  Composite composite{};
  with_activation(activation, [&](auto tag) { composite = composite_of(tag); }, Activations{});
  return composite;
}

inline const char* name_of(Activation activation) {
  const char* name = "";
  with_activation(activation, [&](auto tag) { name = decltype(tag)::type::kName; }, Activations{});
  return name;
}

inline Activation find_activation(const char* op, c10::string_view name) {
  int found = -1;
  std::string known;
  for_each_activation(
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if (name == Act::kName) found = static_cast<int>(kActivation<Act>);
      },
      Activations{});
  if (found >= 0) return static_cast<Activation>(found);
  for_each_activation(
      [&](auto tag) {
        known += std::string(known.empty() ? "" : ", ") + decltype(tag)::type::kName;
      },
      Activations{});
  TORCH_CHECK_VALUE(false, "torchkiln.", op, ": act: got '", name, "', expected one of ", known);
}

/// out = activation(x), of checked tensors of one shape; `out` may be x. Grid::overlaps tells where
/// it is not to begin beside the kernel before it.
void run_activation(const char* op, Activation activation, const at::Tensor& out,
                    const at::Tensor& x, bool overlaps = true);

}  // namespace torchkiln
