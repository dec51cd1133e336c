#pragma once

// The operators on tensors. Each is the dispatcher's entry: autograd, autocast, vmap and tracing
// see the call.

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

#include "torchkiln/status.h"

namespace torchkiln {

/// a + b, with torch's broadcasting and dtype promotion. The promoted dtype must be float32,
/// float64, float16 or bfloat16. Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor add(const at::Tensor& a, const at::Tensor& b);

/// relu(x * scale + bias): x [..., columns], bias [columns] of x's dtype, or float32 beside a half
/// precision. Returns a contiguous tensor of x's shape and dtype, computed in float32 (float64 for
/// float64). Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor scale_bias_relu(const at::Tensor& x, const at::Tensor& bias,
                                            double scale = 1.0);

/// The gradients of scale_bias_relu for x and bias, from its output; `wanted` says which. An
/// unwanted one is empty.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> scale_bias_relu_backward(
    const at::Tensor& grad, const at::Tensor& output, double scale, at::ScalarType bias_dtype,
    std::array<bool, 2> wanted);

/// The sum over the given dimensions of x, or over all; `keepdim` keeps them with size 1.
/// Accumulated in float32 (float64 for x or `dtype` float64), rounded once to `dtype`, which is
/// that of x if not given. Contiguous; no bit depends on the run or on the number of threads.
/// Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor sum(const at::Tensor& x, at::OptionalIntArrayRef dim = std::nullopt,
                                bool keepdim = false,
                                std::optional<at::ScalarType> dtype = std::nullopt);

/// sum() divided by the number of its terms; that of none is NaN.
TORCHKILN_EXPORT at::Tensor mean(const at::Tensor& x, at::OptionalIntArrayRef dim = std::nullopt,
                                 bool keepdim = false,
                                 std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace torchkiln
