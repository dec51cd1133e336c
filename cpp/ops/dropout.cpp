#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <mutex>
#include <numeric>

#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/cuda.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/dropout.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"
#include "torchkiln/workspace.h"

namespace torchkiln::dropout_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using MaybeTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Wanted = std::array<bool, 2>;
using Schema = Tensor(const Tensor&, const Tensor&, double, bool);
using BiasSchema = Tensor(const Tensor&, const Tensor&, const Tensor&, double, bool);
using ForwardSchema = Two(const Tensor&, const MaybeTensor&, const Tensor&, double);
using BackwardSchema = Two(const Tensor&, const Tensor&, double, at::ScalarType, Wanted);

constexpr const char* kOp = "dropout_add";
constexpr const char* kBiasOp = "bias_dropout_add";
constexpr const char* kBackwardOp = "dropout_add_backward";

const auto& op() {
  static const auto found = find_op<Schema>("torchkiln::dropout_add");
  return found;
}
const auto& bias_op() {
  static const auto found = find_op<BiasSchema>("torchkiln::bias_dropout_add");
  return found;
}
const auto& forward_op() {
  static const auto found = find_op<ForwardSchema>("torchkiln::dropout_add_forward");
  return found;
}
const auto& backward_op() {
  static const auto found = find_op<BackwardSchema>("torchkiln::dropout_add_backward");
  return found;
}

void check_p(const char* op, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "torchkiln.", op, ": p: got ", p,
                    ", expected a probability between 0 and 1");
}

void check_inputs(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p) {
  const char* op = bias.has_value() ? kBiasOp : kOp;
  check_tensor(op, "x", x);
  check_tensor(op, "residual", residual);
  check_same_device(op, "residual", residual, "x", x);
  check_dtype(op, "x", x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(residual.scalar_type() == dtype, "torchkiln.", op, ": residual: got dtype ",
              dtype_name(residual.scalar_type()), ", expected ", dtype_name(dtype),
              ", the dtype of x");
  TORCH_CHECK(residual.sym_sizes().equals(x.sym_sizes()), "torchkiln.", op,
              ": residual: got shape ", residual.sym_sizes(), ", expected ", x.sym_sizes(),
              ", the shape of x");
  if (bias.has_value()) {
    check_tensor(op, "bias", *bias);
    check_same_device(op, "bias", *bias, "x", x);
    TORCH_CHECK(
        bias->scalar_type() == dtype || (is_half(dtype) && bias->scalar_type() == at::kFloat),
        "torchkiln.", op, ": bias: got dtype ", dtype_name(bias->scalar_type()), ", expected ",
        dtype_name(dtype), ", the dtype of x", is_half(dtype) ? ", or float32" : "");
    TORCH_CHECK(x.dim() >= 1, "torchkiln.", op,
                ": x: got a 0-dimensional tensor, expected at least 1 dimension");
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == x.sym_size(-1), "torchkiln.", op,
                ": bias: got shape ", bias->sym_sizes(), ", expected [", x.sym_size(-1),
                "], the last dimension of x");
  }
  check_p(op, p);
}

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor output(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p) {
  check_inputs(x, bias, residual, p);
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// Of elements that are dropped with probability p < 1.
Dropout keep(double p) { return {RandomState{}, last_word(1 - p), 1 / (1 - p)}; }

/// Takes the next random numbers from torch's generator of the device. Each position of the output
/// has a stream of its own, so that a call moves the generator on by one draw of four words.
RandomState next_state(const Tensor& where) {
#ifdef TORCHKILN_WITH_CUDA
  if (where.is_cuda()) return cuda_of_torch().next_random(where.device());
#else
  (void)where;
#endif
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  RandomState state;
  state.seed = generator->random64();
  return state;
}

void run(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, const Dropout& dropout,
         const Tensor& out) {
  if (out.numel() == 0) return;
  const auto start = [&](const auto& arguments, const auto& on_cuda, const auto& on_cpu) {
    launch(
        kOp, out, out.numel(), kElementwiseGrain,
        [&](auto stream) { return on_cuda(arguments, dropout, stream); },
        [&](int64_t begin, int64_t end) { return on_cpu(arguments, dropout, begin, end); });
  };
  const std::array<Tensor, 1> outputs{out};
  if (bias.has_value()) {
    std::array<Tensor, 3> inputs{x, *bias, residual};
    start(
        describe(outputs, inputs), [](auto&... a) { return cuda::bias_dropout_add(a...); },
        [](auto&... a) { return cpu::bias_dropout_add(a...); });
  } else {
    std::array<Tensor, 2> inputs{x, residual};
    start(
        describe(outputs, inputs), [](auto&... a) { return cuda::dropout_add(a...); },
        [](auto&... a) { return cpu::dropout_add(a...); });
  }
}

Tensor real(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
            bool training) {
  Tensor out = output(x, bias, residual, p);
  if (training && p == 1) return out.copy_(residual);
  Dropout dropout = keep(training ? p : 0);
  if (training && p > 0) dropout.random = next_state(x);
  run(x, bias, residual, dropout, out);
  return out;
}

Two forward_outputs(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p) {
  Tensor out = output(x, bias, residual, p);
  return {std::move(out), at::empty({2}, x.options().dtype(at::kLong))};
}

/// The output, and {seed, offset}, which backward draws the same mask from. On the device, so that
/// each replay of a CUDA graph leaves its own.
Two forward_real(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p) {
  auto [out, state] = forward_outputs(x, bias, residual, p);
  if (p == 1) return {out.copy_(residual), state.zero_()};
  Dropout dropout = keep(p);
  dropout.random = next_state(x);
  dropout.random.record = state.data_ptr<int64_t>();
  run(x, bias, residual, dropout, out);
  return {out, state};
}

Two backward_outputs(const Tensor& grad, const Tensor& state, double p, at::ScalarType bias_dtype,
                     Wanted wanted) {
  check_tensor(kBackwardOp, "grad", grad);
  check_dtype(kBackwardOp, "grad", grad);
  check_same_device(kBackwardOp, "state", state, "grad", grad);
  TORCH_CHECK(state.scalar_type() == at::kLong && state.is_contiguous() && state.sym_numel() == 2,
              "torchkiln.", kBackwardOp, ": state: got ", dtype_name(state.scalar_type()), " ",
              state.sym_sizes(), ", expected int64 [2], {seed, offset} of the forward");
  check_p(kBackwardOp, p);
  const at::TensorOptions options = grad.options().memory_format(at::MemoryFormat::Contiguous);
  // An output of a schema must be a tensor: an unwanted gradient is an empty one.
  return {wanted[0] ? at::empty_symint(grad.sym_sizes(), options) : at::empty({0}, options),
          wanted[1] ? at::empty_symint({grad.sym_size(-1)}, options.dtype(bias_dtype))
                    : at::empty({0}, options)};
}

std::vector<int64_t> leading_dims(const Tensor& tensor) {
  std::vector<int64_t> dims(tensor.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

Tensor column_sum(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.dim() == 1 ? tensor.to(dtype)
                           : at::sum(tensor, leading_dims(tensor), /*keepdim=*/false, dtype);
}

Two backward_real(const Tensor& grad, const Tensor& state, double p, at::ScalarType bias_dtype,
                  Wanted wanted) {
  auto [grad_x, grad_bias] = backward_outputs(grad, state, p, bias_dtype, wanted);
  if (grad.numel() == 0 || p == 1) {
    grad_x.zero_();
    grad_bias.zero_();
    return {grad_x, grad_bias};
  }
  Dropout dropout = keep(p);
  dropout.random.seed_from = state.data_ptr<int64_t>();
  dropout.random.offset_from = state.data_ptr<int64_t>() + 1;
  if (wanted[1] && grad.is_cuda()) {
    const int64_t columns = grad.size(-1);
    const int64_t rows = grad.numel() / columns;
    // A view wherever the rows are evenly spaced.
    const Tensor grad_rows = grad.reshape({rows, columns});
    DropoutBackward arguments{};
    arguments.grad = grad_rows.const_data_ptr();
    arguments.grad_x = wanted[0] ? grad_x.data_ptr() : nullptr;
    arguments.grad_bias = grad_bias.data_ptr();
    arguments.dtype = dtype_of(grad);
    arguments.bias_dtype = dtype_of(grad_bias);
    arguments.rows = rows;
    arguments.columns = columns;
    arguments.grad_row_stride = grad_rows.stride(0);
    arguments.grad_column_stride = grad_rows.stride(1);
    arguments.dropout = dropout;
    launch(
        kBackwardOp, grad, 0, 1,
        [&](auto stream) {
          const Workspace workspace(grad.device(), cuda::workspace_bytes(arguments));
          arguments.workspace = workspace.data();
          return cuda::bias_dropout_backward(arguments, stream);
        },
        [](int64_t, int64_t) { return Status{}; });
    return {grad_x, grad_bias};
  }
  // What is summed is not rounded before.
  const Tensor passed =
      wanted[1] ? at::empty(grad.sizes(), grad.options().dtype(compute_dtype(grad.scalar_type())))
                : grad_x;
  std::array<Tensor, 1> inputs{grad};
  const Elementwise<1> arguments = describe(std::array<Tensor, 1>{passed}, inputs);
  launch(
      kBackwardOp, grad, grad.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::dropout_backward(arguments, dropout, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::dropout_backward(arguments, dropout, begin, end);
      });
  if (wanted[1]) {
    grad_bias = column_sum(passed, bias_dtype);
    if (wanted[0]) grad_x.copy_(passed);
  }
  return {grad_x, grad_bias};
}

/// In torch's own ops and the op's own precision; `scaled` drops and scales.
template <class Scaled>
Tensor composite(const Tensor& x, const MaybeTensor& bias, const Tensor& residual,
                 const Scaled& scaled) {
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  const Tensor wide = x.to(compute);
  const Tensor sum = bias.has_value() ? wide + bias->to(compute) : wide;
  return (scaled(sum) + residual.to(compute)).to(x.scalar_type());
}

struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const MaybeTensor& bias,
                        const Tensor& residual, double p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, state] = forward_op().call(x, bias, residual, p);
    context->saved_data["p"] = p;
    context->saved_data["bias_dtype"] =
        static_cast<int64_t>(bias.has_value() ? bias->scalar_type() : x.scalar_type());
    context->saved_data["has_bias"] = bias.has_value();
    context->save_for_backward({state});
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const Tensor& grad = grads[0];
    const Tensor state = context->get_saved_variables()[0];
    const double p = context->saved_data["p"].toDouble();
    const auto bias_dtype = static_cast<at::ScalarType>(context->saved_data["bias_dtype"].toInt());
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const Wanted wanted{context->needs_input_grad(0), has_bias && context->needs_input_grad(1)};
    const Tensor grad_residual = context->needs_input_grad(has_bias ? 2 : 1) ? grad : Tensor();
    Tensor grad_x, grad_bias;
    if (at::GradMode::is_enabled()) {
      // Linear in grad: a factor for every element, which can be multiplied by again.
      const Tensor wide = grad.to(compute_dtype(grad.scalar_type()));
      const Tensor ones = at::ones_like(wide, at::MemoryFormat::Contiguous);
      const Tensor factor =
          std::get<0>(backward_op().call(ones, state, p, bias_dtype, {true, false}));
      const Tensor passed = wide * factor;
      if (wanted[0]) grad_x = passed.to(grad.scalar_type());
      if (wanted[1]) grad_bias = column_sum(passed, bias_dtype);
    } else if (wanted[0] || wanted[1]) {
      std::tie(grad_x, grad_bias) = backward_op().call(grad, state, p, bias_dtype, wanted);
    }
    return {wanted[0] ? grad_x : Tensor(), wanted[1] ? grad_bias : Tensor(), grad_residual,
            Tensor()};
  }
};

/// For differentiation in forward mode and for torch.func: torch's own ops, with the factors of the
/// op's own mask.
Tensor decomposed(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
                  bool training) {
  check_inputs(x, bias, residual, p);
  return composite(x, bias, residual, [&](const Tensor& sum) {
    if (!training || p == 0) return sum;
    Tensor factor;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      const Tensor like = sum.detach();
      factor = op().call(at::ones_like(like), at::zeros_like(like), p, true);
    }
    return sum * factor;
  });
}

/// Under vmap: torch's own random numbers, and its rules for them.
Tensor batched(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
               bool training) {
  check_inputs(x, bias, residual, p);
  return composite(x, bias, residual,
                   [&](const Tensor& sum) { return at::dropout(sum, p, training); });
}

Tensor autograd(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
                bool training) {
  if (is_transformed(x, residual, bias.value_or(x)))
    return decomposed(x, bias, residual, p, training);
  const bool random = training && p > 0;
  if (random && needs_gradient(x, residual, bias.value_or(x))) {
    check_inputs(x, bias, residual, p);
    return DropoutFunction::apply(x, bias, residual, p);
  }
  if (!random && needs_gradient(x, residual, bias.value_or(x))) {
    check_inputs(x, bias, residual, p);
    return composite(x, bias, residual, [](const Tensor& sum) { return sum; });
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return bias.has_value() ? bias_op().call(x, *bias, residual, p, training)
                          : op().call(x, residual, p, training);
}

}  // namespace

}  // namespace torchkiln::dropout_ops

namespace torchkiln {

at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p, bool training) {
  return dropout_ops::op().call(x, residual, p, training);
}

at::Tensor bias_dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual,
                            double p, bool training) {
  return dropout_ops::bias_op().call(x, bias, residual, p, training);
}

}  // namespace torchkiln

namespace torchkiln::dropout_ops {
TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  const std::vector<at::Tag> random{at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};
  m.def("dropout_add(Tensor x, Tensor residual, float p=0.5, bool training=True) -> Tensor",
        random);
  m.def(
      "bias_dropout_add(Tensor x, Tensor bias, Tensor residual, float p=0.5, bool training=True) "
      "-> Tensor",
      random);
  m.def("dropout_add_forward(Tensor x, Tensor? bias, Tensor residual, float p) -> (Tensor, Tensor)",
        random);
  m.def(
      "dropout_add_backward(Tensor grad, Tensor state, float p, ScalarType bias_dtype, "
      "bool[2] wanted) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

namespace {

// The two ops are one function, with and without a bias.
template <Tensor (*Function)(const Tensor&, const MaybeTensor&, const Tensor&, double, bool)>
Tensor without_bias(const Tensor& x, const Tensor& residual, double p, bool training) {
  return Function(x, std::nullopt, residual, p, training);
}
template <Tensor (*Function)(const Tensor&, const MaybeTensor&, const Tensor&, double, bool)>
Tensor with_bias(const Tensor& x, const Tensor& bias, const Tensor& residual, double p,
                 bool training) {
  return Function(x, bias, residual, p, training);
}

template <Tensor (*Function)(const Tensor&, const MaybeTensor&, const Tensor&, double, bool)>
void implement(torch::Library& m) {
  m.impl(kOp, TORCH_FN(without_bias<Function>));
  m.impl(kBiasOp, TORCH_FN(with_bias<Function>));
}

Tensor meta(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p, bool) {
  return output(x, bias, residual, p);
}

}  // namespace

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  implement<real>(m);
  m.impl("dropout_add_forward", TORCH_FN(forward_real));
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  implement<meta>(m);
  m.impl("dropout_add_forward", TORCH_FN(forward_outputs));
  m.impl(kBackwardOp, TORCH_FN(backward_outputs));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { implement<autograd>(m); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { implement<batched>(m); }

}  // namespace torchkiln::dropout_ops
