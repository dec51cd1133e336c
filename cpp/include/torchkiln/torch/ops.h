#pragma once

// The operators on tensors. Each call goes through torch's dispatcher, so autograd, autocast, vmap
// and tracing apply. All are differentiable to any order. Tensors are float32, float64, float16 or
// bfloat16 unless stated otherwise; half precision is computed in float32 and rounded once.
//
// Arguments that are seldom given are fields of a struct.

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "torchkiln/core/status.h"
#include "torchkiln/torch/losses.h"
#include "torchkiln/torch/options.h"
#include "torchkiln/torch/quantize.h"

namespace torchkiln {

/// a + b with torch's broadcasting and dtype promotion. The promoted dtype must be one of the four.
TORCHKILN_EXPORT at::Tensor add(const at::Tensor& a, const at::Tensor& b);

/// a * b + c in one pass, with the rules of add(). A number is a 0-dimensional CPU tensor.
TORCHKILN_EXPORT at::Tensor muladd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c);

/// An activation by its name in core/activations.h: "relu", "gelu", ... The result has x's shape
/// and dtype, and x's strides if x is dense.
TORCHKILN_EXPORT at::Tensor activation(const at::Tensor& x, std::string_view act);

inline at::Tensor square(const at::Tensor& x) { return activation(x, "square"); }
inline at::Tensor relu(const at::Tensor& x) { return activation(x, "relu"); }
inline at::Tensor relu2(const at::Tensor& x) { return activation(x, "relu2"); }
inline at::Tensor gelu(const at::Tensor& x) { return activation(x, "gelu"); }
inline at::Tensor gelu_tanh(const at::Tensor& x) { return activation(x, "gelu_tanh"); }
inline at::Tensor quick_gelu(const at::Tensor& x) { return activation(x, "quick_gelu"); }
inline at::Tensor silu(const at::Tensor& x) { return activation(x, "silu"); }
inline at::Tensor sigmoid(const at::Tensor& x) { return activation(x, "sigmoid"); }
inline at::Tensor tanh(const at::Tensor& x) { return activation(x, "tanh"); }

/// The activation in place: square, relu, silu, sigmoid or tanh. Returns x.
TORCHKILN_EXPORT at::Tensor& activation_(at::Tensor& x, std::string_view act);

struct BiasActOptions {
  double scale = 1.0;
  std::string_view act = "relu";  // as for activation(), or "none"

  TORCHKILN_FIELDS(self.scale, self.act);
};

/// activation(x * scale + bias) for x [..., columns] and bias [columns]. The bias has x's dtype, or
/// float32 if x has half precision. The result is contiguous and has x's shape and dtype.
TORCHKILN_EXPORT at::Tensor bias_act(const at::Tensor& x, const at::Tensor& bias,
                                     const BiasActOptions& options = {});

/// silu(gate) * up for tensors of one shape and dtype. Without `up`, the last dimension of `gate`
/// is split into gate and up. The result is contiguous.
TORCHKILN_EXPORT at::Tensor swiglu(const at::Tensor& gate,
                                   const std::optional<at::Tensor>& up = std::nullopt);

/// gelu(gate) * up, with arguments as for swiglu().
TORCHKILN_EXPORT at::Tensor geglu(const at::Tensor& gate,
                                  const std::optional<at::Tensor>& up = std::nullopt);

/// gelu_tanh(gate) * up, with arguments as for swiglu().
TORCHKILN_EXPORT at::Tensor geglu_tanh(const at::Tensor& gate,
                                       const std::optional<at::Tensor>& up = std::nullopt);

/// dropout(x, p) + residual for tensors of one shape and dtype. An element of x is replaced by 0
/// with probability p, else multiplied by 1 / (1 - p). The mask comes from torch's generator;
/// backward generates it again. The result is contiguous.
TORCHKILN_EXPORT at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual,
                                        double p = 0.5, bool training = true);

/// dropout(x + bias, p) + residual, with the bias along the last dimension.
TORCHKILN_EXPORT at::Tensor bias_dropout_add(const at::Tensor& x, const at::Tensor& bias,
                                             const at::Tensor& residual, double p = 0.5,
                                             bool training = true);

/// The sum over the given dimensions of x, or over all. `keepdim` keeps them with size 1. `dtype`
/// is the dtype of the result, by default that of x, or int64 for integers and bools, which at::sum
/// adds. Sums are accumulated in float32 (float64 if x or `dtype` is float64) and rounded once. The
/// result is contiguous and bitwise reproducible, on the CPU for any number of threads.
TORCHKILN_EXPORT at::Tensor sum(const at::Tensor& x, at::OptionalIntArrayRef dim = std::nullopt,
                                bool keepdim = false,
                                std::optional<at::ScalarType> dtype = std::nullopt);

/// sum() divided by the number of terms; NaN for no terms.
TORCHKILN_EXPORT at::Tensor mean(const at::Tensor& x, at::OptionalIntArrayRef dim = std::nullopt,
                                 bool keepdim = false,
                                 std::optional<at::ScalarType> dtype = std::nullopt);

/// The product of matrices [..., m, k] and [..., k, n], with torch's broadcasting of the leading
/// sizes. A one-dimensional argument is a row or a column, as for torch.matmul. The result is
/// contiguous.
TORCHKILN_EXPORT at::Tensor matmul(const at::Tensor& a, const at::Tensor& b);

struct LinearOptions {
  std::string_view act = "none";  // or a name as in activation()
  double scale = 1.0;
  std::optional<at::Tensor> residual = std::nullopt;  // [..., n], of x's dtype

  TORCHKILN_FIELDS(self.act, self.scale, self.residual);
};

/// activation(x weight^T * scale + bias) + residual for x [..., k], weight [n, k] and bias [n]. The
/// bias has x's dtype, or float32 if x has half precision; the weight has x's dtype. The result is
/// contiguous.
TORCHKILN_EXPORT at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias = std::nullopt,
                                   const LinearOptions& options = {});

struct MlpOptions {
  std::string_view act = "gelu";     // as for activation(), or "none"
  std::string_view save = "preact";  // keeps the argument of the activation for backward; with
                                     // "none" backward computes it again

  TORCHKILN_FIELDS(self.act, self.save);
};

/// activation(x up_weight^T + up_bias) down_weight^T + down_bias as one op, for x [..., k],
/// up_weight [hidden, k] and down_weight [n, hidden], all of one dtype.
TORCHKILN_EXPORT at::Tensor mlp(const at::Tensor& x, const at::Tensor& up_weight,
                                const at::Tensor& down_weight,
                                const std::optional<at::Tensor>& up_bias = std::nullopt,
                                const std::optional<at::Tensor>& down_bias = std::nullopt,
                                const MlpOptions& options = {});

struct GatedMlpOptions {
  std::string_view act = "silu";     // or gelu, gelu_tanh
  std::string_view save = "preact";  // as in MlpOptions

  TORCHKILN_FIELDS(self.act, self.save);
};

/// mlp() with a gate: activation(g) * u for the halves g, u of x gate_up_weight^T + gate_up_bias,
/// with gate_up_weight [2 * hidden, k].
TORCHKILN_EXPORT at::Tensor gated_mlp(const at::Tensor& x, const at::Tensor& gate_up_weight,
                                      const at::Tensor& down_weight,
                                      const std::optional<at::Tensor>& gate_up_bias = std::nullopt,
                                      const std::optional<at::Tensor>& down_bias = std::nullopt,
                                      const GatedMlpOptions& options = {});

struct LayerNormOptions {
  double eps = 1e-5;
  double offset = 0.0;              // added to the weight
  std::string_view round = "once";  // "input" also rounds the quotient to x's dtype

  TORCHKILN_FIELDS(self.eps, self.offset, self.round);
};

/// (x - mean) / sqrt(variance + eps) * (offset + weight) + bias, with mean and variance over the
/// last dimensions of x, whose sizes are `normalized_shape`. Weight and bias have that shape; their
/// dtype is x's, or float32 if x has half precision. The result is contiguous and has x's shape and
/// dtype. The gradients of weight and bias are bitwise reproducible.
TORCHKILN_EXPORT at::Tensor layer_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                       const std::optional<at::Tensor>& weight = std::nullopt,
                                       const std::optional<at::Tensor>& bias = std::nullopt,
                                       const LayerNormOptions& options = {});

struct RmsNormOptions {
  std::optional<double> eps;  // default: the machine epsilon of float32, or float64 for float64
  double offset = 0.0;        // offset and round as in LayerNormOptions
  std::string_view round = "once";

  TORCHKILN_FIELDS(self.eps, self.offset, self.round);
};

/// x / sqrt(mean of x^2 + eps) * (offset + weight), with arguments as for layer_norm().
TORCHKILN_EXPORT at::Tensor rms_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                     const std::optional<at::Tensor>& weight = std::nullopt,
                                     const RmsNormOptions& options = {});

/// {layer_norm(sum), sum} with sum = x + residual, for x and residual of one shape and dtype. The
/// sum is rounded to that dtype before it is normalized.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = std::nullopt,
    const std::optional<at::Tensor>& bias = std::nullopt, const LayerNormOptions& options = {});

/// {rms_norm(sum), sum} with sum = x + residual, as for add_layer_norm().
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = std::nullopt, const RmsNormOptions& options = {});

struct GatedNormOptions {
  std::optional<double> eps;  // as in RmsNormOptions
  bool gate_first = false;    // normalizes x * silu(gate) instead of x
  int64_t groups = 1;         // equal parts of the last dimension that are normalized separately
  double offset = 0.0;        // added to the weight

  TORCHKILN_FIELDS(self.eps, self.gate_first, self.groups, self.offset);
};

/// rms_norm(x) * silu(gate), or rms_norm(x * silu(gate)) if options.gate_first, for x and gate of
/// one shape and dtype; other arguments as for rms_norm().
TORCHKILN_EXPORT at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate,
                                           c10::SymIntArrayRef normalized_shape,
                                           const std::optional<at::Tensor>& weight = std::nullopt,
                                           const GatedNormOptions& options = {});

struct SoftmaxOptions {
  double scale = 1.0;
  std::optional<at::Tensor> mask;       // broadcasts to x
  bool causal = false;                  // masks column c (last dimension) of row r if c > r
  std::optional<at::ScalarType> dtype;  // casts x first

  TORCHKILN_FIELDS(self.scale, self.mask, self.causal, self.dtype);
};

/// softmax(x * scale) over dimension `dim`. Masked elements, for which `mask` is false or that
/// `causal` masks, count as -infinity. A row with all elements masked is NaN and has gradient 0. A
/// floating mask is added to x * scale instead. The result is contiguous and has x's shape.
TORCHKILN_EXPORT at::Tensor softmax(const at::Tensor& x, int64_t dim,
                                    const SoftmaxOptions& options = {});

/// The logarithm of softmax().
TORCHKILN_EXPORT at::Tensor log_softmax(const at::Tensor& x, int64_t dim,
                                        const SoftmaxOptions& options = {});

struct BatchNormOptions {
  std::optional<at::Tensor> residual;  // of x's shape and dtype
  std::string_view act = "relu";       // as for activation(), or "none"
  bool training = false;               // uses statistics of x and updates the running statistics
  double momentum = 0.1;
  double eps = 1e-5;

  TORCHKILN_FIELDS(self.residual, self.act, self.training, self.momentum, self.eps);
};

/// activation(batch_norm(x) + residual) for x [batch, channels, ...]. Weight, bias and running
/// statistics are [channels], of x's dtype, or float32 if x has half precision. The result has
/// adjacent channels if x has them, else it is contiguous.
TORCHKILN_EXPORT at::Tensor bn_act(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                   const std::optional<at::Tensor>& bias,
                                   const std::optional<at::Tensor>& running_mean,
                                   const std::optional<at::Tensor>& running_var,
                                   const BatchNormOptions& options = {});

/// activation(group norm of x) for x [batch, channels, ...]: mean and variance are taken over each
/// of `num_groups` groups of adjacent channels of a sample. weight and bias are [channels], of x's
/// dtype, or float32 if x has half precision. The result has adjacent channels if x has them, else
/// it is contiguous.
TORCHKILN_EXPORT at::Tensor group_norm(const at::Tensor& x, int64_t num_groups,
                                       const std::optional<at::Tensor>& weight = std::nullopt,
                                       const std::optional<at::Tensor>& bias = std::nullopt,
                                       double eps = 1e-5, std::string_view act = "none");

struct RopeOptions {
  bool interleaved = false;             // pairs are (2i, 2i + 1), else (i, i + rotated / 2)
  std::optional<at::Tensor> positions;  // the row of each token in cos and sin; int64 or int32
  std::optional<int64_t> rotary_dim;    // elements of a head that are rotated; default: all
  int64_t heads_dim = -3;               // or -2 for [..., tokens, heads, head_dim]
  bool inverse = false;                 // rotates by the negative angles

  TORCHKILN_FIELDS(self.interleaved, self.positions, self.rotary_dim, self.heads_dim, self.inverse);
};

/// Rotary embedding of q and k, [..., heads, tokens, head_dim], with any number of heads each: the
/// pair (a, b) becomes (a cos - b sin, b cos + a sin). cos and sin are [tokens, pairs],
/// [batch, tokens, pairs] or, with positions, a table [rows, pairs]; they may contain each factor
/// twice. Their dtype is q's, or float32 if q has half precision. A position outside of the table
/// gives NaN. Without k the second result is empty.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q,
                                                         const std::optional<at::Tensor>& k,
                                                         const at::Tensor& cos,
                                                         const at::Tensor& sin,
                                                         const RopeOptions& options = {});

struct QkvNormRopeOptions {
  double eps = 1e-6;
  std::string_view norm = "head";  // of each head; "all": of all heads together; or "none"
  double offset = 0.0;             // added to the weights
  bool interleaved = false;        // interleaved and below: as in RopeOptions
  std::optional<at::Tensor> positions;
  std::optional<int64_t> rotary_dim;

  TORCHKILN_FIELDS(self.eps, self.norm, self.offset, self.interleaved, self.positions,
                   self.rotary_dim);
};

/// Splits a packed projection [..., tokens, (num_heads + 2 * num_kv_heads) * head_dim] into queries
/// [..., heads, tokens, head_dim], keys and values [..., num_kv_heads, tokens, head_dim]. Queries
/// and keys get an RMS norm, then the rotation of rope(), and are rounded once. The norm is taken
/// of each head, with weights [head_dim], or of all heads of the queries and all heads of the keys,
/// with weights [num_(kv_)heads * head_dim]. The heads of a token are adjacent in the results. The
/// gradients of the weights are bitwise reproducible.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv_norm_rope(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
    const std::optional<at::Tensor>& q_weight, const std::optional<at::Tensor>& k_weight,
    int64_t num_heads, int64_t num_kv_heads, const QkvNormRopeOptions& options = {});

struct SpmmOptions {
  at::OptionalSymIntArrayRef shape = std::nullopt;  // [rows, columns], checked against the tensors
  std::optional<at::Tensor> transpose;              // csr_transpose() of the pattern, for backward
  bool check = false;                               // checks the indices; synchronises with the GPU

  TORCHKILN_FIELDS(self.shape, self.transpose, self.check);
};

/// The product of a CSR matrix and a dense matrix b [columns, width]. Row r of the CSR matrix has
/// the entries crow[r] <= e < crow[r + 1]: values[e] at column col[e]. Indices are int32 or int64;
/// values and b have one dtype. Each tensor may have a leading batch dimension; a tensor without
/// one is shared by the batch. The result, [rows, width] or [batch, rows, width], is contiguous and
/// bitwise reproducible. Differentiable in values and b.
TORCHKILN_EXPORT at::Tensor spmm(const at::Tensor& values, const at::Tensor& b,
                                 const at::Tensor& crow, const at::Tensor& col,
                                 const SpmmOptions& options = {});

/// The transposed pattern that backward of spmm() needs. Keep it if a pattern is used more than
/// once. int32 [columns + 1 + 2 * entries], with the pattern's batch dimension if it has one.
TORCHKILN_EXPORT at::Tensor csr_transpose(const at::Tensor& crow, const at::Tensor& col,
                                          c10::SymInt columns);

}  // namespace torchkiln
