#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "activations.h"
#include "autograd.h"
#include "matmul.h"
#include "torchkiln/checks.h"
#include "torchkiln/ops.h"

namespace torchkiln {
namespace {

using at::Tensor;
using c10::string_view;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear";
constexpr const char* kForwardOp = "linear_forward";

using MaybeTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Schema = Tensor(const Tensor&, const Tensor&, const MaybeTensor&, string_view, double,
                      const MaybeTensor&);
using ForwardSchema = Two(const Tensor&, const Tensor&, const MaybeTensor&, string_view, double,
                          const MaybeTensor&);
using BiasActBackwardSchema = Two(const Tensor&, const Tensor&, const MaybeTensor&, double,
                                  string_view, at::ScalarType, std::array<bool, 2>);
using ActivationBackwardSchema = Tensor(const Tensor&, const Tensor&, string_view);

template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

const auto& op() {
  static const auto found = find_op<Schema>("torchkiln::linear");
  return found;
}
const auto& forward_op() {
  static const auto found = find_op<ForwardSchema>("torchkiln::linear_forward");
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

/// What backward keeps for the derivative: the output serves where its sign is enough, unless a
/// residual was added to it.
enum class Kept { nothing, output, preactivation };

Kept kept_by_linear(Activation activation, bool has_residual) {
  switch (saved_by(activation)) {
    case Saved::nothing:
      return Kept::nothing;
    case Saved::sign:
      return has_residual ? Kept::preactivation : Kept::output;
    default:
      return Kept::preactivation;
  }
}

void check_like_x(const char* name, const Tensor& tensor, const Tensor& x) {
  check_tensor(kOp, name, tensor);
  check_same_device(kOp, name, tensor, "x", x);
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type(), "torchkiln.", kOp, ": ", name,
              ": got dtype ", dtype_name(tensor.scalar_type()), ", expected ",
              dtype_name(x.scalar_type()), ", the dtype of x");
}

void check_bias(const Tensor& bias, const Tensor& x, const Tensor& weight) {
  check_tensor(kOp, "bias", bias);
  check_same_device(kOp, "bias", bias, "x", x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(bias.scalar_type() == dtype || (is_half(dtype) && bias.scalar_type() == at::kFloat),
              "torchkiln.", kOp, ": bias: got dtype ", dtype_name(bias.scalar_type()),
              ", expected ", dtype_name(dtype), ", the dtype of x",
              is_half(dtype) ? ", or float32" : "");
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), "torchkiln.", kOp,
              ": bias: got shape ", bias.sym_sizes(), ", expected [", weight.sym_size(0),
              "], the first size of weight");
}

/// The sizes of the output, of checked arguments; on Meta and symbolic tensors, too.
c10::SymDimVector checked(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                          string_view act, const MaybeTensor& residual) {
  check_tensor(kOp, "x", x);
  check_dtype(kOp, "x", x);
  check_like_x("weight", weight, x);
  TORCH_CHECK(x.dim() >= 1, "torchkiln.", kOp,
              ": x: got a 0-dimensional tensor, expected at least 1 dimension");
  TORCH_CHECK(weight.dim() == 2, "torchkiln.", kOp, ": weight: got ", weight.dim(),
              " dimensions (shape ", weight.sym_sizes(), "), expected 2");
  TORCH_CHECK(weight.sym_size(1) == x.sym_size(-1), "torchkiln.", kOp, ": weight: got shape ",
              weight.sym_sizes(), ", expected ", x.sym_size(-1),
              " as the second size, the last size of x");
  if (bias) check_bias(*bias, x, weight);
  find_activation(kOp, act);
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = weight.sym_size(0);
  if (residual) {
    check_like_x("residual", *residual, x);
    TORCH_CHECK(residual->sym_sizes().equals(sizes), "torchkiln.", kOp, ": residual: got shape ",
                residual->sym_sizes(), ", expected ", c10::SymIntArrayRef(sizes),
                ", the shape of the output");
  }
  return sizes;
}

Tensor output(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
              double, const MaybeTensor& residual) {
  const c10::SymDimVector sizes = checked(x, weight, bias, act, residual);
  return at::empty_symint(sizes, x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// The output and the preactivation, which has no elements where backward needs none.
Two outputs(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
            double scale, const MaybeTensor& residual) {
  Tensor out = output(x, weight, bias, act, scale, residual);
  const Kept kept = kept_by_linear(find_activation(kOp, act), residual.has_value());
  Tensor preactivation =
      kept == Kept::preactivation ? at::empty_like(out) : at::empty({0}, out.options());
  return {std::move(out), std::move(preactivation)};
}

/// x weight^T * scale + bias by torch's product, into `to`; all are matrices.
void run_preactivation(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, double scale,
                       Tensor to) {
  const Tensor columns = weight.t();
  if (bias && bias->scalar_type() == to.scalar_type()) {
    at::addmm_out(to, *bias, x, columns, 1, scale);
    return;
  }
  to.addmm_(x, columns, /*beta=*/0, /*alpha=*/scale);
  if (bias) to.copy_(bias_act(to, *bias, 1.0, "none"));
}

/// The same and what follows, from torch's product; `out` and `preactivation` are memory for it.
/// cuBLASLt fuses relu with a bias.
Tensor run_library(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                   Activation activation, double scale, const MaybeTensor& residual, Tensor out,
                   const Tensor& preactivation) {
  const bool is_kept = preactivation.defined();
  Tensor rows = as_matrix(out);
  // Of no terms ATen gives the bias alone.
  if (out.is_cuda() && activation == kActivation<Relu> && scale == 1 && !is_kept && bias &&
      bias->scalar_type() == out.scalar_type() && x.sym_size(-1) > 0) {
    at::_addmm_activation_out(rows, *bias, x, weight.t());
  } else if (activation == kActivation<None>) {
    run_preactivation(x, weight, bias, scale, rows);
  } else {
    const Tensor& from = is_kept ? preactivation : out;
    run_preactivation(x, weight, bias, scale, as_matrix(from));
    out = torchkiln::activation(from, name_of(activation));
  }
  if (residual) out.add_(*residual);
  return out;
}

/// The output, in the memory of `out` or another; the preactivation where it is defined.
Tensor run(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
           double scale, const MaybeTensor& residual, const Tensor& out,
           const Tensor& preactivation) {
  if (out.numel() == 0) return out;
  const Tensor rows = as_matrix(x);
  const MaybeTensor shift = bias ? MaybeTensor(bias->contiguous()) : std::nullopt;
  const MaybeTensor more = residual ? MaybeTensor(residual->contiguous()) : std::nullopt;
  Matmul arguments = describe_linear(rows, weight, out);
  if (shift) {
    arguments.bias = shift->const_data_ptr();
    arguments.bias_dtype = dtype_of(*shift);
  }
  if (more) arguments.residual = more->const_data_ptr();
  if (preactivation.defined()) arguments.preactivation = preactivation.data_ptr();
  arguments.activation = find_activation(kOp, act);
  arguments.scale = scale;
  if (run_own_kernel(kOp, arguments, out)) return out;
  return run_library(rows, weight, shift, arguments.activation, scale, more, out, preactivation);
}

Tensor real(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
            double scale, const MaybeTensor& residual) {
  const Tensor out = output(x, weight, bias, act, scale, residual);
  return run(x, weight, bias, act, scale, residual, out, Tensor());
}

Two forward_real(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
                 double scale, const MaybeTensor& residual) {
  auto [out, preactivation] = outputs(x, weight, bias, act, scale, residual);
  const Kept kept = kept_by_linear(find_activation(kOp, act), residual.has_value());
  out = run(x, weight, bias, act, scale, residual, out,
            kept == Kept::preactivation ? preactivation : Tensor());
  return {std::move(out), std::move(preactivation)};
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
  const Tensor zeros =
      at::zeros_symint({in.grad.sym_size(-1)}, in.grad.options().dtype(in.bias_dtype));
  auto [passed, grad_bias] = bias_act_backward_op().call(in.grad, in.kept, zeros, 1.0, act,
                                                         in.bias_dtype, {true, in.wants_bias});
  return {std::move(passed), in.wants_bias ? grad_bias : Tensor()};
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const MaybeTensor& bias, string_view act, double scale,
                        const MaybeTensor& residual) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Activation activation = find_activation(kOp, act);
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
  checked(x, weight, bias, act, residual);
  const at::ScalarType dtype = x.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const bool is_plain = scale == 1 && bias && bias->scalar_type() == product;
  const MaybeTensor shift = is_plain ? bias : std::nullopt;
  Tensor z = at::linear(x.to(product), weight.to(product), shift).to(compute);
  if (scale != 1) z = z * scale;
  if (bias && !is_plain) z = z + bias->to(compute);
  z = composite_of(find_activation(kOp, act)).value(z);
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
  check_tensor(kOp, "x", x);
  check_tensor(kOp, "weight", weight);
  check_same_device(kOp, "weight", weight, "x", x);
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

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
              double scale, const MaybeTensor& residual) {
  return op().call(x, weight, bias, act, scale, residual);
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, str act='none', float scale=1.0, "
      "Tensor? residual=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_forward(Tensor x, Tensor weight, Tensor? bias, str act, float scale, "
      "Tensor? residual) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl(kOp, TORCH_FN(real));
  m.impl(kForwardOp, TORCH_FN(forward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl(kOp, TORCH_FN(output));
  m.impl(kForwardOp, TORCH_FN(outputs));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl(kOp, TORCH_FN(autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl(kOp, TORCH_FN(batched)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) { m.impl(kOp, TORCH_FN(autocast)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl(kOp, TORCH_FN(autocast)); }

}  // namespace torchkiln
