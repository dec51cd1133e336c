// swiglu, geglu and geglu_tanh: act(gate) * up in one pass, where gate and up are two tensors or
// the halves of one. Backward computes both gradients in one pass; gated_mlp uses a form of it that
// also returns the output again. SwigluOut writes to a tensor of the caller.

#include "gated.h"

#include "torchkiln/kernels/gated.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::gated_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

/// Checks that gate and up have the same shape. If their shapes would broadcast, the error names a
/// remedy.
void check_shapes(const char* op, const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(up.sym_sizes().equals(gate.sym_sizes()), "torchkiln.", op, ": up: got shape ",
              up.sym_sizes(), ", expected ", gate.sym_sizes(),
              ", the shape of gate; to broadcast, pass *torch.broadcast_tensors(gate, up)");
}

void check_inputs(const char* op, const Tensor& gate, const MaybeTensor& up) {
  check_tensor(op, "gate", gate);
  check_dtype(op, "gate", gate);
  if (up.has_value()) {
    check_strided(op, "up", *up);
    check_shapes(op, gate, *up);
    return check_like_or_mixed(op, "up", *up, "gate", gate);
  }
  TORCH_CHECK(gate.dim() >= 1, "torchkiln.", op,
              ": gate: got a 0-dimensional tensor, expected at least 1 dimension, to be split "
              "into gate and up");
  TORCH_CHECK(gate.sym_size(-1) % 2 == 0, "torchkiln.", op, ": gate: got a last dimension of size ",
              gate.sym_size(-1), ", expected an even one, to be split into gate and up");
}

/// The dtype of the result: the wider one of gate and up.
at::ScalarType result_dtype(const Tensor& gate, const MaybeTensor& up) {
  return up.has_value() ? at::promote_types(gate.scalar_type(), up->scalar_type())
                        : gate.scalar_type();
}

c10::SymDimVector result_shape(const Tensor& gate, const MaybeTensor& up) {
  c10::SymDimVector shape(gate.sym_sizes());
  if (!up.has_value()) shape.back() = shape.back() / 2;
  return shape;
}

/// Whether results have the strides of gate, as in torch: gate and up are dense in the same order,
/// which is not that of a contiguous tensor. A contiguous result would transpose them, which is
/// slower.
bool keeps_strides(const Tensor& gate, const MaybeTensor& up) {
  return up.has_value() && !gate.is_contiguous() && up->sym_strides().equals(gate.sym_strides()) &&
         gate.is_non_overlapping_and_dense();
}

}  // namespace

std::array<Tensor, 2> halves(const Tensor& gate, const MaybeTensor& up) {
  if (up.has_value()) return {gate, *up};
  const c10::SymInt half = gate.sym_size(-1) / 2;
  return {gate.narrow_symint(-1, 0, half), gate.narrow_symint(-1, half, half)};
}

namespace {

/// Writes the gradients and the output. They may overwrite arguments, because the kernels read all
/// operands of an element before they write its results.
void write_with_output(const Tensor& grad, const Tensor& packed, Activation act,
                       const Tensor& passed, const Tensor& out) {
  const auto [gates, ups] = halves(packed, std::nullopt);
  const auto [of_gates, of_ups] = halves(passed, std::nullopt);
  launch_elementwise(
      GatedBackwardWithOutput::kName, std::array{of_gates, of_ups, out},
      std::array{grad, gates, ups},
      [&](const auto& p, auto stream) { return cuda::gated_backward_with_output(p, act, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::gated_backward_with_output(p, act, begin, end);
      });
}

}  // namespace

Two GatedBackward::meta(const Tensor& grad, const Tensor& gate, const MaybeTensor& up, Activation) {
  check_inputs(kName, gate, up);
  const bool up_is_wider = up.has_value() && up->scalar_type() != gate.scalar_type() &&
                           up->scalar_type() == result_dtype(gate, up);
  if (up_is_wider) {
    check_like(kName, "grad", grad, "up", *up);
  } else {
    check_like(kName, "grad", grad, "gate", halves(gate, up)[0]);
  }
  const auto new_gradient = [&] {
    return keeps_strides(gate, up) ? at::empty_like(gate, grad.options())
                                   : empty_of(gate.sym_sizes(), grad.options());
  };
  return {new_gradient(), up.has_value() ? new_gradient() : no_output(gate)};
}

Two GatedBackward::kernel(const Tensor& grad, const Tensor& gate, const MaybeTensor& up,
                          Activation act) {
  auto [grad_gate, grad_up] = meta(grad, gate, up, act);
  const auto [gates, ups] = halves(gate, up);
  const auto outputs = halves(grad_gate, up.has_value() ? MaybeTensor(grad_up) : std::nullopt);
  launch_elementwise(
      kName, outputs, std::array{grad, gates, ups},
      [&](const auto& p, auto stream) { return cuda::gated_backward(p, act, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::gated_backward(p, act, begin, end);
      });
  return {grad_gate, grad_up};
}

Two GatedBackwardWithOutput::meta(const Tensor& grad, const Tensor& packed, Activation) {
  check_inputs(kName, packed, std::nullopt);
  check_like(kName, "grad", grad, "gate", halves(packed, std::nullopt)[0]);
  return {empty_contiguous(packed), empty_contiguous(grad)};
}

Two GatedBackwardWithOutput::kernel(const Tensor& grad, const Tensor& packed, Activation act) {
  auto [passed, out] = meta(grad, packed, act);
  write_with_output(grad, packed, act, passed, out);
  return {passed, out};
}

void overwrite_with_gradient(const Tensor& grad, const Tensor& packed, Activation act) {
  write_with_output(grad, packed, act, packed, grad);
}

std::pair<c10::SymDimVector, at::TensorOptions> checked_result(const char* op, const Tensor& gate,
                                                               const MaybeTensor& up) {
  check_inputs(op, gate, up);
  return {result_shape(gate, up), gate.options().dtype(result_dtype(gate, up))};
}

namespace {

Tensor composite(Activation act, const Tensor& gate, const MaybeTensor& up) {
  const at::ScalarType compute = compute_dtype(gate.scalar_type());
  const auto [gates, ups] = halves(gate, up);
  return (composite_activation(act, gates.to(compute)) * ups.to(compute))
      .to(result_dtype(gate, up));
}

}  // namespace

variable_list gradients(const Incoming& in, const Kept<2>& kept, Activation act) {
  if (in.needs_composite()) {
    return composite_gradients(in, kept, [&](const Kept<2>& inputs) {
      return composite(act, inputs[0], maybe(inputs[1]));
    });
  }
  const MaybeTensor up = maybe(kept[1]);
  auto [grad_gate, grad_up] = call_below<GatedBackward>(in[0], kept[0], up, act);
  return {grad_gate, up ? grad_up : Tensor()};
}

namespace {

template <class Act>
struct Schema;
template <>
struct Schema<Silu> {
  static constexpr const char* kSchema =
      "torchkiln::swiglu(Tensor gate, Tensor? up=None) -> Tensor";
};
template <>
struct Schema<Gelu> {
  static constexpr const char* kSchema = "torchkiln::geglu(Tensor gate, Tensor? up=None) -> Tensor";
};
template <>
struct Schema<GeluTanh> {
  static constexpr const char* kSchema =
      "torchkiln::geglu_tanh(Tensor gate, Tensor? up=None) -> Tensor";
};

template <class Act>
struct Gated : Schema<Act> {
  static constexpr Activation kAct = kActivation<Act>;
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};

  static Tensor meta(const Tensor& gate, const MaybeTensor& up) {
    const auto [shape, options] = checked_result(name_of_op<Gated>(), gate, up);
    return keeps_strides(gate, up) ? at::empty_like(gate, options) : empty_of(shape, options);
  }

  static Tensor kernel(const Tensor& gate, const MaybeTensor& up) {
    Tensor out = meta(gate, up);
    write(gate, up, out);
    return out;
  }

  static void write(const Tensor& gate, const MaybeTensor& up, const Tensor& out) {
    launch_elementwise(
        name_of_op<Gated>(), std::array{out}, halves(gate, up),
        [](const auto& p, auto stream) { return cuda::gated(p, kAct, stream); },
        [](const auto& p, int64_t begin, int64_t end) { return cpu::gated(p, kAct, begin, end); });
  }

  static Tensor composite(const Tensor& gate, const MaybeTensor& up) {
    check_inputs(name_of_op<Gated>(), gate, up);
    return gated_ops::composite(kAct, gate, up);
  }

  static Tensor recorded(const Below& below, const Tensor& gate, const MaybeTensor& up) {
    const Tensor undefined = tensor_or_undefined(up);
    return record(
        name_of_op<Gated>(), {gate, undefined}, below.call<Gated>(gate, up), keep(gate, undefined),
        [](const Incoming& in, const Kept<2>& kept) { return gradients(in, kept, kAct); });
  }
};

/// swiglu that writes to a tensor of the caller, for inference; it has no gradient.
struct SwigluOut {
  static constexpr const char* kSchema =
      "torchkiln::_swiglu_out(Tensor gate, Tensor? up, Tensor(a!) out) -> ()";

  static void meta(const Tensor& gate, const MaybeTensor& up, const Tensor& out) {
    check_inputs("swiglu", gate, up);
    check_written("swiglu", "out", out, result_shape(gate, up), gate, result_dtype(gate, up));
  }

  static void kernel(const Tensor& gate, const MaybeTensor& up, const Tensor& out) {
    meta(gate, up, out);
    for (const Tensor& half : halves(gate, up)) check_overlap(out, half);
    Gated<Silu>::write(gate, up, out);
    mark_written(out);
  }
};

}  // namespace

Tensor gated(const Tensor& gate, Gate act, const MaybeTensor& up) {
  if (act.act == kActivation<Silu>) return call<Gated<Silu>>(gate, up);
  if (act.act == kActivation<Gelu>) return call<Gated<Gelu>>(gate, up);
  return call<Gated<GeluTanh>>(gate, up);
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<GatedBackward, GatedBackwardWithOutput, Gated<Silu>, Gated<Gelu>, Gated<GeluTanh>,
         SwigluOut>(m);
}

}  // namespace torchkiln::gated_ops

namespace torchkiln {

at::Tensor swiglu(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  return call<gated_ops::Gated<Silu>>(gate, up);
}
at::Tensor geglu(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  return call<gated_ops::Gated<Gelu>>(gate, up);
}
at::Tensor geglu_tanh(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  return call<gated_ops::Gated<GeluTanh>>(gate, up);
}

}  // namespace torchkiln
