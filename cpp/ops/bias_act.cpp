#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <numeric>

#include "autograd.h"
#include "elementwise.h"
#include "torchkiln/checks.h"
#include "torchkiln/kernels/bias_act.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln {
namespace {

using at::Tensor;

constexpr const char* kOp = "scale_bias_relu";
constexpr const char* kBackwardOp = "scale_bias_relu_backward";

const auto& forward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchkiln::scale_bias_relu", "")
                             .typed<Tensor(const Tensor&, const Tensor&, double)>();
  return op;
}

const auto& backward_op() {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchkiln::scale_bias_relu_backward", "")
          .typed<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, at::ScalarType,
                                            std::array<bool, 2>)>();
  return op;
}

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

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
Tensor forward_output(const Tensor& x, const Tensor& bias, double) {
  check_forward(x, bias);
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

Tensor forward_real(const Tensor& x, const Tensor& bias, double scale) {
  Tensor out = forward_output(x, bias, scale);
  if (out.numel() == 0) return out;
  std::array<Tensor, 2> inputs{x, bias};
  const Elementwise<2> arguments = describe<2>(out, inputs);
  launch(
      kOp, out, out.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::scale_bias_relu(arguments, scale, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::scale_bias_relu(arguments, scale, begin, end);
      });
  return out;
}

/// The checked, empty gradients; on Meta and symbolic tensors, too.
std::tuple<Tensor, Tensor> backward_outputs(const Tensor& grad, const Tensor& output, double,
                                            at::ScalarType bias_dtype, std::array<bool, 2> wanted) {
  check_tensor(kBackwardOp, "grad", grad);
  check_tensor(kBackwardOp, "output", output);
  check_same_device(kBackwardOp, "output", output, "grad", grad);
  check_dtype(kBackwardOp, "grad", grad);
  TORCH_CHECK(output.scalar_type() == grad.scalar_type(), "torchkiln.", kBackwardOp,
              ": output: got dtype ", dtype_name(output.scalar_type()), ", expected ",
              dtype_name(grad.scalar_type()), ", the dtype of grad");
  TORCH_CHECK(
      bias_dtype == grad.scalar_type() || (is_half(grad.scalar_type()) && bias_dtype == at::kFloat),
      "torchkiln.", kBackwardOp, ": bias_dtype: got ", dtype_name(bias_dtype), ", expected ",
      dtype_name(grad.scalar_type()), is_half(grad.scalar_type()) ? " or float32" : "");
  TORCH_CHECK(grad.dim() >= 1 && grad.sym_sizes().equals(output.sym_sizes()), "torchkiln.",
              kBackwardOp, ": output: got shape ", output.sym_sizes(), ", expected ",
              grad.sym_sizes(), ", the shape of grad");
  const at::TensorOptions options = grad.options().memory_format(at::MemoryFormat::Contiguous);
  // An output of a schema must be a tensor: an unwanted gradient is an empty one.
  Tensor grad_x = wanted[0] ? at::empty_symint(grad.sym_sizes(), options) : at::empty({0}, options);
  Tensor grad_bias = wanted[1] ? at::empty_symint({grad.sym_size(-1)}, options.dtype(bias_dtype))
                               : at::empty({0}, options);
  return {std::move(grad_x), std::move(grad_bias)};
}

std::tuple<Tensor, Tensor> backward_real(const Tensor& grad, const Tensor& output, double scale,
                                         at::ScalarType bias_dtype, std::array<bool, 2> wanted) {
  auto [grad_x, grad_bias] = backward_outputs(grad, output, scale, bias_dtype, wanted);
  if (grad.numel() == 0) {
    grad_bias.zero_();
    return {grad_x, grad_bias};
  }
  if (!wanted[0] && !wanted[1]) return {grad_x, grad_bias};

  const int64_t columns = grad.size(-1);
  const int64_t rows = grad.numel() / columns;
  const Tensor grad_rows =
      grad.reshape({rows, columns});  // a view wherever the rows are evenly spaced
  const Tensor dense_output = output.contiguous();
  ScaleBiasReluBackward arguments{};
  arguments.grad = grad_rows.const_data_ptr();
  arguments.output = dense_output.const_data_ptr();
  arguments.grad_x = wanted[0] ? grad_x.data_ptr() : nullptr;
  arguments.grad_bias = wanted[1] ? grad_bias.data_ptr() : nullptr;
  arguments.dtype = dtype_of(grad);
  arguments.bias_dtype = dtype_of(grad_bias);
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.grad_row_stride = grad_rows.stride(0);
  arguments.grad_column_stride = grad_rows.stride(1);
  arguments.scale = scale;

  Tensor workspace;
  const auto allocate = [&](size_t bytes) {
    if (bytes == 0) return;
    workspace = at::empty({static_cast<int64_t>(bytes)}, grad.options().dtype(at::kByte));
    arguments.workspace = workspace.data_ptr();
  };
  if (grad.is_cpu()) allocate(cpu::workspace_bytes(arguments));
  launch(
      kBackwardOp, grad, cpu::chunk_count(arguments), 1,
      [&](auto stream) {
        allocate(cuda::workspace_bytes(arguments));
        return cuda::scale_bias_relu_backward(arguments, stream);
      },
      [&](int64_t begin, int64_t end) {
        return cpu::scale_bias_relu_backward(arguments, begin, end);
      });
  if (grad.is_cpu() && wanted[1]) {
    at::parallel_for(0, columns, kElementwiseGrain / 64, [&](int64_t begin, int64_t end) {
      check_status(kBackwardOp, cpu::scale_bias_relu_backward_finish(arguments, begin, end));
    });
  }
  return {grad_x, grad_bias};
}

/// The gradients in torch's own ops, which can be differentiated again.
torch::autograd::variable_list differentiable_gradients(const Tensor& grad, const Tensor& output,
                                                        double scale, at::ScalarType bias_dtype,
                                                        std::array<bool, 2> wanted) {
  const Tensor passed = at::threshold_backward(grad, output, 0);
  Tensor grad_x, grad_bias;
  if (wanted[0]) grad_x = passed * scale;
  if (wanted[1]) {
    std::vector<int64_t> leading(grad.dim() - 1);
    std::iota(leading.begin(), leading.end(), 0);
    grad_bias = leading.empty() ? passed.to(bias_dtype)
                                : at::sum(passed, leading, /*keepdim=*/false, bias_dtype);
  }
  return {grad_x, grad_bias, Tensor()};
}

struct ScaleBiasReluFunction : torch::autograd::Function<ScaleBiasReluFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& bias, double scale) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor output = scale_bias_relu(x, bias, scale);
    context->saved_data["scale"] = scale;
    context->saved_data["bias_dtype"] = static_cast<int64_t>(bias.scalar_type());
    context->save_for_backward({output});
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const Tensor output = context->get_saved_variables()[0];
    const double scale = context->saved_data["scale"].toDouble();
    const auto bias_dtype = static_cast<at::ScalarType>(context->saved_data["bias_dtype"].toInt());
    const std::array<bool, 2> wanted{context->needs_input_grad(0), context->needs_input_grad(1)};
    if (at::GradMode::is_enabled()) {
      return differentiable_gradients(grads[0], output, scale, bias_dtype, wanted);
    }
    auto [grad_x, grad_bias] =
        scale_bias_relu_backward(grads[0], output, scale, bias_dtype, wanted);
    return {wanted[0] ? grad_x : Tensor(), wanted[1] ? grad_bias : Tensor(), Tensor()};
  }
};

/// The op in torch's own ops, in its own precision: for transforms that have no kernel here.
Tensor forward_decomposed(const Tensor& x, const Tensor& bias, double scale) {
  check_forward(x, bias);
  const at::ScalarType compute = is_half(x.scalar_type()) ? at::kFloat : x.scalar_type();
  return at::relu(x.to(compute) * scale + bias.to(compute)).to(x.scalar_type());
}

Tensor forward_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& bias,
                        double scale) {
  if (is_transformed(x, bias)) return forward_decomposed(x, bias, scale);
  if (needs_gradient(x, bias)) return ScaleBiasReluFunction::apply(x, bias, scale);
  const at::AutoDispatchBelowADInplaceOrView below;
  return forward_op().redispatch(keys & c10::after_autograd_keyset, x, bias, scale);
}

/// x goes to the autocast dtype, as for a linear layer, whose tail this op is; the bias is read as
/// it is.
Tensor forward_autocast(const Tensor& x, const Tensor& bias, double scale) {
  check_tensor(kOp, "x", x);
  check_tensor(kOp, "bias", bias);
  check_same_device(kOp, "bias", bias, "x", x);
  // Of every device: the call must not come back here.
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  const at::DeviceType device = x.device().type();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const Tensor cast_x = at::autocast::cached_cast(dtype, x, device);
  return scale_bias_relu(
      cast_x,
      bias.scalar_type() == at::kFloat ? bias : at::autocast::cached_cast(dtype, bias, device),
      scale);
}

}  // namespace

Tensor scale_bias_relu(const Tensor& x, const Tensor& bias, double scale) {
  return forward_op().call(x, bias, scale);
}

std::tuple<Tensor, Tensor> scale_bias_relu_backward(const Tensor& grad, const Tensor& output,
                                                    double scale, at::ScalarType bias_dtype,
                                                    std::array<bool, 2> wanted) {
  return backward_op().call(grad, output, scale, bias_dtype, wanted);
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("scale_bias_relu(Tensor x, Tensor bias, float scale=1.0) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "scale_bias_relu_backward(Tensor grad, Tensor output, float scale, ScalarType bias_dtype, "
      "bool[2] wanted) -> "
      "(Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl("scale_bias_relu", TORCH_FN(forward_real));
  m.impl("scale_bias_relu_backward", TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl("scale_bias_relu", TORCH_FN(forward_output));
  m.impl("scale_bias_relu_backward", TORCH_FN(backward_outputs));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) {
  m.impl("scale_bias_relu", TORCH_FN(forward_autograd));
}
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) {
  m.impl("scale_bias_relu", TORCH_FN(forward_decomposed));
}
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) {
  m.impl("scale_bias_relu", TORCH_FN(forward_autocast));
}
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) {
  m.impl("scale_bias_relu", TORCH_FN(forward_autocast));
}

}  // namespace torchkiln
