#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "activations.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/gated.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln::gated_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Two = std::tuple<Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;
using Schema = Tensor(const Tensor&, const MaybeTensor&);
using BackwardSchema = Two(const Tensor&, const Tensor&, const MaybeTensor&, c10::string_view);

constexpr const char* kBackwardOp = "gated_backward";

constexpr const char* op_name(TypeTag<Silu>) { return "swiglu"; }
constexpr const char* op_name(TypeTag<Gelu>) { return "geglu"; }
constexpr const char* op_name(TypeTag<GeluTanh>) { return "geglu_tanh"; }

const auto& backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchkiln::gated_backward", "")
                             .typed<BackwardSchema>();
  return op;
}

void check_inputs(const char* op, const Tensor& gate, const MaybeTensor& up) {
  check_tensor(op, "gate", gate);
  check_dtype(op, "gate", gate);
  if (!up.has_value()) {
    TORCH_CHECK(gate.dim() >= 1, "torchkiln.", op,
                ": gate: got a 0-dimensional tensor, expected at least 1 dimension, to be split "
                "into gate and up");
    TORCH_CHECK(gate.sym_size(-1) % 2 == 0, "torchkiln.", op,
                ": gate: got a last dimension of size ", gate.sym_size(-1),
                ", expected an even one, to be split into gate and up");
    return;
  }
  check_tensor(op, "up", *up);
  check_same_device(op, "up", *up, "gate", gate);
  TORCH_CHECK(up->scalar_type() == gate.scalar_type(), "torchkiln.", op, ": up: got dtype ",
              dtype_name(up->scalar_type()), ", expected ", dtype_name(gate.scalar_type()),
              ", the dtype of gate");
  TORCH_CHECK(up->sym_sizes().equals(gate.sym_sizes()), "torchkiln.", op, ": up: got shape ",
              up->sym_sizes(), ", expected ", gate.sym_sizes(), ", the shape of gate");
}

/// Gate and up: the two tensors, or the halves of one.
std::array<Tensor, 2> halves(const Tensor& gate, const MaybeTensor& up) {
  if (up.has_value()) return {gate, *up};
  const c10::SymInt half = gate.sym_size(-1) / 2;
  return {gate.narrow_symint(-1, 0, half), gate.narrow_symint(-1, half, half)};
}

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor output(const char* op, const Tensor& gate, const MaybeTensor& up) {
  check_inputs(op, gate, up);
  c10::SymDimVector shape(gate.sym_sizes());
  if (!up.has_value()) shape.back() = shape.back() / 2;
  return at::empty_symint(shape, gate.options().memory_format(at::MemoryFormat::Contiguous));
}

/// The checked, empty gradients: of gate and up, or of the packed tensor and nothing.
Two backward_outputs(const Tensor& grad, const Tensor& gate, const MaybeTensor& up,
                     c10::string_view act) {
  find_activation(kBackwardOp, act);
  check_inputs(kBackwardOp, gate, up);
  check_tensor(kBackwardOp, "grad", grad);
  check_same_device(kBackwardOp, "grad", grad, "gate", gate);
  const auto shape = halves(gate, up)[0].sym_sizes().vec();
  TORCH_CHECK(grad.scalar_type() == gate.scalar_type() &&
                  grad.sym_sizes().equals(c10::SymIntArrayRef(shape)),
              "torchkiln.", kBackwardOp, ": grad: got ", dtype_name(grad.scalar_type()), " ",
              grad.sym_sizes(), ", expected ", dtype_name(gate.scalar_type()), " ",
              c10::SymIntArrayRef(shape));
  const at::TensorOptions options = gate.options().memory_format(at::MemoryFormat::Contiguous);
  return {at::empty_symint(gate.sym_sizes(), options),
          up.has_value() ? at::empty_symint(gate.sym_sizes(), options) : at::empty({0}, options)};
}

Two backward_real(const Tensor& grad, const Tensor& gate, const MaybeTensor& up,
                  c10::string_view act) {
  auto [grad_gate, grad_up] = backward_outputs(grad, gate, up, act);
  if (grad.numel() == 0) return {grad_gate, grad_up};
  const Activation activation = find_activation(kBackwardOp, act);
  const std::array<Tensor, 2> parts = halves(gate, up);
  std::array<Tensor, 3> inputs{grad, parts[0], parts[1]};
  const std::array<Tensor, 2> outputs =
      halves(grad_gate, up.has_value() ? MaybeTensor(grad_up) : MaybeTensor());
  const Elementwise<3, 2> arguments = describe(outputs, inputs);
  launch(
      kBackwardOp, grad, grad.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::gated_backward(arguments, activation, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::gated_backward(arguments, activation, begin, end);
      });
  return {grad_gate, grad_up};
}

/// In torch's own ops and the op's own precision: for transforms that have no kernel here.
Tensor composite(Activation activation, const Tensor& gate, const Tensor& up) {
  const at::ScalarType compute = compute_dtype(gate.scalar_type());
  return (composite_of(activation).value(gate.to(compute)) * up.to(compute)).to(gate.scalar_type());
}

/// The gradients in torch's own ops, which can be differentiated again.
variable_list differentiable_gradients(Activation activation, const Tensor& grad,
                                       const Tensor& gate, const MaybeTensor& up) {
  const at::ScalarType dtype = gate.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const std::array<Tensor, 2> parts = halves(gate, up);
  const Tensor wide = grad.to(compute), z = parts[0].to(compute);
  const Composite formula = composite_of(activation);
  const Tensor grad_gate = formula.gradient(wide * parts[1].to(compute), z).to(dtype);
  const Tensor grad_up = (wide * formula.value(z)).to(dtype);
  if (up.has_value()) return {grad_gate, grad_up};
  return {at::cat({grad_gate, grad_up}, -1), Tensor()};
}

Tensor call_below_autograd(Activation activation, const Tensor& gate, const MaybeTensor& up);

struct GatedFunction : torch::autograd::Function<GatedFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& gate, const MaybeTensor& up,
                        int64_t activation) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["activation"] = activation;
    context->save_for_backward({gate, up.value_or(Tensor())});
    return call_below_autograd(static_cast<Activation>(activation), gate, up);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    const MaybeTensor up = saved[1].defined() ? MaybeTensor(saved[1]) : MaybeTensor();
    variable_list results;
    if (at::GradMode::is_enabled()) {
      results = differentiable_gradients(activation, grads[0], saved[0], up);
    } else {
      auto [grad_gate, grad_up] = backward_op().call(grads[0], saved[0], up, name_of(activation));
      results = {grad_gate, up.has_value() ? grad_up : Tensor()};
    }
    results.emplace_back();
    return results;
  }
};

/// The op of one gate.
template <class Act>
struct Op {
  static constexpr const char* kName = op_name(TypeTag<Act>{});

  static const auto& handle() {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow((std::string("torchkiln::") + kName).c_str(), "")
                               .template typed<Schema>();
    return op;
  }

  static Tensor meta(const Tensor& gate, const MaybeTensor& up) { return output(kName, gate, up); }

  static Tensor real(const Tensor& gate, const MaybeTensor& up) {
    Tensor out = output(kName, gate, up);
    if (out.numel() == 0) return out;
    std::array<Tensor, 2> inputs = halves(gate, up);
    const Elementwise<2> arguments = describe(std::array<Tensor, 1>{out}, inputs);
    launch(
        kName, out, out.numel(), kElementwiseGrain,
        [&](auto stream) { return cuda::gated(arguments, kActivation<Act>, stream); },
        [&](int64_t begin, int64_t end) {
          return cpu::gated(arguments, kActivation<Act>, begin, end);
        });
    return out;
  }

  static Tensor decomposed(const Tensor& gate, const MaybeTensor& up) {
    check_inputs(kName, gate, up);
    const std::array<Tensor, 2> parts = halves(gate, up);
    return composite(kActivation<Act>, parts[0], parts[1]);
  }

  static Tensor autograd(c10::DispatchKeySet keys, const Tensor& gate, const MaybeTensor& up) {
    const Tensor& second = up.has_value() ? *up : gate;
    if (is_transformed(gate, second)) return decomposed(gate, up);
    if (needs_gradient(gate, second))
      return GatedFunction::apply(gate, up, static_cast<int64_t>(kActivation<Act>));
    const at::AutoDispatchBelowADInplaceOrView below;
    return handle().redispatch(keys & c10::after_autograd_keyset, gate, up);
  }
};

Tensor call_below_autograd(Activation activation, const Tensor& gate, const MaybeTensor& up) {
  Tensor out;
  with_activation(
      activation,
      [&](auto tag) { out = Op<typename decltype(tag)::type>::handle().call(gate, up); }, Gates{});
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  for_each_activation(
      [&](auto tag) {
        const std::string name = op_name(tag);
        m.def((name + "(Tensor gate, Tensor? up=None) -> Tensor").c_str(),
              {at::Tag::pt2_compliant_tag});
      },
      Gates{});
  m.def("gated_backward(Tensor grad, Tensor gate, Tensor? up, str act) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  for_each_activation(
      [&](auto tag) { m.impl(op_name(tag), TORCH_FN(Op<typename decltype(tag)::type>::real)); },
      Gates{});
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  for_each_activation(
      [&](auto tag) { m.impl(op_name(tag), TORCH_FN(Op<typename decltype(tag)::type>::meta)); },
      Gates{});
  m.impl(kBackwardOp, TORCH_FN(backward_outputs));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) {
  for_each_activation(
      [&](auto tag) { m.impl(op_name(tag), TORCH_FN(Op<typename decltype(tag)::type>::autograd)); },
      Gates{});
}
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) {
  for_each_activation(
      [&](auto tag) {
        m.impl(op_name(tag), TORCH_FN(Op<typename decltype(tag)::type>::decomposed));
      },
      Gates{});
}

}  // namespace torchkiln::gated_ops

namespace torchkiln {

at::Tensor swiglu(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  return gated_ops::Op<Silu>::handle().call(gate, up);
}
at::Tensor geglu(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  return gated_ops::Op<Gelu>::handle().call(gate, up);
}
at::Tensor geglu_tanh(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  return gated_ops::Op<GeluTanh>::handle().call(gate, up);
}

}  // namespace torchkiln
