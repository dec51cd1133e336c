// The ops layer_norm, rms_norm, add_layer_norm and add_rms_norm, and their derivatives. They share
// one list of arguments, Call in norm.h. Forward saves the mean and rstd of each row; backward
// reads x, or the sum with the residual, once more. kernel.cpp has the checks and the kernels.

#include "norm/norm.h"

#include "detail/column_sum.h"
#include "detail/normalized_shape.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::norm_ops {

using c10::SymIntArrayRef;

Tensor composite_norm(const Tensor& z, int64_t dims, const Tensor& weight, const Tensor& bias,
                      double eps, double offset, bool centered, at::ScalarType rounded) {
  const auto last = dims_between(z.dim() - dims, z.dim());
  const Tensor from = centered ? z - z.mean(last, /*keepdim=*/true) : z;
  Tensor y = from * ((from * from).mean(last, /*keepdim=*/true) + eps).rsqrt();
  Tensor change;
  if (rounded != z.scalar_type()) change = (y.to(rounded).to(z.scalar_type()) - y).detach();
  if (weight.defined()) {
    const Tensor factor = weight.to(z.scalar_type()) + offset;
    y = y * factor;
    if (change.defined()) change = change * factor.detach();
  }
  if (change.defined()) y = y + change;
  if (bias.defined()) y = y + bias.to(z.scalar_type());
  return y;
}

/// Saves z (x or the sum), the statistics of each row and the weight. The bias is not saved: no
/// gradient depends on its values.
Two record_norm(const Call& call, const Tensor& y, const Tensor& sum, const Tensor& stats) {
  const Tensor weight = tensor_or_undefined(call.weight);
  const Tensor bias = tensor_or_undefined(call.bias);
  const at::ScalarType bias_dtype = bias.defined() ? bias.scalar_type() : at::ScalarType::Undefined;
  const at::ScalarType weight_dtype = weight.defined() ? weight.scalar_type()
                                      : bias.defined() ? bias.scalar_type()
                                                       : call.wider().scalar_type();
  // Returns the gradients of z, weight and bias. The gradient of z includes the incoming gradient
  // of the sum.
  const auto gradients = [=, dims = static_cast<int64_t>(call.shape.size()), eps = call.eps,
                          offset = call.offset, centered = call.centered](
                             const Incoming& in, const Tensor& grad_sum, const Kept<3>& kept,
                             const Backward::Wanted& wanted) {
    const auto& [z, stats, weight] = kept;
    if (!in.needs_composite()) {
      auto [grad_z, grad_weight, grad_bias] = call_below<Backward>(
          in[0], maybe(grad_sum), z, stats, maybe(weight), offset, weight_dtype, wanted);
      return variable_list{grad_z, grad_weight, grad_bias};
    }
    const at::ScalarType dtype = z.scalar_type(), compute = compute_dtype(dtype);
    const Tensor bias = bias_dtype == at::ScalarType::Undefined
                            ? Tensor()
                            : at::zeros_symint(z.sym_sizes().slice(z.dim() - dims, dims),
                                               z.options().dtype(bias_dtype));
    variable_list found = composite_gradients(
        in, std::array{z.to(compute), weight, bias}, wanted, [&](const auto& inputs) {
          return composite_norm(inputs[0], dims, inputs[1], inputs[2], eps, offset, centered,
                                /*rounded=*/compute)
              .to(dtype);
        });
    if (grad_sum.defined() && wanted[0]) found[0] = found[0] + grad_sum.to(compute);
    if (wanted[0]) found[0] = found[0].to(dtype);
    return found;
  };
  if (!call.residual) {
    return {record(call.op(), {*call.x, weight, bias}, y, keep(*call.x, stats, weight),
                   [=](const Incoming& in, const Kept<3>& kept) {
                     return gradients(in, Tensor(), kept, {in.wants(0), in.wants(1), in.wants(2)});
                   }),
            Tensor()};
  }
  return record(call.op(), {*call.x, *call.residual, weight, bias}, Two{y, sum},
                keep(sum, stats, weight), [=](const Incoming& in, const Kept<3>& kept) {
                  // x and residual have the same gradient, which autograd casts to the dtype of
                  // each. If y was not used, it is the incoming gradient of the sum.
                  if (!in[0].defined()) return variable_list{in[1], in[1], Tensor(), Tensor()};
                  const variable_list found = gradients(
                      in, in[1], kept, {in.wants(0) || in.wants(1), in.wants(2), in.wants(3)});
                  return variable_list{found[0], found[0], found[1], found[2]};
                });
}

namespace {

Two composite(const Call& call) {
  outputs(call, /*wants_stats=*/false);  // for its checks
  const at::ScalarType dtype = call.wider().scalar_type();
  const Tensor sum = call.residual ? *call.x + *call.residual : Tensor();
  const Tensor z = (call.residual ? sum : *call.x).to(compute_dtype(dtype));
  const Tensor y =
      composite_norm(z, static_cast<int64_t>(call.shape.size()), tensor_or_undefined(call.weight),
                     tensor_or_undefined(call.bias), call.eps, call.offset, call.centered,
                     call.round == NormRounding::input ? dtype : z.scalar_type());
  return {y.to(dtype), sum};
}

/// Computes and records y and, with a residual, the sum.
Two recorded(const Below& below, const Call& call) {
  if (call.residual) {
    const auto [y, sum, stats] = below.call<AddForward>(call);
    return record_norm(call, y, sum, stats);
  }
  const auto [y, stats] = below.call<Forward>(call);
  return record_norm(call, y, Tensor(), stats);
}

/// The functions of an op without a residual.
template <class Kind>
struct NormOp {
  struct Arguments : Kind {
    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.x), Kind::fields(self));
    }
  };
  static Tensor meta(const Arguments& call) {
    return std::get<0>(outputs(call, /*wants_stats=*/false));
  }
  static Tensor kernel(const Arguments& call) {
    return std::get<0>(run(call, /*wants_stats=*/false));
  }
  static Tensor composite(const Arguments& call) { return std::get<0>(norm_ops::composite(call)); }
  static Tensor recorded(const Below& below, const Arguments& call) {
    return std::get<0>(norm_ops::recorded(below, call));
  }
};

/// The functions of an op with a residual, which also returns the sum.
template <class Kind>
struct AddNormOp {
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};

  struct Arguments : Kind {
    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.x, self.residual), Kind::fields(self));
    }
  };
  static Two meta(const Arguments& call) {
    auto [y, sum, stats] = outputs(call, /*wants_stats=*/false);
    return {y, sum};
  }
  static Two kernel(const Arguments& call) {
    auto [y, sum, stats] = run(call, /*wants_stats=*/false);
    return {y, sum};
  }
  static Two composite(const Arguments& call) { return norm_ops::composite(call); }
  static Two recorded(const Below& below, const Arguments& call) {
    return norm_ops::recorded(below, call);
  }
};

struct LayerNorm : NormOp<LayerNormCall> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::layer_norm(Tensor x, SymInt[1] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, float offset=0.0, str round=\"once\") -> Tensor";
};

struct RmsNorm : NormOp<RmsNormCall> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::rms_norm(Tensor x, SymInt[1] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float offset=0.0, str round=\"once\") -> Tensor";
};

struct AddLayerNorm : AddNormOp<LayerNormCall> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::add_layer_norm(Tensor x, Tensor residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, float offset=0.0, "
      "str round=\"once\") -> (Tensor, Tensor)";
};

struct AddRmsNorm : AddNormOp<RmsNormCall> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::add_rms_norm(Tensor x, Tensor residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, float? eps=None, *, float offset=0.0, str round=\"once\") -> "
      "(Tensor, Tensor)";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<Forward, AddForward, Backward, LayerNorm, RmsNorm, AddLayerNorm, AddRmsNorm>(m);
}

}  // namespace torchkiln::norm_ops

namespace torchkiln {

at::Tensor layer_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                      const MaybeTensor& weight, const MaybeTensor& bias,
                      const LayerNormOptions& options) {
  return call<norm_ops::LayerNorm>(x, normalized_shape, weight, bias, options);
}

at::Tensor rms_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                    const MaybeTensor& weight, const RmsNormOptions& options) {
  return call<norm_ops::RmsNorm>(x, normalized_shape, weight, options);
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                  c10::SymIntArrayRef normalized_shape,
                                                  const MaybeTensor& weight,
                                                  const MaybeTensor& bias,
                                                  const LayerNormOptions& options) {
  return call<norm_ops::AddLayerNorm>(x, residual, normalized_shape, weight, bias, options);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                c10::SymIntArrayRef normalized_shape,
                                                const MaybeTensor& weight,
                                                const RmsNormOptions& options) {
  return call<norm_ops::AddRmsNorm>(x, residual, normalized_shape, weight, options);
}

}  // namespace torchkiln
