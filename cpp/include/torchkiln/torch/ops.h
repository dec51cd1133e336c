#pragma once

// The operators on tensors. Each is the dispatcher's entry: autograd, autocast, vmap and tracing
// see the call.

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "torchkiln/core/status.h"

namespace torchkiln {

/// a + b, with torch's broadcasting and dtype promotion. The promoted dtype must be float32,
/// float64, float16 or bfloat16. Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor add(const at::Tensor& a, const at::Tensor& b);

/// a * b + c under the same rules, in one pass; a number is a 0-dimensional tensor on the CPU.
/// Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor muladd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c);

/// An activation by its name, as activations.h lists them: "relu", "gelu", ... Returns a tensor of
/// x's shape, dtype and dense layout. Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor activation(const at::Tensor& x, std::string_view act);

/// The same in place, for the activations that torch has in place: returns x.
TORCHKILN_EXPORT at::Tensor& activation_(at::Tensor& x, std::string_view act);

/// activation(x * scale + bias): x [..., columns], bias [columns] of x's dtype, or float32 beside a
/// half precision. Returns a contiguous tensor of x's shape and dtype, computed in float32 (float64
/// for float64). Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor bias_act(const at::Tensor& x, const at::Tensor& bias,
                                     double scale = 1.0, std::string_view act = "relu");

/// relu(x * scale + bias)
inline at::Tensor scale_bias_relu(const at::Tensor& x, const at::Tensor& bias, double scale = 1.0) {
  return bias_act(x, bias, scale, "relu");
}

/// silu(gate) * up, of one shape and dtype; without `up`, the last dimension of `gate` is split in
/// two. Returns a contiguous tensor. Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor swiglu(const at::Tensor& gate,
                                   const std::optional<at::Tensor>& up = std::nullopt);

/// gelu(gate) * up, likewise
TORCHKILN_EXPORT at::Tensor geglu(const at::Tensor& gate,
                                  const std::optional<at::Tensor>& up = std::nullopt);

/// The same with the tanh approximation of gelu.
TORCHKILN_EXPORT at::Tensor geglu_tanh(const at::Tensor& gate,
                                       const std::optional<at::Tensor>& up = std::nullopt);

/// dropout(x, p) + residual, of one shape and dtype: with probability p an element of x counts as
/// 0, else it is multiplied by 1 / (1 - p). The mask comes from torch's generator and is drawn
/// again for backward. Returns a contiguous tensor. Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual,
                                        double p = 0.5, bool training = true);

/// dropout(x + bias, p) + residual, the bias along the last dimension
TORCHKILN_EXPORT at::Tensor bias_dropout_add(const at::Tensor& x, const at::Tensor& bias,
                                             const at::Tensor& residual, double p = 0.5,
                                             bool training = true);

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

/// The product of matrices [..., m, k] and [..., k, n], with torch's broadcasting of the leading
/// sizes; one-dimensional arguments are a row or a column, as for torch.matmul. Contiguous.
/// Accumulated in float32 (float64 for float64). Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor matmul(const at::Tensor& a, const at::Tensor& b);

/// activation(x weight^T * scale + bias) + residual: x [..., k], weight [n, k], bias [n] of x's
/// dtype or float32 beside a half precision, residual of the output's shape [..., n] and of x's
/// dtype. Contiguous. Differentiable, to any order.
TORCHKILN_EXPORT at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias = std::nullopt,
                                   std::string_view act = "none", double scale = 1.0,
                                   const std::optional<at::Tensor>& residual = std::nullopt);

/// (x - mean) / sqrt(variance + eps) * weight + bias, the mean and the variance those of the last
/// dimensions of x, whose sizes are `normalized_shape`. Weight and bias, each of which may be left
/// out, have that shape and x's dtype, or float32 beside a half precision. Returns a contiguous
/// tensor of x's shape and dtype, computed in float32 (float64 for float64). Differentiable, to any
/// order; the gradients of weight and bias do not depend on the run.
TORCHKILN_EXPORT at::Tensor layer_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                       const std::optional<at::Tensor>& weight = std::nullopt,
                                       const std::optional<at::Tensor>& bias = std::nullopt,
                                       double eps = 1e-5);

/// x / sqrt(mean of x^2 + eps) * (offset + weight), likewise. Without an eps it is the rounding
/// step of float32 (of float64 for float64).
TORCHKILN_EXPORT at::Tensor rms_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                     const std::optional<at::Tensor>& weight = std::nullopt,
                                     std::optional<double> eps = std::nullopt, double offset = 0.0);

/// {layer_norm(sum), sum} with sum = x + residual, of one shape and dtype: the sum is rounded to
/// that dtype, and what is normalized is the rounded one.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = std::nullopt,
    const std::optional<at::Tensor>& bias = std::nullopt, double eps = 1e-5);

/// {rms_norm(sum), sum}, likewise.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = std::nullopt,
    std::optional<double> eps = std::nullopt, double offset = 0.0);

/// softmax(x * scale) over dimension `dim`. Where `mask`, which broadcasts to x, is false, an
/// element takes no part; nor does one whose place in the last dimension is beyond that in the one
/// before where `causal`. What takes no part counts as -infinity, so that a row of nothing else is
/// NaN; its gradient is 0. Returns a contiguous tensor of x's shape and dtype. Differentiable, to
/// any order.
TORCHKILN_EXPORT at::Tensor softmax(const at::Tensor& x, int64_t dim, double scale = 1.0,
                                    const std::optional<at::Tensor>& mask = std::nullopt,
                                    bool causal = false);

/// The logarithm of softmax(), likewise.
TORCHKILN_EXPORT at::Tensor log_softmax(const at::Tensor& x, int64_t dim, double scale = 1.0,
                                        const std::optional<at::Tensor>& mask = std::nullopt,
                                        bool causal = false);

struct CrossEntropyOptions {
  std::optional<at::Tensor> weight;  // [classes]: of the logits' dtype, or float32 beside a half
  int64_t ignore_index = -100;
  std::string_view reduction = "mean";  // none, mean, sum
  double label_smoothing = 0.0;
  double z_loss = 0.0;                  // adds z_loss * log(sum of exp(logits))^2, weighted alike
  std::optional<at::ScalarType> dtype;  // of the loss: that of the logits if not given
  bool check_target = false;            // waits for the GPU to name a target that is no class
  bool inplace_backward = false;        // the gradient takes the place of the logits
};

/// Cross-entropy of logits [classes], [rows, classes] or [rows, classes, ...] and a target: int64
/// classes, one for each row, or probabilities of the logits' shape and dtype. Nothing of the
/// logits' size is stored beside their gradient. Differentiable, to any order, by logits and
/// probabilities.
TORCHKILN_EXPORT at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                          const CrossEntropyOptions& options = {});

struct SpmmOptions {
  at::OptionalSymIntArrayRef shape = std::nullopt;  // of the sparse matrix, to be checked
  std::optional<at::Tensor> transpose;              // of csr_transpose(), for backward
  bool check = false;                               // of the pattern; waits for the GPU
};

/// A sparse matrix in compressed rows times a dense one, b [columns, width]; A's row r has the
/// entries crow[r] <= e < crow[r + 1], values[e] at column col[e]. Each tensor may have a batch in
/// front; one that has none is the same for all. int32 or int64 indices; values and b of one dtype.
/// Returns a contiguous [rows, width] or [batch, rows, width], computed in float32 (float64 for
/// float64), no bit of which depends on the run. Differentiable by values and b, to any order.
TORCHKILN_EXPORT at::Tensor spmm(const at::Tensor& values, const at::Tensor& b,
                                 const at::Tensor& crow, const at::Tensor& col,
                                 const SpmmOptions& options = {});

/// The transposed pattern that backward of spmm() works with, to be kept where a pattern is used
/// more than once: int32, [columns + 1 + 2 * entries] or a batch of those.
TORCHKILN_EXPORT at::Tensor csr_transpose(const at::Tensor& crow, const at::Tensor& col,
                                          c10::SymInt columns);

}  // namespace torchkiln
