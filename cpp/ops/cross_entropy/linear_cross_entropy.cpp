#include "cross_entropy/linear_cross_entropy.h"
#include "cross_entropy/composite.h"
#include "cross_entropy/metrics.h"
#include "matmul/kernel.h"
#include "torchkiln/kernels/pointwise.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::linear_cross_entropy_ops {
namespace {

/// gradient * factor, computed in the compute dtype and rounded once, with no copy in that dtype.
/// torch's product would round a factor without dimensions to the dtype of the gradient first.
Tensor scaled(const Tensor& gradient, const Tensor& factor, at::ScalarType dtype) {
  Tensor found = at::empty_like(gradient, gradient.options().dtype(dtype));
  if (!Below(detail::keys_of(gradient, factor)).is_plain())
    return at::mul_out(found, gradient, factor.view({1}));
  const void* const number = factor.const_data_ptr();
  launch_elementwise(
      kName, std::array{found}, std::array{gradient},
      [&](const auto& p, auto stream) { return cuda::scale_by(p, number, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::scale_by(p, number, begin, end);
      });
  return found;
}

/// The logits as rows, with torch's own ops; `product` is the dtype of the matrix product.
Tensor logits_in(at::ScalarType product, const Call& call) {
  check(kName, call);
  check_classes_if_asked(call);
  const auto& [x, weight, bias, softcap, temperature] = call.layer;
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

/// vmap splits off the bias, after a product rounded to x's dtype: so the product is float32 here.
Tensor batched(const Call& call) {
  return loss_of(logits_in(compute_dtype(product_dtype(call)), call), call);
}

Tensor output(const Call& call) { return std::get<0>(forward_outputs(call, {}, false)); }
Tensor kernel(const Call& call) { return std::get<0>(forward(call, {}, false)); }

/// The number by which the gradients of the sum of the losses are multiplied.
Tensor factor_of(const Tensor& grad, const Tensor& target, const Tensor& state,
                 const LossCall& call) {
  const Tensor factor = grad.to(state.scalar_type());
  if (call.reduction != LossReduction::mean) return factor;
  // The gradients of ignored rows are 0, also if the divisor is.
  const Tensor none_counts = target.eq(call.ignore_index).all();
  return (factor / state.narrow_symint(0, target.sym_numel() * 3, 1)).masked_fill(none_counts, 0);
}

/// The recorded loss, and the state of the rows.
std::tuple<Tensor, Tensor> recorded_forward(const Below& below, const Call& call, bool accuracy) {
  const auto& [x, weight, bias, softcap, temperature] = call.layer;
  const LossCall& options = call.loss;
  const bool each = options.reduction == LossReduction::none;
  const auto needs = [&](const Tensor& t) { return !each && t.defined() && t.requires_grad(); };
  const Tensor shift = tensor_or_undefined(bias), factors = tensor_or_undefined(options.weight);
  const auto [loss, state, of_x, of_weight, of_bias] = below.call<Forward>(
      x, weight, call.target, bias, options.weight, options.ignore_index, options.reduction,
      options.label_smoothing, options.z_loss, call.dtype, call.check_target, softcap, temperature,
      Wanted{needs(x), needs(weight), needs(shift)}, accuracy);
  TORCH_CHECK(!(factors.defined() && factors.requires_grad()), "torchkiln.", kName,
              ": class_weight: got a tensor that requires a gradient, expected one that does "
              "not: the loss has none with respect to class weights; pass class_weight.detach()");
  // The tensors are saved by keep() instead.
  const Call without_tensors{{Tensor(), Tensor(), std::nullopt, softcap, temperature},
                             Tensor(),
                             {std::nullopt, options.ignore_index, options.reduction,
                              options.label_smoothing, options.z_loss},
                             call.dtype,
                             /*check_target=*/false};
  Tensor recorded = record(
      kName, {x, weight, shift}, loss,
      keep(x, weight, shift, call.target, factors, state, of_x, of_weight, of_bias),
      [without_tensors, accuracy](const Incoming& in, const Kept<9>& kept) {
        const auto& [x, weight, bias, target, factors, state, of_x, of_weight, of_bias] = kept;
        Call given = without_tensors;
        given.target = target;
        given.loss.weight = maybe(factors);
        if (in.needs_composite()) {
          return composite_gradients(in, std::array{x, weight, bias}, [&](const auto& inputs) {
            given.layer.x = inputs[0];
            given.layer.weight = inputs[1];
            given.layer.bias = maybe(inputs[2]);
            return composite(given);
          });
        }
        const LossCall& options = given.loss;
        const bool each_row = options.reduction == LossReduction::none;
        const std::array parameters{x, weight, bias};
        std::array found{of_x, of_weight, of_bias};
        if (each_row) {
          const Tensor own = accuracy ? state.narrow_symint(0, 0, target.sym_numel() * 3) : state;
          std::tie(found[0], found[1], found[2]) = call_below<Backward>(
              x, weight, target, maybe(bias), options.weight, options.ignore_index,
              options.reduction, options.label_smoothing, options.z_loss, given.dtype,
              given.check_target, given.layer.softcap, given.layer.temperature, in[0], own,
              Wanted{in.wants(0), in.wants(1), in.wants(2)});
        }
        const Tensor factor = each_row ? Tensor() : factor_of(in[0], target, state, options);
        variable_list gradients(3);
        for (size_t i = 0; i < gradients.size(); ++i) {
          if (!in.wants(i)) continue;
          const at::ScalarType wanted = parameters[i].scalar_type();
          gradients[i] = each_row ? found[i].to(wanted) : scaled(found[i], factor, wanted);
        }
        return gradients;
      });
  return {recorded, state};
}

/// Casts x and weight to the autocast dtype, and the bias unless it is float32. The loss of half
/// precision is float32 unless a dtype is given.
Call cast_call(const Autocast& cast, Call call) {
  auto& [x, weight, bias, softcap, temperature] = call.layer;
  check_tensors(kName, {{"x", x}, {"weight", weight}});
  x = cast(x);
  weight = cast(weight);
  if (bias && bias->scalar_type() != at::kFloat) bias = cast(bias);
  if (is_half(x.scalar_type()) && !call.dtype.has_value()) call.dtype = at::kFloat;
  return call;
}

struct Op {
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy(Tensor x, Tensor weight, Tensor target, "
      "Tensor? bias=None, *, Tensor? class_weight=None, int ignore_index=-100, "
      "str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? dtype=None, bool check_target=False, float? softcap=None, "
      "float temperature=1.0) -> Tensor";
  static constexpr auto meta = of_call<output>;
  static constexpr auto kernel = of_call<linear_cross_entropy_ops::kernel>;
  static constexpr auto composite = of_call<linear_cross_entropy_ops::composite>;
  static constexpr auto batched = of_call<linear_cross_entropy_ops::batched>;

  static Tensor recorded(const Below& below, const Tensor& x, const Tensor& weight,
                         const Tensor& target, const MaybeTensor& bias,
                         const MaybeTensor& class_weight, int64_t ignore_index,
                         LossReduction reduction, double label_smoothing, double z_loss,
                         MaybeDtype dtype, bool check_target, std::optional<double> softcap,
                         double temperature) {
    const Call call = as_call(x, weight, target, bias, class_weight, ignore_index, reduction,
                              label_smoothing, z_loss, dtype, check_target, softcap, temperature);
    return std::get<0>(recorded_forward(below, call, /*accuracy=*/false));
  }

  static Tensor autocast(const Autocast& cast, const Tensor& x, const Tensor& weight,
                         const Tensor& target, const MaybeTensor& bias,
                         const MaybeTensor& class_weight, int64_t ignore_index,
                         LossReduction reduction, double label_smoothing, double z_loss,
                         MaybeDtype dtype, bool check_target, std::optional<double> softcap,
                         double temperature) {
    const Call given = cast_call(
        cast, as_call(x, weight, target, bias, class_weight, ignore_index, reduction,
                      label_smoothing, z_loss, dtype, check_target, softcap, temperature));
    return call<Op>(given.layer.x, given.layer.weight, target, given.layer.bias, class_weight,
                    ignore_index, reduction, label_smoothing, z_loss, given.dtype, check_target,
                    softcap, temperature);
  }
};

// ---- the op with numbers for the log of a training run ----

Three with_metrics(const Tensor& loss, const Tensor& state, const Call& call, bool accuracy) {
  const at::NoGradGuard without_gradients;
  const auto [z, correct] = reduced_metrics(
      metrics_of_state(call.rows(), call.target, state, call.loss, accuracy), loss, call.loss);
  return {loss, z, correct};
}

template <auto function>
Three outputs_with_metrics(const Call& call, bool accuracy) {
  const auto [loss, state, of_x, of_weight, of_bias] = function(call, {}, accuracy);
  return with_metrics(loss, state, call, accuracy);
}

Three composite_with_metrics(const Tensor& logits, const Call& call, bool accuracy) {
  const Tensor loss = loss_of(logits, call);
  const auto [z, correct] = reduced_metrics(
      composite_metrics(logits.detach(), call.target.reshape({-1}), call.loss, accuracy),
      loss.detach(), call.loss);
  return {loss, z, correct};
}

Three metrics_composite(const Call& call, bool accuracy) {
  return composite_with_metrics(logits_in(product_dtype(call), call), call, accuracy);
}
Three metrics_batched(const Call& call, bool accuracy) {
  return composite_with_metrics(logits_in(compute_dtype(product_dtype(call)), call), call,
                                accuracy);
}

struct WithMetrics {
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy_with_metrics(Tensor x, Tensor weight, Tensor target, "
      "Tensor? bias=None, *, Tensor? class_weight=None, int ignore_index=-100, "
      "str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? dtype=None, bool check_target=False, float? softcap=None, "
      "float temperature=1.0, bool accuracy=False) -> (Tensor, Tensor, Tensor)";
  static constexpr auto meta = of_call<outputs_with_metrics<forward_outputs>, bool>;
  static constexpr auto kernel = of_call<outputs_with_metrics<forward>, bool>;
  static constexpr auto composite = of_call<metrics_composite, bool>;
  static constexpr auto batched = of_call<metrics_batched, bool>;

  static Three recorded(const Below& below, const Tensor& x, const Tensor& weight,
                        const Tensor& target, const MaybeTensor& bias,
                        const MaybeTensor& class_weight, int64_t ignore_index,
                        LossReduction reduction, double label_smoothing, double z_loss,
                        MaybeDtype dtype, bool check_target, std::optional<double> softcap,
                        double temperature, bool accuracy) {
    const Call call = as_call(x, weight, target, bias, class_weight, ignore_index, reduction,
                              label_smoothing, z_loss, dtype, check_target, softcap, temperature);
    const auto [loss, state] = recorded_forward(below, call, accuracy);
    return with_metrics(loss, state, call, accuracy);
  }

  static Three autocast(const Autocast& cast, const Tensor& x, const Tensor& weight,
                        const Tensor& target, const MaybeTensor& bias,
                        const MaybeTensor& class_weight, int64_t ignore_index,
                        LossReduction reduction, double label_smoothing, double z_loss,
                        MaybeDtype dtype, bool check_target, std::optional<double> softcap,
                        double temperature, bool accuracy) {
    const Call given = cast_call(
        cast, as_call(x, weight, target, bias, class_weight, ignore_index, reduction,
                      label_smoothing, z_loss, dtype, check_target, softcap, temperature));
    return call<WithMetrics>(given.layer.x, given.layer.weight, target, given.layer.bias,
                             class_weight, ignore_index, reduction, label_smoothing, z_loss,
                             given.dtype, check_target, softcap, temperature, accuracy);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op, WithMetrics>(m); }

}  // namespace torchkiln::linear_cross_entropy_ops

namespace torchkiln {

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& target, const MaybeTensor& bias,
                                const LinearCrossEntropyOptions& options) {
  return call<linear_cross_entropy_ops::Op>(
      x, weight, target, bias, options.class_weight, options.ignore_index,
      InSchema<LossReduction>::read("linear_cross_entropy", options.reduction),
      options.label_smoothing, options.z_loss, options.dtype, options.check_target, options.softcap,
      options.temperature);
}

}  // namespace torchkiln
