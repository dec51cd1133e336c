#pragma once

// Declarations for kernel.cpp (checks, kernels), norm.cpp (the four ops, derivatives),
// quantized.cpp (their forms with a result in E4M3) and written.cpp (their forms that write to
// given tensors).

#include "detail/normalized_shape.h"
#include "torchkiln/torch/op.h"

namespace torchkiln {

/// The roundings of a norm: once, after weight and bias, or also before the weight, to the dtype of
/// its input.
enum class NormRounding { once, input };

/// A rounding is a string in the schemas of ops.
template <>
struct InSchema<NormRounding> {
  using Type = c10::string_view;
  static NormRounding read(const char* op, c10::string_view name) {
    if (name == "once") return NormRounding::once;
    TORCH_CHECK_VALUE(name == "input", "torchkiln.", op, ": round: got '", name,
                      "', expected one of once, input");
    return NormRounding::input;
  }
  static c10::string_view write(NormRounding round) {
    return round == NormRounding::once ? "once" : "input";
  }
};

namespace norm_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The arguments of any of the ops.
struct Call {
  Borrowed<Tensor> x;
  Borrowed<Tensor> residual;
  c10::SymIntArrayRef shape;     // normalized_shape: the last sizes of x
  Borrowed<MaybeTensor> weight;  // without one the factor is 1, and offset is ignored
  Borrowed<MaybeTensor> bias;    // without one, 0 is added
  double eps;
  double offset;
  NormRounding round;
  bool centered;  // layer norm; else RMS norm
  bool in_place = false;
  bool quantized = false;  // y is written in E4M3

  /// Whether the residual is float32 and x half precision. In general the kernels add the narrower
  /// of the two tensors to the wider one, and the results have the wider dtype.
  bool residual_is_wider() const {
    return residual && is_mixed(x->scalar_type(), residual->scalar_type()) &&
           residual->scalar_type() == at::kFloat;
  }
  const Tensor& wider() const { return residual_is_wider() ? *residual : x; }
  const Tensor& narrower() const { return residual_is_wider() ? x : *residual; }

  const char* op() const {
    if (quantized && residual) return centered ? "add_layer_norm_fp8" : "add_rms_norm_fp8";
    if (quantized) return centered ? "layer_norm_fp8" : "rms_norm_fp8";
    if (in_place) return centered ? "add_layer_norm_" : "add_rms_norm_";
    if (residual) return centered ? "add_layer_norm" : "add_rms_norm";
    return centered ? "layer_norm" : "rms_norm";
  }
};

/// Checks the arguments.
void check(const Call& call);

/// Checks the arguments and returns uninitialised outputs: y (undefined if quantised); x + residual
/// (undefined without a residual); the statistics of each row for backward (undefined unless
/// wanted), one tensor [2 or 1, leading sizes of x] with mean and rstd for layer norm, rstd for RMS
/// norm.
Three outputs(const Call& call, bool wants_stats);

/// Computes the outputs.
Three run(const Call& call, bool wants_stats);
/// Computes the outputs into the contiguous tensors `to`. y may be x, and the sum may be the
/// residual. A quantised y is written to `quantized`: data and scale.
Three run_into(const Call& call, Three to, const Two& quantized = {});

/// Records y (or, if y is quantised, the tensor that stands for it) and x + residual (undefined
/// without a residual). `stats`: the statistics from outputs().
Two record_norm(const Call& call, const Tensor& y, const Tensor& sum, const Tensor& stats);

/// (z - mean) * rstd * (weight + offset) + bias over the last `dims` dimensions, with torch's own
/// ops, in the dtype of `z`. (z - mean) * rstd is rounded to `rounded`; the derivatives ignore this
/// rounding.
Tensor composite_norm(const Tensor& z, int64_t dims, const Tensor& weight, const Tensor& bias,
                      double eps, double offset, bool centered, at::ScalarType rounded);

/// The arguments of a layer norm that follow x and a residual.
struct LayerNormCall : Call {
  void complete() { centered = true; }

  TORCHKILN_FIELDS(self.shape, self.weight, self.bias, self.eps, self.offset, self.round);
};

/// The arguments of an RMS norm that follow x and a residual.
struct RmsNormCall : Call {
  std::optional<double> given_eps;  // default: the epsilon of the compute dtype

  void complete() {
    centered = false;
    eps = given_eps.value_or(default_eps(x));
  }

  TORCHKILN_FIELDS(self.shape, self.weight, self.given_eps, self.offset, self.round);
};

/// The forward op that also returns the statistics: {y, stats}.
struct Forward {
  struct Arguments : Call {
    TORCHKILN_FIELDS(self.x, self.shape, self.weight, self.bias, self.eps, self.offset, self.round,
                     self.centered);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_norm_forward(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps, float offset, str round, bool centered) -> (Tensor, Tensor)";
  static Two meta(const Arguments& call);
  static Two kernel(const Arguments& call);
};

/// The forward op of x + residual: {y, sum, stats}.
struct AddForward {
  struct Arguments : Call {
    TORCHKILN_FIELDS(self.x, self.residual, self.shape, self.weight, self.bias, self.eps,
                     self.offset, self.round, self.centered);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_add_norm_forward(Tensor x, Tensor residual, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor? bias, float eps, float offset, str round, bool centered) -> "
      "(Tensor, Tensor, Tensor)";
  static Three meta(const Arguments& call) { return outputs(call, /*wants_stats=*/true); }
  static Three kernel(const Arguments& call) { return run(call, /*wants_stats=*/true); }
};

/// Computes the wanted gradients of z, weight and bias, where z is x or x + residual. The rank of
/// `stats` determines the number of normalized dimensions.
struct Backward {
  using Wanted = std::array<bool, 3>;
  struct Arguments {
    Borrowed<Tensor> grad;
    Borrowed<MaybeTensor> grad_sum;
    Borrowed<Tensor> z, stats;
    Borrowed<MaybeTensor> weight;
    double offset;
    at::ScalarType weight_dtype;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.grad_sum, self.z, self.stats, self.weight, self.offset,
                     self.weight_dtype, self.wanted);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_norm_backward(Tensor grad, Tensor? grad_sum, Tensor z, Tensor stats, "
      "Tensor? weight, float offset, ScalarType weight_dtype, bool[3] wanted) -> "
      "(Tensor, Tensor, Tensor)";
  static Three meta(const Arguments& call);
  static Three kernel(const Arguments& call);
};

}  // namespace norm_ops
}  // namespace torchkiln
