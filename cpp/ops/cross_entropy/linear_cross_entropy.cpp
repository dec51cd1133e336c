#include "cross_entropy/composite.h"
#include "cross_entropy/linear.h"
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
  const Tensor number = factor.view({1});
  if (!Below(detail::keys_of(gradient, factor)).is_plain())
    return at::mul_out(found, gradient, number);
  launch_elementwise(
      kName, std::array{found}, std::array{gradient, number},
      [](const auto& p, auto stream) { return cuda::multiply_shift(p, /*shift=*/0, stream); },
      [](const auto& p, int64_t begin, int64_t end) {
        return cpu::multiply_shift(p, /*shift=*/0, begin, end);
      });
  return found;
}

/// The op with torch's own ops; `product` is the dtype of the matrix product.
Tensor composite_in(at::ScalarType product, const Call& call) {
  check(kName, call);
  check_classes_if_asked(call);
  const auto& [x, weight, bias, softcap, temperature] = call.layer;
  const bool adds = bias && bias->scalar_type() == product;
  Tensor logits = at::linear(x.to(product), weight.to(product), adds ? bias : std::nullopt);
  if (bias && !adds) logits = logits + bias->to(compute_dtype(product));
  logits = as_matrix(logits);
  if (softcap) logits = capped(kName, logits, *softcap);
  if (temperature != 1) logits = logits.to(compute_dtype(product)) / temperature;
  const Tensor loss =
      composite_loss(logits, call.target.reshape({-1}), call.loss, call.loss_dtype());
  return loss.reshape_symint(call.loss.reduction == LossReduction::none ? call.target.sym_sizes()
                                                                        : c10::SymIntArrayRef());
}

Tensor composite(const Call& call) { return composite_in(call.layer.x.scalar_type(), call); }

/// vmap splits off the bias, after a product rounded to x's dtype: so the product is float32 here.
Tensor batched(const Call& call) {
  return composite_in(compute_dtype(call.layer.x.scalar_type()), call);
}

Tensor output(const Call& call) { return std::get<0>(forward_outputs(call, {})); }
Tensor kernel(const Call& call) { return std::get<0>(forward(call, {})); }

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
    const bool each = reduction == LossReduction::none;
    const auto needs = [&](const Tensor& t) { return !each && t.defined() && t.requires_grad(); };
    const Tensor shift = tensor_or_undefined(bias), factors = tensor_or_undefined(class_weight);
    const auto [loss, state, of_x, of_weight, of_bias] = below.call<Forward>(
        x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss,
        dtype, check_target, softcap, temperature, Wanted{needs(x), needs(weight), needs(shift)});
    TORCH_CHECK(!(factors.defined() && factors.requires_grad()), "torchkiln.", kName,
                ": class_weight: got a tensor that requires a gradient, expected one that does "
                "not: the loss has none with respect to class weights; pass class_weight.detach()");
    return record(
        kName, {x, weight, shift}, loss,
        keep(x, weight, shift, target, factors, state, of_x, of_weight, of_bias),
        [=](const Incoming& in, const Kept<9>& kept) {
          const auto& [x, weight, bias, target, factors, state, of_x, of_weight, of_bias] = kept;
          if (in.needs_composite()) {
            return composite_gradients(
                in, std::array{x, weight, bias},
                [&, &target = target, &factors = factors](const auto& inputs) {
                  return composite(inputs[0], inputs[1], target, maybe(inputs[2]), maybe(factors),
                                   ignore_index, reduction, label_smoothing, z_loss, dtype,
                                   /*check_target=*/false, softcap, temperature);
                });
          }
          const std::array parameters{x, weight, bias};
          std::array found{of_x, of_weight, of_bias};
          if (each) {
            std::tie(found[0], found[1], found[2]) = call_below<Backward>(
                x, weight, target, maybe(bias), maybe(factors), ignore_index, reduction,
                label_smoothing, z_loss, dtype, /*check_target=*/false, softcap, temperature, in[0],
                state, Wanted{in.wants(0), in.wants(1), in.wants(2)});
          }
          const Tensor factor =
              each ? Tensor() : factor_of(in[0], target, state, ignore_index, reduction);
          variable_list gradients(3);
          for (size_t i = 0; i < gradients.size(); ++i) {
            if (!in.wants(i)) continue;
            const at::ScalarType wanted = parameters[i].scalar_type();
            gradients[i] = each ? found[i].to(wanted) : scaled(found[i], factor, wanted);
          }
          return gradients;
        });
  }

  /// The number by which the gradients of the sum of the losses are multiplied.
  static Tensor factor_of(const Tensor& grad, const Tensor& target, const Tensor& state,
                          int64_t ignore_index, LossReduction reduction) {
    const Tensor factor = grad.to(state.scalar_type());
    if (reduction != LossReduction::mean) return factor;
    // The gradients of ignored rows are 0, also if the divisor is.
    const Tensor none_counts = target.eq(ignore_index).all();
    return (factor / state.narrow(0, -1, 1)).masked_fill(none_counts, 0);
  }

  /// Casts x and weight to the autocast dtype, and the bias unless it is float32. The loss of half
  /// precision is float32 unless a dtype is given.
  static Tensor autocast(const Autocast& cast, const Tensor& x, const Tensor& weight,
                         const Tensor& target, const MaybeTensor& bias,
                         const MaybeTensor& class_weight, int64_t ignore_index,
                         LossReduction reduction, double label_smoothing, double z_loss,
                         MaybeDtype dtype, bool check_target, std::optional<double> softcap,
                         double temperature) {
    check_tensors(kName, {{"x", x}, {"weight", weight}});
    const bool reads_bias = !bias || bias->scalar_type() == at::kFloat;
    const Tensor half = cast(x);
    if (is_half(half.scalar_type()) && !dtype.has_value()) dtype = at::kFloat;
    return call<Op>(half, cast(weight), target, reads_bias ? bias : cast(bias), class_weight,
                    ignore_index, reduction, label_smoothing, z_loss, dtype, check_target, softcap,
                    temperature);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op>(m); }

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
