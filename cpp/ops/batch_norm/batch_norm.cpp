// The op bn_act and its derivatives: batch norm, a residual and an activation in one pass over x.
// Forward saves the statistics of the channels and, for relu, one bit per element; backward reads x
// once more. batch_norm.h lists the other files.

#include "batch_norm/operands.h"
#include "detail/memory_order.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::batch_norm_ops {
namespace {

/// All dimensions except the channels.
std::vector<int64_t> other_dims(const Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

/// A vector over the channels in the compute dtype, reshaped to broadcast with x.
Tensor beside(const Tensor& vector, const Tensor& x) {
  c10::SymDimVector shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = vector.sym_size(0);
  return vector.to(compute_dtype(x.scalar_type())).reshape_symint(shape);
}

/// Mean and biased variance of each channel.
struct Moments {
  Tensor mean;
  Tensor variance;
};

Moments moments_of(const Tensor& wide) {
  const std::vector<int64_t> dims = other_dims(wide);
  const Tensor mean = wide.mean(dims, /*keepdim=*/true);
  const Tensor from = wide - mean;
  return {mean, (from * from).mean(dims, /*keepdim=*/true)};
}

/// n * weight + bias with torch's own ops, for n = (wide - mean) * rstd. `wide` is x in the compute
/// type, converted only once, because each conversion would round the gradient.
Tensor composite_affine(const Tensor& wide, const Tensor& mean, const Tensor& rstd,
                        const Tensor& weight, const Tensor& bias) {
  Tensor z = (wide - mean) * rstd;
  if (weight.defined()) z = z * beside(weight, wide);
  if (bias.defined()) z = z + beside(bias, wide);
  return z;
}

/// Moves a running statistic in place, without incrementing its version. Copies the new value,
/// because in-place arithmetic would not convert the dtype.
void composite_update(const MaybeTensor& running, const Tensor& value, double momentum) {
  if (!running) return;
  const at::NoGradGuard no_grad;
  const Tensor flat = value.detach().flatten();
  const Tensor moved = running->to(flat.scalar_type()) * (1 - momentum) + flat * momentum;
  const at::AutoDispatchBelowADInplaceOrView below;
  running->copy_(moved);
  count_change(running);
}

}  // namespace

Tensor composite_of(const Call& call) {
  outputs(call, /*for_backward=*/false);  // for its checks
  const Tensor& x = call.x;
  const Tensor wide = x.to(compute_dtype(x.scalar_type()));
  Moments moments;
  if (call.training) {
    moments = moments_of(wide);
    const c10::SymInt count = x.sym_numel() / x.sym_size(1);
    composite_update(call.running_mean, moments.mean, call.momentum);
    composite_update(call.running_var, moments.variance * count / (count - 1), call.momentum);
  } else {
    moments = {beside(*call.running_mean, x), beside(*call.running_var, x)};
  }
  Tensor z = composite_affine(wide, moments.mean, (moments.variance + call.eps).rsqrt(),
                              tensor_or_undefined(call.weight), tensor_or_undefined(call.bias));
  if (call.residual) z = z + call.residual->to(z.scalar_type());
  return composite_activation(call.act, z).to(x.scalar_type());
}

namespace {

/// Settings of a call that backward needs besides the saved tensors.
struct Settings {
  Activation act;
  bool training;
  double eps;
  bool has_residual;
  bool channels_last;  // channels_are_last() of x
};

/// The gradients with torch's own ops. `kept` has x, the statistics, weight, bias, the residual and
/// the signs.
variable_list composite_backward(const Incoming& in, const Kept<6>& kept,
                                 const Settings& settings) {
  const auto& [x, statistics, weight, bias, residual, signs] = kept;
  Tensor added = residual, positive;
  if (settings.has_residual && !residual.defined()) {
    // The values of the residual affect no gradient, and its own second derivatives are 0, so zeros
    // replace it.
    added = at::zeros_like(x);
    stand_in_for(in, 3, added);
  }
  const at::ScalarType dtype = x.scalar_type();
  if (signs.defined() && settings.channels_last) {
    positive = unpack_signs(signs, with_channels_last(x), compute_dtype(dtype)).movedim(-1, 1);
  } else if (signs.defined()) {
    positive = unpack_signs(signs, x, compute_dtype(dtype));
  }
  variable_list found = composite_gradients(
      in, std::array{x.to(compute_dtype(dtype)), weight, bias, added},
      [&](const std::array<Tensor, 4>& inputs) {
        const Tensor& wide = inputs[0];
        Tensor mean, rstd;
        if (settings.training) {
          const Moments moments = moments_of(wide);
          mean = moments.mean;
          rstd = (moments.variance + settings.eps).rsqrt();
        } else {
          const Tensor& all = kept[1];  // with OpenMP, clang cannot capture structured bindings
          mean = beside(all[0] + all[1], wide);
          rstd = beside(all[2], wide);
        }
        Tensor z = composite_affine(wide, mean, rstd, inputs[1], inputs[2]);
        if (inputs[3].defined()) z = z + inputs[3].to(z.scalar_type());
        return (positive.defined() ? z * positive : composite_activation(settings.act, z))
            .to(dtype);
      });
  if (found[0].defined()) found[0] = found[0].to(dtype);
  return found;
}

variable_list gradients(const Incoming& in, const Kept<6>& kept, const Settings& settings) {
  const auto& [x, statistics, weight, bias, residual, signs] = kept;
  // Without an activation the gradient of the residual is the incoming gradient.
  const bool passes = settings.act == kActivation<None>;
  const Backward::Wanted wanted{in.wants(0), in.wants(1), in.wants(2), in.wants(3) && !passes};
  const MaybeCopy pixels = in_order_of_signs(x, signs, settings.channels_last);
  auto [grad_x, grad_weight, grad_bias, grad_residual] = call_below<Backward>(
      in[0], *pixels, statistics, maybe(weight), maybe(bias), maybe(residual), maybe(signs),
      settings.act, settings.training, wanted, maybe(in.second()));
  return {grad_x, grad_weight, grad_bias, passes ? in[0] : grad_residual};
}

}  // namespace

Tensor recorded_outputs(const Three& outputs, const Call& call) {
  const auto& [y, statistics, signs] = outputs;
  const Tensor weight = tensor_or_undefined(call.weight), bias = tensor_or_undefined(call.bias);
  const Tensor residual = tensor_or_undefined(call.residual);
  const Saved kept = kept_by_batch_norm(call.act, call.residual.has_value());
  const Settings settings{call.act, call.training, call.eps, call.residual.has_value(),
                          channels_are_last(call.x)};
  Tensor recorded =
      record("bn_act", {*call.x, weight, bias, residual}, y,
             keep(*call.x, statistics, weight, bias, kept == Saved::input ? residual : Tensor(),
                  kept == Saved::sign ? signs : Tensor()),
             [=](const Incoming& in, const Kept<6>& kept) {
               if (in.needs_composite()) return composite_backward(in, kept, settings);
               return gradients(in, kept, settings);
             });
  // The kernel of backward writes the gradient of the residual, which is the incoming gradient
  // where the sign is set. Therefore it can add a second incoming gradient.
  if (kept == Saved::sign && residual.requires_grad()) accept_second_gradient(recorded);
  return recorded;
}

namespace {

/// The functions that both ops share. `WithStatistics`: the forward op that they call if backward
/// follows.
template <class WithStatistics>
struct BatchNormOp {
  using Arguments = typename WithStatistics::Arguments;

  static Tensor meta(const Arguments& call) {
    return std::get<0>(outputs(call, /*for_backward=*/false));
  }
  static Tensor kernel(const Arguments& call) {
    return std::get<0>(run(call, /*for_backward=*/false));
  }
  static Tensor composite(const Arguments& call) { return composite_of(call); }
  static Tensor recorded(const Below& below, const Arguments& call) {
    return recorded_outputs(below.call<WithStatistics>(call), call);
  }
};

/// The op that does not update the running statistics. Its graph has no mutation, as AOTInductor
/// requires.
struct Op : BatchNormOp<Forward> {
  static constexpr const char* kSchema =
      "torchkiln::bn_act(Tensor x, Tensor? weight=None, Tensor? bias=None, "
      "Tensor? running_mean=None, Tensor? running_var=None, Tensor? residual=None, *, "
      "str act='relu', bool training=False, float momentum=0.1, float eps=1e-05) -> Tensor";
};

/// The op that updates the running statistics in training.
struct Update : BatchNormOp<UpdateForward> {
  static constexpr const char* kName = "bn_act";
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_update(Tensor x, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual=None, *, "
      "str act='relu', bool training=True, float momentum=0.1, float eps=1e-05) -> Tensor";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, UpdateForward, Backward, Op, Update>(m); }

}  // namespace torchkiln::batch_norm_ops

namespace torchkiln {

at::Tensor bn_act(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                  const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& running_mean,
                  const std::optional<at::Tensor>& running_var, const BatchNormOptions& options) {
  const auto run = [&](auto op) {
    return call<typename decltype(op)::type>(x, weight, bias, running_mean, running_var, options);
  };
  return options.training && running_mean.has_value() ? run(TypeTag<batch_norm_ops::Update>{})
                                                      : run(TypeTag<batch_norm_ops::Op>{});
}

}  // namespace torchkiln
