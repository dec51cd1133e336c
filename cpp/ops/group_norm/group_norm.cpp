// The op group_norm and its derivatives, with an activation in the same pass. Forward saves the
// statistics of each group; backward reads x once more. kernel.cpp has the checks and kernels.

#include "group_norm/group_norm.h"

#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::group_norm_ops {
namespace {

/// A vector over the channels in the compute dtype, reshaped to broadcast with x.
Tensor beside(const Tensor& vector, const Tensor& x) {
  c10::SymDimVector shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = vector.sym_size(0);
  return vector.to(x.scalar_type()).reshape_symint(shape);
}

/// The op with torch's own ops; `wide` is x in the compute dtype.
Tensor composite_wide(const Tensor& wide, int64_t num_groups, const Tensor& weight,
                      const Tensor& bias, double eps, Activation act) {
  const c10::SymInt groups = wide.sym_size(0) * num_groups;
  const c10::SymInt count = wide.sym_size(1) / num_groups * wide.sym_numel() /
                            (wide.sym_size(0) * wide.sym_size(1)).max(c10::SymInt(1));
  const Tensor rows = wide.reshape_symint({groups, count});
  const Tensor from_mean = rows - rows.mean(1, /*keepdim=*/true);
  const Tensor variance = (from_mean * from_mean).mean(1, /*keepdim=*/true);
  Tensor z = (from_mean * (variance + eps).rsqrt()).reshape_symint(wide.sym_sizes());
  if (weight.defined()) z = z * beside(weight, wide);
  if (bias.defined()) z = z + beside(bias, wide);
  return composite_activation(act, z);
}

/// Settings of the call that backward needs besides the saved tensors.
struct Settings {
  int64_t num_groups;
  double eps;
  Activation act;
};

/// The gradients with torch's own ops. `kept` has x, the statistics, weight and bias.
variable_list composite_backward(const Incoming& in, const Kept<4>& kept,
                                 const Settings& settings) {
  const auto& [x, statistics, weight, bias] = kept;
  const at::ScalarType dtype = x.scalar_type();
  variable_list found =
      composite_gradients(in, std::array{x.to(compute_dtype(dtype)), weight, bias},
                          [&](const std::array<Tensor, 3>& inputs) {
                            return composite_wide(inputs[0], settings.num_groups, inputs[1],
                                                  inputs[2], settings.eps, settings.act)
                                .to(dtype);
                          });
  if (found[0].defined()) found[0] = found[0].to(dtype);
  return found;
}

variable_list gradients(const Incoming& in, const Kept<4>& kept, const Settings& settings) {
  if (in.needs_composite()) return composite_backward(in, kept, settings);
  const auto& [x, statistics, weight, bias] = kept;
  const Backward::Wanted wanted{in.wants(0), in.wants(1), in.wants(2)};
  auto [grad_x, grad_weight, grad_bias] = call_below<Backward>(
      in[0], x, statistics, settings.num_groups, maybe(weight), maybe(bias), settings.act, wanted);
  return {grad_x, grad_weight, grad_bias};
}

struct Op {
  static constexpr const char* kSchema =
      "torchkiln::group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05, *, str act='none') -> Tensor";

  static Tensor meta(const Call& call) { return std::get<0>(outputs(call)); }
  static Tensor kernel(const Call& call) { return std::get<0>(run(call)); }
  static Tensor composite(const Call& call) {
    outputs(call);  // for its checks
    const at::ScalarType dtype = call.x->scalar_type();
    return composite_wide(call.x->to(compute_dtype(dtype)), call.num_groups,
                          tensor_or_undefined(call.weight), tensor_or_undefined(call.bias),
                          call.eps, call.act)
        .to(dtype);
  }
  static Tensor recorded(const Below& below, const Call& call) {
    auto [y, statistics] = below.call<Forward>(call);
    const Tensor weight = tensor_or_undefined(call.weight), bias = tensor_or_undefined(call.bias);
    const Settings settings{call.num_groups, call.eps, call.act};
    return record(
        "group_norm", {*call.x, weight, bias}, y, keep(*call.x, statistics, weight, bias),
        [=](const Incoming& in, const Kept<4>& kept) { return gradients(in, kept, settings); });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op>(m); }

}  // namespace torchkiln::group_norm_ops

namespace torchkiln {

at::Tensor group_norm(const at::Tensor& x, int64_t num_groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, std::string_view act) {
  return call<group_norm_ops::Op>(x, num_groups, weight, bias, eps, act);
}

}  // namespace torchkiln
