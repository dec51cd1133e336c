#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "linear.h"
#include "matmul.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/ops.h"

namespace torchkiln::linear_autograd_ops {
namespace {

using at::Tensor;
using c10::string_view;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Two = std::tuple<Tensor, Tensor>;
using BiasActBackwardSchema = Two(const Tensor&, const Tensor&, const MaybeTensor&, double,
                                  string_view, at::ScalarType, std::array<bool, 2>);
using ActivationBackwardSchema = Tensor(const Tensor&, const Tensor&, string_view);

const auto& op() {
  static const auto found = find_op<LinearSchema>("torchkiln::linear");
  return found;
}
const auto& forward_op() {
  static const auto found = find_op<LinearForwardSchema>("torchkiln::linear_forward");
  return found;
}
const auto& bias_act_backward_op() {
  static const auto found = find_op<BiasActBackwardSchema>("torchkiln::bias_act_backward");
  return found;
}
const auto& activation_backward_op() {
  static const auto found = find_op<ActivationBackwardSchema>("torchkiln::activation_backward");
  return found;
}

/// What backward gets from autograd; what is not there is not defined.
struct Incoming {
  Tensor grad;
  Tensor x;
  Tensor weight;
  Tensor bias;
  Tensor kept;
  Activation activation{};
  double scale = 1;
  at::ScalarType bias_dtype{};
  bool wants_bias = false;
};

/// Gradients of the preactivation and, where the same pass gives it, of the bias.
struct Passed {
  Tensor preactivation;
  Tensor bias;
};

Passed pass_activation(const Incoming& in) {
  if (in.activation == kActivation<None>) return {in.grad, Tensor()};
  const char* act = name_of(in.activation);
  const Saved saved = saved_by(in.activation);
  if (at::GradMode::is_enabled()) {
    // In torch's own ops, which can be differentiated again.
    const at::ScalarType compute = compute_dtype(in.grad.scalar_type());
    const Composite composite = composite_of(in.activation);
    Tensor from = in.kept.to(compute);
    if (saved != Saved::sign) {
      const MaybeTensor bias = in.bias.defined() ? MaybeTensor(in.bias) : std::nullopt;
      from = linear(in.x, in.weight, bias, "none", in.scale).to(compute);
      if (saved == Saved::output) from = composite.value(from);
    }
    return {composite.gradient(in.grad.to(compute), from).to(in.grad.scalar_type()), Tensor()};
  }
  if (saved == Saved::sign) return {activation_backward_op().call(in.grad, in.kept, act), Tensor()};
  // What was kept has the bias in it.
  auto [passed, grad_bias] = bias_act_backward_op().call(in.grad, in.kept, std::nullopt, 1.0, act,
                                                         in.bias_dtype, {true, in.wants_bias});
  return {std::move(passed), in.wants_bias ? grad_bias : Tensor()};
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const MaybeTensor& bias, string_view act, double scale,
                        const MaybeTensor& residual) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Activation activation = find_activation(kLinear, act);
    const Kept kept = kept_by_linear(activation, residual.has_value());
    Tensor out, preactivation;
    if (kept == Kept::preactivation) {
      std::tie(out, preactivation) = forward_op().call(x, weight, bias, act, scale, residual);
    } else {
      out = op().call(x, weight, bias, act, scale, residual);
    }
    auto& data = context->saved_data;
    data["activation"] = static_cast<int64_t>(activation);
    data["scale"] = scale;
    data["residual"] = residual.has_value();
    if (bias) data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());
    context->save_for_backward(
        {x, weight, bias ? *bias : Tensor(), kept == Kept::output ? out : preactivation});
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const bool has_bias = data.count("bias_dtype") > 0;
    Incoming in;
    in.grad = grads[0];
    in.x = saved[0];
    in.weight = saved[1];
    in.bias = saved[2];
    in.kept = saved[3];
    in.activation = static_cast<Activation>(data["activation"].toInt());
    in.scale = data["scale"].toDouble();
    in.bias_dtype =
        has_bias ? static_cast<at::ScalarType>(data["bias_dtype"].toInt()) : in.grad.scalar_type();
    // Autograd numbers the tensors that there are.
    size_t input = 0;
    const auto next_is_wanted = [&](bool is_there) {
      return is_there && context->needs_input_grad(input++);
    };
    const bool wants_x = next_is_wanted(true);
    const bool wants_weight = next_is_wanted(true);
    in.wants_bias = next_is_wanted(has_bias);
    const bool wants_residual = next_is_wanted(data["residual"].toBool());

    Tensor grad_x, grad_weight, grad_bias;
    if (wants_x || wants_weight || in.wants_bias) {
      const auto [passed, passed_bias] = pass_activation(in);
      grad_bias = passed_bias;
      const Tensor rows = as_matrix(passed);
      if (wants_x) grad_x = linear(passed, in.weight.t(), std::nullopt, "none", in.scale);
      if (wants_weight) {
        grad_weight = linear(rows.t(), as_matrix(in.x).t(), std::nullopt, "none", in.scale);
      }
      if (in.wants_bias && !grad_bias.defined()) {
        constexpr int64_t kOverRows[] = {0};
        grad_bias = torchkiln::sum(rows, at::IntArrayRef(kOverRows), false, in.bias_dtype);
      }
    }
    return {grad_x,   grad_weight, grad_bias,
            Tensor(), Tensor(),    wants_residual ? in.grad : Tensor()};
  }
};

/// The op in torch's own, of a product in this precision.
Tensor composed(at::ScalarType product, const Tensor& x, const Tensor& weight,
                const MaybeTensor& bias, string_view act, double scale,
                const MaybeTensor& residual) {
  linear_sizes(x, weight, bias, act, residual);
  const at::ScalarType dtype = x.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const bool is_plain = scale == 1 && bias && bias->scalar_type() == product;
  const MaybeTensor shift = is_plain ? bias : std::nullopt;
  Tensor z = at::linear(x.to(product), weight.to(product), shift).to(compute);
  if (scale != 1) z = z * scale;
  if (bias && !is_plain) z = z + bias->to(compute);
  z = composite_of(find_activation(kLinear, act)).value(z);
  if (residual) z = z + residual->to(compute);
  return z.to(dtype);
}

/// For transforms that have no kernel here.
Tensor decomposed(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
                  double scale, const MaybeTensor& residual) {
  return composed(x.scalar_type(), x, weight, bias, act, scale, residual);
}

/// vmap adds a bias behind the rounded product; without the rounding the result is as good.
Tensor batched(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
               double scale, const MaybeTensor& residual) {
  return composed(compute_dtype(x.scalar_type()), x, weight, bias, act, scale, residual);
}

Tensor autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& weight,
                const MaybeTensor& bias, string_view act, double scale,
                const MaybeTensor& residual) {
  const Tensor& shift = bias ? *bias : x;
  const Tensor& more = residual ? *residual : x;
  if (is_transformed(x, weight, shift, more))
    return decomposed(x, weight, bias, act, scale, residual);
  if (needs_gradient(x, weight, shift, more))
    return LinearFunction::apply(x, weight, bias, act, scale, residual);
  const at::AutoDispatchBelowADInplaceOrView below;
  return op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, act, scale, residual);
}

/// As torch's: x, the weight and the residual go to the autocast dtype; a float32 bias is read as
/// it is.
Tensor autocast(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
                double scale, const MaybeTensor& residual) {
  check_tensor(kLinear, "x", x);
  check_tensor(kLinear, "weight", weight);
  check_same_device(kLinear, "weight", weight, "x", x);
  // Of every device: the call must not come back here.
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  const at::DeviceType device = x.device().type();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  MaybeTensor shift = bias;
  if (bias && bias->scalar_type() != at::kFloat) shift = cast(*bias);
  return linear(cast(x), cast(weight), shift, act, scale,
                residual ? MaybeTensor(cast(*residual)) : std::nullopt);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl(kLinear, TORCH_FN(autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl(kLinear, TORCH_FN(batched)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) { m.impl(kLinear, TORCH_FN(autocast)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl(kLinear, TORCH_FN(autocast)); }

}  // namespace torchkiln::linear_autograd_ops

namespace torchkiln {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias,
                  c10::string_view act, double scale, const MaybeTensor& residual) {
  return linear_autograd_ops::op().call(x, weight, bias, act, scale, residual);
}

}  // namespace torchkiln
