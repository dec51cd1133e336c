// The op linear_cross_entropy, its derivatives and its metrics. For reductions, forward computes
// the gradients of the sum of the losses, and backward multiplies them by a number. See
// linear_cross_entropy.h; linear_cross_entropy_kernel.cpp has the checks and the kernels.

#include "cross_entropy/linear_cross_entropy.h"
#include "cross_entropy/composite.h"
#include "cross_entropy/metrics.h"
#include "matmul/kernel.h"
#include "torchkiln/kernels/pointwise.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::linear_cross_entropy_ops {
namespace {

/// gradient * factor / divisor, computed in the compute dtype and rounded once, without a copy in
/// the compute dtype. A null divisor is 1. torch's product would first round a 0-dimensional factor
/// to the dtype of the gradient.
Tensor scaled(const Tensor& gradient, const Tensor& factor, const void* divisor,
              at::ScalarType dtype) {
  Tensor found = at::empty_like(gradient, gradient.options().dtype(dtype));
  if (!Below(detail::keys_of(gradient, factor)).is_plain())
    return at::mul_out(found, gradient, factor.view({1}));
  const void* const number = factor.const_data_ptr();
  launch_elementwise(
      kName, std::array{found}, std::array{gradient},
      [&](const auto& p, auto stream) { return cuda::scale_by(p, number, divisor, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::scale_by(p, number, divisor, begin, end);
      });
  return found;
}

/// The logits as rows, with torch's own ops; `product` is the dtype of the matrix product.
Tensor logits_in(at::ScalarType product, const Call& call) {
  check(kName, call);
  check_classes_if_asked(call);
  const auto& [x, weight, bias, softcap, temperature, dtype] = call.layer;
  const bool adds = bias && bias->scalar_type() == product;
  Tensor logits = at::linear(x.to(product), weight.to(product), adds ? bias : std::nullopt);
  if (bias && !adds) logits = logits + bias->to(compute_dtype(product));
  logits = as_matrix(logits);
  if (softcap) logits = capped(kName, logits, *softcap);
  if (temperature != 1) logits = logits.to(compute_dtype(product)) / temperature;
  return logits;
}

Tensor loss_of(const Tensor& logits, const Call& call) {
  const Tensor loss =
      composite_loss(logits, call.target.reshape({-1}), call.loss, call.loss_dtype());
  return loss.reshape_symint(call.loss.reduction == LossReduction::none ? call.target.sym_sizes()
                                                                        : c10::SymIntArrayRef());
}

at::ScalarType product_dtype(const Call& call) { return call.layer.x.scalar_type(); }

Tensor composite(const Call& call) { return loss_of(logits_in(product_dtype(call), call), call); }

/// The product is float32, because vmap adds the bias in a separate op: a product in x's dtype
/// would be rounded before the sum.
Tensor batched(const Call& call) {
  return loss_of(logits_in(compute_dtype(product_dtype(call)), call), call);
}

Tensor output(const Call& call) { return std::get<0>(forward_outputs(call, {})); }
Tensor kernel(const Call& call) { return std::get<0>(forward(call, {})); }

/// The number by which backward multiplies the gradients of the sum of the losses.
Tensor factor_of(const Tensor& grad, const Tensor& target, const Tensor& state,
                 const LossOptions& call) {
  const Tensor factor = grad.to(state.scalar_type());
  if (call.reduction != LossReduction::mean) return factor;
  // The gradients of ignored rows are 0, even if the divisor is 0.
  const Tensor none_counts = target.eq(call.ignore_index).all();
  return (factor / state.narrow_symint(0, target.sym_numel() * 3, 1)).masked_fill(none_counts, 0);
}

/// Computes the loss and records it in the autograd graph. Returns the loss and the state of each
/// row.
std::tuple<Tensor, Tensor> recorded_forward(const Below& below, const Call& call) {
  const auto& [x, weight, bias, softcap, temperature, dtype] = call.layer;
  const bool each = call.loss.reduction == LossReduction::none;
  const auto needs = [&](const Tensor& t) { return !each && t.defined() && t.requires_grad(); };
  const Tensor shift = tensor_or_undefined(bias), factors = tensor_or_undefined(call.loss.weight);
  const auto [loss, state, of_x, of_weight, of_bias] =
      below.call<Forward>(Forward::Arguments{call, {needs(x), needs(weight), needs(shift)}});
  TORCH_CHECK(!(factors.defined() && factors.requires_grad()), "torchkiln.", kName,
              ": weight: got a tensor that requires a gradient, expected one that does "
              "not: the loss has none with respect to class weights; pass weight.detach()");
  Call without_tensors = call;  // keep() saves the tensors instead
  without_tensors.layer.x = without_tensors.layer.weight = without_tensors.target = Tensor();
  without_tensors.layer.bias = without_tensors.loss.weight = std::nullopt;
  without_tensors.loss.check_target = false;
  Tensor recorded = record(
      kName, {x, weight, shift}, loss,
      keep(x, weight, shift, call.target, factors, state, of_x, of_weight, of_bias),
      [without_tensors](const Incoming& in, const Kept<9>& kept) {
        const auto& [x, weight, bias, target, factors, state, of_x, of_weight, of_bias] = kept;
        Call given = without_tensors;
        given.target = target;
        given.loss.weight = maybe(factors);
        const auto put = [&](const auto& inputs) {
          given.layer.x = inputs[0];
          given.layer.weight = inputs[1];
          given.layer.bias = maybe(inputs[2]);
        };
        if (in.needs_composite()) {
          return composite_gradients(in, std::array{x, weight, bias}, [&](const auto& inputs) {
            put(inputs);
            return composite(given);
          });
        }
        const std::array parameters{x, weight, bias};
        put(parameters);
        const LossOptions& options = given.loss;
        const bool each_row = options.reduction == LossReduction::none;
        std::array found{of_x, of_weight, of_bias};
        if (each_row) {
          const Tensor own =
              options.accuracy ? state.narrow_symint(0, 0, target.sym_numel() * 3) : state;
          std::tie(found[0], found[1], found[2]) = call_below<Backward>(
              given, in[0], own, Wanted{in.wants(0), in.wants(1), in.wants(2)});
        }
        Tensor factor;
        const void* divisor = nullptr;
        // If the divisor is 0, scaled() returns 0. Without class weights this is right, because the
        // divisor is the number of rows that are not ignored.
        if (options.reduction == LossReduction::mean && !factors.defined() &&
            Below(detail::keys_of(in[0], state, found[0], found[1], found[2])).is_plain()) {
          factor = in[0].to(state.scalar_type());
          divisor = row_state(state, target.numel(), options.reduction).divisor;
        } else if (!each_row) {
          factor = factor_of(in[0], target, state, options);
        }
        variable_list gradients(3);
        for (size_t i = 0; i < gradients.size(); ++i) {
          if (!in.wants(i)) continue;
          const at::ScalarType wanted = parameters[i].scalar_type();
          gradients[i] = each_row ? found[i].to(wanted) : scaled(found[i], factor, divisor, wanted);
        }
        return gradients;
      });
  return {recorded, state};
}

/// Casts x and weight to the autocast dtype, and the bias unless it is float32. The loss of half
/// precision is float32 unless a dtype is given.
template <class Call>
Call cast_call(const Autocast& cast, Call call) {
  auto& [x, weight, bias, softcap, temperature, dtype] = call.layer;
  check_tensors(kName, {{"x", x}, {kLayer.weight, weight}});
  x = cast(x);
  weight = cast(weight);
  if (bias && bias->scalar_type() != at::kFloat) bias = cast(bias);
  if (is_half(x.scalar_type()) && !call.loss.loss_dtype.has_value())
    call.loss.loss_dtype = at::kFloat;
  return call;
}

struct Op {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy(Tensor x, Tensor linear_weight, Tensor target, "
      "Tensor? linear_bias=None, Tensor? weight=None, *, int ignore_index=-100, "
      "str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? loss_dtype=None, bool check_target=False, float? softcap=None, "
      "float temperature=1.0) -> Tensor";
  static constexpr auto meta = output;
  static constexpr auto kernel = linear_cross_entropy_ops::kernel;
  static constexpr auto composite = linear_cross_entropy_ops::composite;
  static constexpr auto batched = linear_cross_entropy_ops::batched;

  static Tensor recorded(const Below& below, const Call& call) {
    return std::get<0>(recorded_forward(below, call));
  }
  static Tensor autocast(const Autocast& cast, const Call& call) {
    return torchkiln::call<Op>(cast_call(cast, call));
  }
};

// ---- the op with metrics for the log of a training run ----

Three with_metrics(const Tensor& loss, const Tensor& state, const Call& call) {
  const at::NoGradGuard without_gradients;
  const auto [z, correct] = reduced_metrics(
      metrics_of_state(call.rows(), call.target, state, call.loss), loss, call.loss);
  return {loss, z, correct};
}

Three composite_with_metrics(const Tensor& logits, const Call& call) {
  const Tensor loss = loss_of(logits, call);
  const auto [z, correct] =
      reduced_metrics(composite_metrics(logits.detach(), call.target.reshape({-1}), call.loss),
                      loss.detach(), call.loss);
  return {loss, z, correct};
}

struct WithMetrics {
  struct Arguments : Call {
    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(Call::fields(self), std::tie(self.loss.accuracy));
    }
  };
  static constexpr const char* kName = "linear_cross_entropy";
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_linear_cross_entropy_with_metrics(Tensor x, Tensor linear_weight, "
      "Tensor target, Tensor? linear_bias=None, Tensor? weight=None, *, int ignore_index=-100, "
      "str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? loss_dtype=None, bool check_target=False, float? softcap=None, "
      "float temperature=1.0, bool accuracy=False) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Arguments& call) {
    const auto [loss, state, of_x, of_weight, of_bias] = forward_outputs(call, {});
    return with_metrics(loss, state, call);
  }
  static Three kernel(const Arguments& call) {
    const auto [loss, state, of_x, of_weight, of_bias] = forward(call, {});
    return with_metrics(loss, state, call);
  }
  static Three composite(const Arguments& call) {
    return composite_with_metrics(logits_in(product_dtype(call), call), call);
  }
  static Three batched(const Arguments& call) {
    return composite_with_metrics(logits_in(compute_dtype(product_dtype(call)), call), call);
  }
  static Three recorded(const Below& below, const Arguments& call) {
    const auto [loss, state] = recorded_forward(below, call);
    return with_metrics(loss, state, call);
  }
  static Three autocast(const Autocast& cast, const Arguments& call) {
    return torchkiln::call<WithMetrics>(cast_call(cast, call));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op, WithMetrics>(m); }

}  // namespace torchkiln::linear_cross_entropy_ops

namespace torchkiln {

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& linear_weight,
                                const at::Tensor& target,
                                const LinearCrossEntropyOptions& options) {
  return call<linear_cross_entropy_ops::Op>(x, linear_weight, target, options);
}

}  // namespace torchkiln
