#pragma once

// Tensors in float8_e4m3fn with scales, and products of them.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "torchkiln/core/status.h"
#include "torchkiln/torch/options.h"

namespace torchkiln {

/// x [..., k] in float8_e4m3fn with a float32 scale for each 128 elements of a row, a power of two:
/// (data, scale [..., ceil(k / 128)]). x is float32, float16 or bfloat16; NaN and infinities become
/// NaN. Not differentiable; nor are the next four functions.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> quantize(const at::Tensor& x);

/// quantize() of x, and of the transpose of x as a matrix [rows, k], in one read of x: (data,
/// scale, transposed, transposed_scale). `square`: the transposed matrix has a scale for each 128 x
/// 128 elements, as a weight.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> quantize_both(
    const at::Tensor& x, bool square = false);

/// The transposed matrix with a scale for each 128 elements of its rows or, if `square`, for each
/// 128 x 128 elements, from quantize(). The values are unchanged, except those below 2^-13 of the
/// largest value with the same scale.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> transpose_quantized(const at::Tensor& data,
                                                                        const at::Tensor& scale,
                                                                        bool square = false);

/// weight [n, k] with a scale for each 128 x 128 elements: (data, scale, transposed,
/// transposed_scale).
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> quantize_weight(
    const at::Tensor& weight);

/// data * scale in `dtype`, for the scales of rows or of squares.
TORCHKILN_EXPORT at::Tensor dequantize(const at::Tensor& data, const at::Tensor& scale,
                                       at::ScalarType dtype = at::kFloat);

/// Optional tensors that a caller of linear_fp8() already has.
struct LinearFp8Options {
  std::optional<at::Tensor> scale;   // x is the result `data` of quantize(), with this scale
  std::optional<at::Tensor> source;  // the tensor that was quantised; receives the gradient of x
  std::optional<at::Tensor> weight_data;  // the four results of quantize_weight(), or none of them
  std::optional<at::Tensor> weight_scale;
  std::optional<at::Tensor> weight_transposed;
  std::optional<at::Tensor> weight_transposed_scale;

  TORCHKILN_FIELDS(self.scale, self.source, self.weight_data, self.weight_scale,
                   self.weight_transposed, self.weight_transposed_scale);
};

/// x weight^T + bias as a product in float8_e4m3fn, for x [..., k], weight [n, k] and bias [n]. The
/// result has the dtype of x. Backward computes both other products in float8_e4m3fn, too; the
/// gradient of the bias is exact. No second derivative. On a GPU, which must have compute
/// capability 9.0, it calls torch's scaled product. On a CPU it multiplies the dequantised tensors
/// in float32.
TORCHKILN_EXPORT at::Tensor linear_fp8(const at::Tensor& x, const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias = std::nullopt,
                                       const LinearFp8Options& options = {});

}  // namespace torchkiln
