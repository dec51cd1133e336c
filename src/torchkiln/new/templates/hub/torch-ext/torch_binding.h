#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

using torch::stable::Tensor;

/// x is [..., 2 columns] and contiguous, the result [..., columns].
Tensor OPNAME_forward(const Tensor& x);
/// The gradient of x.
Tensor OPNAME_backward(const Tensor& grad, const Tensor& x);

namespace OPNAME_parts {

namespace headeronly = torch::headeronly;

/// Calls body(T{}) with the type of the elements.
template <class Body>
void with_type(const Tensor& x, const Body& body) {
  switch (x.scalar_type()) {
    case headeronly::ScalarType::Float:
      return body(float{});
    case headeronly::ScalarType::Double:
      return body(double{});
    case headeronly::ScalarType::Half:
      return body(headeronly::Half{});
    case headeronly::ScalarType::BFloat16:
      return body(headeronly::BFloat16{});
    default:
      STD_TORCH_CHECK(false, "OPNAME: x: expected float32, float64, float16 or bfloat16");
  }
}

/// Half precision is computed in float.
template <class T>
struct Compute {
  using Type = float;
};
template <>
struct Compute<double> {
  using Type = double;
};

inline void check_input(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0, "OPNAME: x: expected an even last size");
  STD_TORCH_CHECK(x.is_contiguous(), "OPNAME: x: expected a contiguous tensor");
}

inline void check_gradient(const Tensor& grad, const Tensor& x) {
  check_input(x);
  const bool fits = grad.scalar_type() == x.scalar_type() && 2 * grad.numel() == x.numel();
  STD_TORCH_CHECK(grad.is_contiguous() && fits,
                  "OPNAME: grad: expected half the elements of x, contiguous, of its dtype");
}

inline Tensor empty_half(const Tensor& x) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  return torch::stable::new_empty(x, sizes);
}

}  // namespace OPNAME_parts
