// bias_act: activation(x * scale + bias) in one pass. Forward saves x; for relu, one sign bit per
// element; without an activation, nothing. Backward computes the gradients of x and bias in one
// pass; linear and mlp also use it.

#include "bias_act.h"

#include "detail/column_sum.h"
#include "detail/memory_order.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::bias_act_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

Two Backward::meta(const Arguments& call) {
  const Tensor &grad = call.grad, &saved = call.saved;
  const MaybeTensor& bias = call.bias;
  constexpr const char* kName = "bias_act_backward";
  check_tensors(kName, {{"grad", grad}, {"saved", saved}});
  check_dtype(kName, "grad", grad);
  check_rank(kName, "grad", grad, 1, INT64_MAX, "at least 1 dimension");
  check_parameter_dtype(kName, "bias_dtype", call.bias_dtype, "grad", grad.scalar_type());
  const Saved kind = kept_by_bias_act(call.act);
  if (kind == Saved::sign) {
    const c10::SymInt bytes = (grad.sym_numel() + 7) / 8;
    TORCH_CHECK(
        saved.scalar_type() == at::kByte && saved.is_contiguous() && saved.sym_numel() == bytes,
        "torchkiln.", kName, ": saved: got ", dtype_name(saved.scalar_type()), " ",
        saved.sym_sizes(), ", expected a bit for each element of grad, uint8 [", bytes, "]");
  } else if (kind == Saved::input) {
    check_like(kName, "saved", saved, "grad", grad);
    if (bias) {
      check_same_device(kName, "bias", *bias, "grad", grad);
      check_vector(kName, "bias", *bias, grad.sym_size(-1), "the last dimension of grad");
    }
  }
  return {call.wanted[0] ? empty_contiguous(grad) : no_output(grad),
          call.wanted[1] ? empty_of({grad.sym_size(-1)}, grad.options().dtype(call.bias_dtype))
                         : no_output(grad)};
}

Two Backward::kernel(const Arguments& call) {
  auto [grad_x, grad_bias] = meta(call);
  const Tensor& grad = call.grad;
  const Wanted wanted = call.wanted;
  if (grad.numel() == 0) return {grad_x, grad_bias.zero_()};
  if (!wanted[0] && !wanted[1]) return {grad_x, grad_bias};

  const int64_t columns = grad.size(-1);
  const int64_t rows = grad.numel() / columns;
  const Tensor grad_rows = grad.reshape({rows, columns});  // a view if rows are evenly spaced
  BiasActBackward arguments{};
  Tensor saved_rows = call.saved;
  Tensor shift;  // the bias or zeros; undefined if the kernel needs neither
  if (kept_by_bias_act(call.act) == Saved::input) {
    if (call.bias) shift = *call.bias;
    if (!call.bias && !wanted[1])
      shift = at::zeros({columns}, grad.options().dtype(call.bias_dtype));
    saved_rows = call.saved->reshape({rows, columns});
    arguments.saved_row_stride = saved_rows.stride(0);
    arguments.saved_column_stride = saved_rows.stride(1);
  }
  if (shift.defined()) {
    arguments.bias = shift.const_data_ptr();
    arguments.bias_stride = shift.stride(0);
  }
  arguments.grad = grad_rows.const_data_ptr();
  arguments.saved = saved_rows.const_data_ptr();
  arguments.grad_x = wanted[0] ? grad_x.data_ptr() : nullptr;
  arguments.grad_bias = wanted[1] ? grad_bias.data_ptr() : nullptr;
  arguments.dtype = dtype_of(grad);
  arguments.bias_dtype = dtype_of(call.bias_dtype);
  arguments.activation = call.act;
  arguments.scale = call.scale;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.grad_row_stride = grad_rows.stride(0);
  arguments.grad_column_stride = grad_rows.stride(1);
  launch_split(
      "bias_act_backward", grad, arguments, kElementwiseGrain / 64, cpu::split,
      [&](Allocate allocate, auto stream) {
        return cuda::bias_act_backward(arguments, allocate, stream);
      },
      cpu::bias_act_backward, cpu::bias_act_backward_finish);
  return {grad_x, grad_bias};
}

namespace {

constexpr const char* kName = "bias_act";

/// The arguments of the op and of its forward.
struct Call {
  Borrowed<Tensor> x, bias;
  double scale;
  Activation act;

  TORCHKILN_FIELDS(self.x, self.bias, self.scale, self.act);
};

Tensor checked_output(const Call& call) {
  const Tensor &x = call.x, &bias = call.bias;
  check_tensors(kName, {{"x", x}, {"bias", bias}});
  check_dtype(kName, "x", x);
  check_parameter_dtype(kName, "bias", bias.scalar_type(), "x", x.scalar_type());
  check_not_0_dim(kName, "x", x);
  check_vector(kName, "bias", bias, x.sym_size(-1), "the last dimension of x");
  return empty_in_layout_of(x);
}

/// Computes `out`. `signs` is undefined if no sign bits are needed.
void run(const Call& call, const Tensor& out, const Tensor& signs) {
  if (out.numel() == 0) return;
  std::array inputs{*call.x, *call.bias};
  BiasAct arguments{};
  arguments.elements = describe(std::array{out}, inputs);
  arguments.activation = call.act;
  arguments.scale = call.scale;
  if (signs.defined() && signs.numel() > 0) arguments.signs = signs.data_ptr<uint8_t>();
  const int64_t numel = out.numel();
  constexpr int64_t kUnit = 64;  // elements per unit: threads never share a byte of `signs`
  launch(
      kName, out, (numel + kUnit - 1) / kUnit, kElementwiseGrain / kUnit,
      [&](auto stream) { return cuda::bias_act(arguments, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::bias_act(arguments, begin * kUnit, std::min(end * kUnit, numel));
      });
}

/// Returns the output and, if the derivative needs only signs, one bit per element.
struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::_bias_act_forward(Tensor x, Tensor bias, float scale, str act) -> "
      "(Tensor, Tensor)";

  static Two meta(const Call& call) {
    Tensor out = checked_output(call);
    const bool signs = kept_by_bias_act(call.act) == Saved::sign;
    const c10::SymInt bytes = signs ? (call.x->sym_numel() + 7) / 8 : c10::SymInt(0);
    return {std::move(out), empty_of({bytes}, call.x->options().dtype(at::kByte))};
  }

  static Two kernel(const Call& call) {
    auto [out, signs] = meta(call);
    run(call, out, signs);
    return {out, signs};
  }
};

/// The gradients with torch's own ops, for relu and none, the activations that do not save x.
variable_list gradients_without_input(const Incoming& in, const Tensor& signs, double scale,
                                      Activation act, at::ScalarType bias_dtype,
                                      const MemoryOrder& order) {
  const Tensor& grad = in[0];
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  Tensor passed = grad.to(compute);
  if (kept_by_bias_act(act) == Saved::sign) {
    Tensor positive = order.logical(unpack_signs(signs, order.physical(grad), compute));
    stand_in_for(in, 0, positive);
    const Tensor shift = at::zeros_symint({grad.sym_size(-1)}, positive.options());
    stand_in_for(in, 1, shift);
    // relu() changes no value here. It makes the second derivative, which is 0, depend on x and the
    // bias, as with torch's relu, so that further derivatives exist.
    passed = at::threshold_backward(passed, at::relu(positive + shift), 0);
  }
  Tensor grad_x, grad_bias;
  if (in.wants(0)) grad_x = (passed * scale).to(grad.scalar_type());
  if (in.wants(1)) grad_bias = sum_to_last(passed, 1, compute).to(bias_dtype);
  return {grad_x, grad_bias};
}

/// The gradients from the sign bits, for an output whose last dimension is not the innermost one in
/// memory. grad_x is computed in memory order, which is the order of the bits. The gradient of the
/// bias is the sum of the gradient behind relu; each term of it is the incoming gradient or 0, so
/// no term is rounded.
Two gradients_in_order(const Incoming& in, const Tensor& signs, double scale, Activation act,
                       at::ScalarType bias_dtype, const MemoryOrder& order) {
  const Tensor grad = order.physical(in[0]);
  const auto scaled = [&](double factor) {
    const Backward::Wanted only_grad_x{true, false};
    return std::get<0>(
        call_below<Backward>(grad, signs, MaybeTensor(), factor, act, bias_dtype, only_grad_x));
  };
  Tensor grad_x, grad_bias;
  if (in.wants(1)) {
    const Tensor passed = scaled(1.0);
    if (scale == 1.0) grad_x = passed;
    const int64_t channels = order.position_of(grad.dim() - 1);
    auto others = dims_between(0, grad.dim());
    others.erase(others.begin() + channels);
    const at::ScalarType compute = compute_dtype(grad.scalar_type());
    grad_bias = torchkiln::sum(passed, others, false, compute).to(bias_dtype);
  }
  if (in.wants(0)) grad_x = order.logical(grad_x.defined() ? grad_x : scaled(scale));
  return {grad_x, grad_bias};
}

struct Op {
  static constexpr const char* kSchema =
      "torchkiln::bias_act(Tensor x, Tensor bias, *, float scale=1.0, str act='relu') -> Tensor";

  static Tensor meta(const Call& call) { return checked_output(call); }

  static Tensor kernel(const Call& call) {
    Tensor out = checked_output(call);
    run(call, out, Tensor());
    return out;
  }

  static Tensor composite(const Call& call) {
    checked_output(call);
    const at::ScalarType dtype = call.x->scalar_type(), compute = compute_dtype(dtype);
    const Tensor z = call.x->to(compute) * call.scale + call.bias->to(compute);
    return composite_activation(call.act, z).to(dtype);
  }

  static Tensor recorded(const Below& below, const Call& call) {
    const Tensor &x = call.x, &bias = call.bias;
    const double scale = call.scale;
    const Activation act = call.act;
    const at::ScalarType bias_dtype = bias.scalar_type();
    const auto backward = [=](const Incoming& in, const Tensor& saved, const MaybeTensor& shift) {
      auto [grad_x, grad_bias] = call_below<Backward>(in[0], saved, shift, scale, act, bias_dtype,
                                                      Backward::Wanted{in.wants(0), in.wants(1)});
      return variable_list{grad_x, grad_bias};
    };
    if (kept_by_bias_act(act) == Saved::input) {
      return record(kName, {x, bias}, below.call<Op>(call), keep(x, bias),
                    [=](const Incoming& in, const Kept<2>& kept) {
                      if (!in.needs_composite()) return backward(in, kept[0], kept[1]);
                      return composite_gradients(in, kept, [&](const Kept<2>& inputs) {
                        return call_composite<Op>(inputs[0], inputs[1], scale, act);
                      });
                    });
    }
    auto [out, signs] = below.call<Forward>(call);
    const MemoryOrder order =
        kept_by_bias_act(act) == Saved::sign ? MemoryOrder(out) : MemoryOrder();
    return record(kName, {x, bias}, out, keep(signs), [=](const Incoming& in, const Kept<1>& kept) {
      if (in.needs_composite())
        return gradients_without_input(in, kept[0], scale, act, bias_dtype, order);
      if (order.is_logical()) return backward(in, kept[0], std::nullopt);
      auto [grad_x, grad_bias] = gradients_in_order(in, kept[0], scale, act, bias_dtype, order);
      return variable_list{grad_x, grad_bias};
    });
  }

  /// Casts x to the autocast dtype, as a linear layer does. A float32 bias is not cast.
  static Tensor autocast(const Autocast& cast, const Call& call) {
    const Tensor& bias = call.bias;
    check_tensors(kName, {{"x", call.x}, {"bias", bias}});
    return torchkiln::call<Op>(cast(*call.x), bias.scalar_type() == at::kFloat ? bias : cast(bias),
                               call.scale, call.act);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Backward, Forward, Op>(m); }

}  // namespace torchkiln::bias_act_ops

namespace torchkiln {

at::Tensor bias_act(const at::Tensor& x, const at::Tensor& bias, const BiasActOptions& options) {
  return call<bias_act_ops::Op>(x, bias, options);
}

}  // namespace torchkiln
