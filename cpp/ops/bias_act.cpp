#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <numeric>

#include "activations.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/bias_act.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"
#include "torchkiln/workspace.h"

namespace torchkiln::bias_act_ops {
namespace {

using at::Tensor;
using c10::string_view;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "bias_act";
constexpr const char* kForwardOp = "bias_act_forward";
constexpr const char* kBackwardOp = "bias_act_backward";

using Two = std::tuple<Tensor, Tensor>;
using Wanted = std::array<bool, 2>;
using Schema = Tensor(const Tensor&, const Tensor&, double, string_view);
using ForwardSchema = Two(const Tensor&, const Tensor&, double, string_view);
using BackwardSchema = Two(const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                           string_view, at::ScalarType, Wanted);

const auto& op() {
  static const auto found = find_op<Schema>("torchkiln::bias_act");
  return found;
}
const auto& forward_op() {
  static const auto found = find_op<ForwardSchema>("torchkiln::bias_act_forward");
  return found;
}
const auto& backward_op() {
  static const auto found = find_op<BackwardSchema>("torchkiln::bias_act_backward");
  return found;
}

void check_forward(const Tensor& x, const Tensor& bias) {
  check_tensor(kOp, "x", x);
  check_tensor(kOp, "bias", bias);
  check_same_device(kOp, "bias", bias, "x", x);
  check_dtype(kOp, "x", x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(bias.scalar_type() == dtype || (is_half(dtype) && bias.scalar_type() == at::kFloat),
              "torchkiln.", kOp, ": bias: got dtype ", dtype_name(bias.scalar_type()),
              ", expected ", dtype_name(dtype), ", the dtype of x",
              is_half(dtype) ? ", or float32" : "");
  TORCH_CHECK(x.dim() >= 1, "torchkiln.", kOp,
              ": x: got a 0-dimensional tensor, expected at least 1 dimension");
  TORCH_CHECK(bias.dim() == 1, "torchkiln.", kOp, ": bias: got ", bias.dim(), " dimensions (shape ",
              bias.sym_sizes(), "), expected 1");
  TORCH_CHECK(bias.sym_size(0) == x.sym_size(-1), "torchkiln.", kOp, ": bias: got shape ",
              bias.sym_sizes(), ", expected [", x.sym_size(-1), "], the last dimension of x");
}

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor output(const Tensor& x, const Tensor& bias, double, string_view act) {
  check_forward(x, bias);
  find_activation(kOp, act);
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// The output, and a bit per element of it where the activation's derivative needs no more.
Two outputs(const Tensor& x, const Tensor& bias, double scale, string_view act) {
  Tensor out = output(x, bias, scale, act);
  const bool signs = kept_by_bias_act(find_activation(kOp, act)) == Saved::sign;
  const c10::SymInt bytes = signs ? (x.sym_numel() + 7) / 8 : c10::SymInt(0);
  return {std::move(out), at::empty_symint({bytes}, x.options().dtype(at::kByte))};
}

void run(const Tensor& x, const Tensor& bias, double scale, string_view act, const Tensor& out,
         const Tensor& signs) {
  if (out.numel() == 0) return;
  std::array<Tensor, 2> inputs{x, bias};
  BiasAct arguments{};
  arguments.elements = describe(std::array<Tensor, 1>{out}, inputs);
  arguments.activation = find_activation(kOp, act);
  arguments.scale = scale;
  if (signs.defined() && signs.numel() > 0) arguments.signs = signs.data_ptr<uint8_t>();
  const int64_t numel = out.numel();
  // In units of 64 elements, so that no two threads write to one byte of the signs.
  constexpr int64_t kUnit = 64;
  launch(
      kOp, out, (numel + kUnit - 1) / kUnit, kElementwiseGrain / kUnit,
      [&](auto stream) { return cuda::bias_act(arguments, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::bias_act(arguments, begin * kUnit, std::min(end * kUnit, numel));
      });
}

Tensor real(const Tensor& x, const Tensor& bias, double scale, string_view act) {
  Tensor out = output(x, bias, scale, act);
  run(x, bias, scale, act, out, Tensor());
  return out;
}

Two forward_real(const Tensor& x, const Tensor& bias, double scale, string_view act) {
  auto [out, signs] = outputs(x, bias, scale, act);
  run(x, bias, scale, act, out, signs);
  return {out, signs};
}

/// The checked, empty gradients; on Meta and symbolic tensors, too. `saved` is x or the signs of
/// the output.
Two backward_outputs(const Tensor& grad, const Tensor& saved, const std::optional<Tensor>& bias,
                     double, string_view act, at::ScalarType bias_dtype, Wanted wanted) {
  check_tensor(kBackwardOp, "grad", grad);
  check_tensor(kBackwardOp, "saved", saved);
  check_same_device(kBackwardOp, "saved", saved, "grad", grad);
  check_dtype(kBackwardOp, "grad", grad);
  TORCH_CHECK(
      bias_dtype == grad.scalar_type() || (is_half(grad.scalar_type()) && bias_dtype == at::kFloat),
      "torchkiln.", kBackwardOp, ": bias_dtype: got ", dtype_name(bias_dtype), ", expected ",
      dtype_name(grad.scalar_type()), is_half(grad.scalar_type()) ? " or float32" : "");
  TORCH_CHECK(grad.dim() >= 1, "torchkiln.", kBackwardOp,
              ": grad: got a 0-dimensional tensor, expected at least 1 dimension");
  const Saved kind = kept_by_bias_act(find_activation(kBackwardOp, act));
  if (kind == Saved::sign) {
    TORCH_CHECK(saved.scalar_type() == at::kByte && saved.is_contiguous() &&
                    saved.sym_numel() == (grad.sym_numel() + 7) / 8,
                "torchkiln.", kBackwardOp, ": saved: got ", dtype_name(saved.scalar_type()), " ",
                saved.sym_sizes(), ", expected a bit for each element of grad, uint8 [",
                (grad.sym_numel() + 7) / 8, "]");
  } else if (kind == Saved::input) {
    TORCH_CHECK(
        saved.scalar_type() == grad.scalar_type() && saved.sym_sizes().equals(grad.sym_sizes()),
        "torchkiln.", kBackwardOp, ": saved: got ", dtype_name(saved.scalar_type()), " ",
        saved.sym_sizes(), ", expected ", dtype_name(grad.scalar_type()), " ", grad.sym_sizes(),
        ", as grad");
  }
  if (kind == Saved::input && bias) {
    TORCH_CHECK(bias->dim() == 1 && bias->scalar_type() == bias_dtype &&
                    bias->sym_size(0) == grad.sym_size(-1),
                "torchkiln.", kBackwardOp, ": bias: expected the ", dtype_name(bias_dtype), " [",
                grad.sym_size(-1), "] of the forward");
    check_same_device(kBackwardOp, "bias", *bias, "grad", grad);
  }
  const at::TensorOptions options = grad.options().memory_format(at::MemoryFormat::Contiguous);
  // An output of a schema must be a tensor: an unwanted gradient is an empty one.
  Tensor grad_x = wanted[0] ? at::empty_symint(grad.sym_sizes(), options) : at::empty({0}, options);
  Tensor grad_bias = wanted[1] ? at::empty_symint({grad.sym_size(-1)}, options.dtype(bias_dtype))
                               : at::empty({0}, options);
  return {std::move(grad_x), std::move(grad_bias)};
}

Two backward_real(const Tensor& grad, const Tensor& saved, const std::optional<Tensor>& bias,
                  double scale, string_view act, at::ScalarType bias_dtype, Wanted wanted) {
  auto [grad_x, grad_bias] = backward_outputs(grad, saved, bias, scale, act, bias_dtype, wanted);
  if (grad.numel() == 0) {
    grad_bias.zero_();
    return {grad_x, grad_bias};
  }
  if (!wanted[0] && !wanted[1]) return {grad_x, grad_bias};

  const int64_t columns = grad.size(-1);
  const int64_t rows = grad.numel() / columns;
  // Views wherever the rows are evenly spaced.
  const Tensor grad_rows = grad.reshape({rows, columns});
  BiasActBackward arguments{};
  arguments.activation = find_activation(kBackwardOp, act);
  const Saved kind = kept_by_bias_act(arguments.activation);
  Tensor saved_rows = saved;
  Tensor shift;  // without one, the kernels that sum its gradient add none, the others zeros
  if (kind == Saved::input) {
    if (bias) shift = *bias;
    if (!bias && !wanted[1]) shift = at::zeros({columns}, grad.options().dtype(bias_dtype));
    saved_rows = saved.reshape({rows, columns});
    arguments.saved_row_stride = saved_rows.stride(0);
    arguments.saved_column_stride = saved_rows.stride(1);
  }
  arguments.grad = grad_rows.const_data_ptr();
  arguments.saved = saved_rows.const_data_ptr();
  if (shift.defined()) {
    arguments.bias = shift.const_data_ptr();
    arguments.bias_stride = shift.stride(0);
  }
  arguments.grad_x = wanted[0] ? grad_x.data_ptr() : nullptr;
  arguments.grad_bias = wanted[1] ? grad_bias.data_ptr() : nullptr;
  arguments.dtype = dtype_of(grad);
  arguments.bias_dtype = bias_dtype == at::kFloat ? Dtype::float32 : arguments.dtype;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.grad_row_stride = grad_rows.stride(0);
  arguments.grad_column_stride = grad_rows.stride(1);
  arguments.scale = scale;

  Workspace workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = Workspace(grad.device(), bytes);
    arguments.workspace = workspace.data();
  };
  if (grad.is_cpu()) allocate(cpu::workspace_bytes(arguments));
  launch(
      kBackwardOp, grad, cpu::chunk_count(arguments), 1,
      [&](auto stream) {
        allocate(cuda::workspace_bytes(arguments));
        return cuda::bias_act_backward(arguments, stream);
      },
      [&](int64_t begin, int64_t end) { return cpu::bias_act_backward(arguments, begin, end); });
  if (grad.is_cpu() && wanted[1]) {
    at::parallel_for(0, columns, kElementwiseGrain / 64, [&](int64_t begin, int64_t end) {
      check_status(kBackwardOp, cpu::bias_act_backward_finish(arguments, begin, end));
    });
  }
  return {grad_x, grad_bias};
}

/// Bits as numbers, in the shape of `like`: 1 where the output was positive.
Tensor unpacked(const Tensor& signs, const Tensor& like) {
  const Tensor place = at::arange(8, signs.options());
  const Tensor bits = signs.unsqueeze(-1).bitwise_right_shift(place).bitwise_and(1);
  return bits.flatten().slice_symint(0, 0, like.sym_numel()).reshape_symint(like.sym_sizes());
}

/// The gradients in torch's own ops, which can be differentiated again.
Two differentiable_gradients(const Tensor& grad, const Tensor& saved, const Tensor& bias,
                             double scale, Activation activation, at::ScalarType bias_dtype,
                             Wanted wanted) {
  const at::ScalarType dtype = grad.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const Saved kind = kept_by_bias_act(activation);
  const Composite composite = composite_of(activation);
  Tensor from;
  if (kind == Saved::sign) from = unpacked(saved, grad).to(compute);
  if (kind == Saved::input) {
    from = saved.to(compute) * scale + bias.to(compute);
    if (saved_by(activation) == Saved::output) from = composite.value(from);
  }
  const Tensor passed = composite.gradient(grad.to(compute), from);
  Tensor grad_x, grad_bias;
  if (wanted[0]) grad_x = (passed * scale).to(dtype);
  if (wanted[1]) {
    std::vector<int64_t> leading(grad.dim() - 1);
    std::iota(leading.begin(), leading.end(), 0);
    grad_bias = (leading.empty() ? passed : at::sum(passed, leading)).to(bias_dtype);
  }
  return {grad_x, grad_bias};
}

struct BiasActFunction : torch::autograd::Function<BiasActFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& bias, double scale,
                        string_view act) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Activation activation = find_activation(kOp, act);
    const Saved kind = kept_by_bias_act(activation);
    Tensor out, signs;
    if (kind != Saved::input) {
      std::tie(out, signs) = forward_op().call(x, bias, scale, act);
    } else {
      out = op().call(x, bias, scale, act);
    }
    context->saved_data["scale"] = scale;
    context->saved_data["activation"] = static_cast<int64_t>(activation);
    context->saved_data["bias_dtype"] = static_cast<int64_t>(bias.scalar_type());
    if (kind == Saved::input) {
      context->save_for_backward({x, bias});
    } else {
      context->save_for_backward({signs});
    }
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const double scale = context->saved_data["scale"].toDouble();
    const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    const auto bias_dtype = static_cast<at::ScalarType>(context->saved_data["bias_dtype"].toInt());
    const Wanted wanted{context->needs_input_grad(0), context->needs_input_grad(1)};
    const Tensor bias = saved.size() > 1 ? saved[1] : Tensor();
    auto [grad_x, grad_bias] =
        at::GradMode::is_enabled()
            ? differentiable_gradients(grads[0], saved[0], bias, scale, activation, bias_dtype,
                                       wanted)
            : backward_op().call(
                  grads[0], saved[0],
                  bias.defined() ? std::optional<Tensor>(bias) : std::optional<Tensor>(), scale,
                  name_of(activation), bias_dtype, wanted);
    return {wanted[0] ? grad_x : Tensor(), wanted[1] ? grad_bias : Tensor(), Tensor(), Tensor()};
  }
};

/// The op in torch's own ops, in its own precision: for transforms that have no kernel here.
Tensor decomposed(const Tensor& x, const Tensor& bias, double scale, string_view act) {
  check_forward(x, bias);
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  const Composite composite = composite_of(find_activation(kOp, act));
  return composite.value(x.to(compute) * scale + bias.to(compute)).to(x.scalar_type());
}

Tensor autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& bias, double scale,
                string_view act) {
  if (is_transformed(x, bias)) return decomposed(x, bias, scale, act);
  if (needs_gradient(x, bias)) return BiasActFunction::apply(x, bias, scale, act);
  const at::AutoDispatchBelowADInplaceOrView below;
  return op().redispatch(keys & c10::after_autograd_keyset, x, bias, scale, act);
}

/// x goes to the autocast dtype, as for a linear layer, whose tail this op is; the bias is read as
/// it is.
Tensor autocast(const Tensor& x, const Tensor& bias, double scale, string_view act) {
  check_tensor(kOp, "x", x);
  check_tensor(kOp, "bias", bias);
  check_same_device(kOp, "bias", bias, "x", x);
  // Of every device: the call must not come back here.
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  const at::DeviceType device = x.device().type();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const Tensor cast_x = at::autocast::cached_cast(dtype, x, device);
  return bias_act(
      cast_x,
      bias.scalar_type() == at::kFloat ? bias : at::autocast::cached_cast(dtype, bias, device),
      scale, act);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("bias_act(Tensor x, Tensor bias, float scale=1.0, str act='relu') -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("bias_act_forward(Tensor x, Tensor bias, float scale, str act) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "bias_act_backward(Tensor grad, Tensor saved, Tensor? bias, float scale, str act, "
      "ScalarType bias_dtype, bool[2] wanted) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl("bias_act", TORCH_FN(real));
  m.impl(kForwardOp, TORCH_FN(forward_real));
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl("bias_act", TORCH_FN(output));
  m.impl(kForwardOp, TORCH_FN(outputs));
  m.impl(kBackwardOp, TORCH_FN(backward_outputs));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl("bias_act", TORCH_FN(autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl("bias_act", TORCH_FN(decomposed)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) { m.impl("bias_act", TORCH_FN(autocast)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl("bias_act", TORCH_FN(autocast)); }

}  // namespace torchkiln::bias_act_ops

namespace torchkiln {

at::Tensor bias_act(const at::Tensor& x, const at::Tensor& bias, double scale,
                    c10::string_view act) {
  return bias_act_ops::op().call(x, bias, scale, act);
}

}  // namespace torchkiln
