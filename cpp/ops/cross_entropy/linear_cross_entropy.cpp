// cross_entropy() of the outputs of a linear layer, a chunk of rows at a time. Forward computes the
// logits of a chunk and, if gradients are wanted, replaces them at once by the gradient of the sum
// of the losses, from which it makes those of x, weight and bias. Backward multiplies them by a
// number.
// Losses per row have a gradient each, which no later factor can stand for: their backward computes
// the chunks again.

#include <limits>

#include "cross_entropy/composite.h"
#include "cross_entropy/linear_chunks.h"
#include "detail/check_linear.h"
#include "matmul/kernel.h"
#include "torchkiln/kernels/pointwise.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"

namespace torchkiln::linear_cross_entropy_ops {
namespace {

using at::Tensor;
using MaybeDtype = std::optional<at::ScalarType>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 3>;  // the gradients of x, weight and bias

constexpr const char* kName = "linear_cross_entropy";

/// The arguments of a call.
struct Call {
  LogitLayer layer;  // x of any shape
  Tensor target;
  LossCall loss;
  MaybeDtype dtype;
  bool check_target;

  c10::SymInt rows() const { return target.sym_numel(); }
  at::ScalarType loss_dtype() const { return dtype.value_or(layer.x.scalar_type()); }
};

/// Adapts a function on a Call, and further arguments, to the arguments of the op.
template <auto function, class... More>
auto of_call(const Tensor& x, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
             const MaybeTensor& class_weight, int64_t ignore_index, LossReduction reduction,
             double label_smoothing, double z_loss, MaybeDtype dtype, bool check_target,
             std::optional<double> softcap, double temperature, More... more) {
  return function({{x, weight, bias, softcap, temperature},
                   target,
                   {class_weight, ignore_index, reduction, label_smoothing, z_loss},
                   dtype,
                   check_target},
                  more...);
}

void check(const char* op, const Call& call) {
  const auto& [x, weight, bias, softcap, temperature] = call.layer;
  check_linear(op, x, weight, bias);
  TORCH_CHECK(weight.sym_size(0) != 0, "torchkiln.", op, ": weight: got shape ", weight.sym_sizes(),
              ", expected at least 1 row: a class");
  check_tensors(op, {{"x", x}, {"target", call.target}});
  TORCH_CHECK(call.target.scalar_type() == at::kLong, "torchkiln.", op, ": target: got dtype ",
              dtype_name(call.target.scalar_type()),
              ", expected int64, of classes; for probabilities call cross_entropy(linear(x, "
              "weight, bias), target)");
  const c10::SymIntArrayRef rows = x.sym_sizes().slice(0, x.dim() - 1);
  TORCH_CHECK(call.target.sym_sizes().equals(rows), "torchkiln.", op, ": target: got shape ",
              call.target.sym_sizes(), ", expected ", rows, " for x of shape ", x.sym_sizes(),
              ": a class for each row");
  if (call.loss.weight) {
    const Tensor& each = *call.loss.weight;
    check_tensors(op, {{"x", x}, {"class_weight", each}});
    check_parameter_dtype(op, "class_weight", each.scalar_type(), "x", x.scalar_type());
    check_vector(op, "class_weight", each, weight.sym_size(0), "the first size of weight");
  }
  check_loss_numbers(op, call.loss, call.dtype);
  if (softcap) check_softcap(op, *softcap);
  check_temperature(op, temperature);
}

void check_classes_if_asked(const Call& call) {
  if (call.check_target && !call.target.is_meta())
    check_classes(kName, call.target, call.layer.weight.size(0), call.loss.ignore_index);
}

/// The same call with x and target as rows, and class weights that the kernels need not convert.
Call in_rows(const Call& call) {
  Call flat = call;
  flat.layer.x = as_matrix(call.layer.x);
  flat.target = call.target.reshape({-1});
  if (call.loss.weight)
    flat.loss.weight = call.loss.weight->to(compute_dtype(flat.layer.x.scalar_type()));
  return flat;
}

/// Uninitialised gradients of x, weight and bias.
Three empty_gradients(const LogitLayer& layer, Wanted wanted) {
  const at::ScalarType dtype = layer.x.scalar_type();
  const auto like = [&](bool is_wanted, const Tensor& parameter, at::ScalarType of) {
    return is_wanted ? empty_of(parameter.sym_sizes(), layer.x.options().dtype(of))
                     : no_output(layer.x);
  };
  return {wanted[0] ? empty_contiguous(layer.x) : no_output(layer.x),
          like(wanted[1], layer.weight, weight_gradient_dtype(dtype)),
          like(wanted[2], layer.bias.value_or(layer.x), compute_dtype(dtype))};
}

/// All but the weight, whose gradient is allocated once the logits are freed.
Wanted without_weight(const Wanted& wanted) { return {wanted[0], false, wanted[2]}; }

/// Calls body(logits, gradients, rows) for each chunk. Returns the gradient of the weight, if it is
/// wanted.
template <class Body>
Tensor for_each_chunk_of_logits(const LogitLayer& layer, const Wanted& wanted, const Tensor& grad_x,
                                const Tensor& grad_bias, const Body& body) {
  const bool may_be_whole =
      wanted[1] && layer.x.scalar_type() == at::kBFloat16 && has_exact_gradient(layer.weight);
  const int64_t rows = layer.x.size(0), size = rows_per_chunk(layer, may_be_whole);
  LayerGradients gradients{wanted[0] ? as_matrix(grad_x) : Tensor(), Tensor(),
                           wanted[2] ? grad_bias : Tensor()};
  {
    ChunkLogits logits(kName, layer, size);
    if (wanted[1]) gradients.weight = empty_weight_sum(logits.layer().weight, size == rows);
    for_each_chunk(rows, size, [&](const Rows& chunk) { body(logits, gradients, chunk); });
  }
  return wanted[1] ? weight_gradient(gradients.weight, layer.weight) : Tensor();
}

// ---- forward: the loss, the state of each row and the gradients of the sum of the losses ----

Five forward_outputs(const Call& call, Wanted wanted) {
  check(kName, call);
  const Tensor& x = call.layer.x;
  const bool each = call.loss.reduction == LossReduction::none;
  const c10::SymIntArrayRef shape = each ? call.target.sym_sizes() : c10::SymIntArrayRef();
  const int64_t divisors = call.loss.reduction == LossReduction::mean ? 1 : 0;
  const auto with = [&](at::ScalarType dtype) { return x.options().dtype(dtype); };
  return std::tuple_cat(
      std::tuple{empty_of(shape, with(call.loss_dtype())),
                 empty_of({call.rows() * 3 + divisors}, with(compute_dtype(x.scalar_type())))},
      empty_gradients(call.layer, wanted));
}

Five forward(const Call& call, Wanted wanted) {
  const int64_t rows = call.target.numel();
  Five outputs = forward_outputs(call, rows == 0 ? wanted : without_weight(wanted));
  auto& [loss, state, grad_x, grad_weight, grad_bias] = outputs;
  const LossReduction reduction = call.loss.reduction;
  check_classes_if_asked(call);
  if (rows == 0) {
    for (const Tensor& each : {state, grad_x, grad_weight, grad_bias}) each.zero_();
    loss.fill_(reduction == LossReduction::mean ? std::numeric_limits<double>::quiet_NaN() : 0);
    return outputs;
  }
  const Call flat = in_rows(call);
  const Tensor losses = at::empty({rows}, state.options());
  const Tensor factor = at::full({}, 1 / call.layer.temperature, state.options());
  LossCall sum = flat.loss;
  sum.reduction = LossReduction::sum;
  const Tensor of_weight = for_each_chunk_of_logits(
      flat.layer, wanted, grad_x, grad_bias,
      [&, &state = state](ChunkLogits& logits, const LayerGradients& gradients, const Rows& chunk) {
        const RowState kept = row_state(state, rows, sum.reduction, chunk.begin);
        const Tensor target = chunk.of(flat.target);
        run_forward(kName, logits.compute(chunk), target, sum, chunk.of(losses), kept, false);
        if (!gradients.any()) return;
        gradients.add(logits.layer(), chunk,
                      logits.differentiate(kName, factor, target, sum, kept));
      });
  if (wanted[1]) grad_weight = of_weight;
  if (reduction == LossReduction::none) {
    loss.copy_(losses.view(loss.sizes()));
  } else {
    const RowState kept = row_state(state, rows, reduction);
    run_sum(kName, flat.layer.x, sum_arguments(flat.layer.x, call.loss, losses, kept, loss));
  }
  return outputs;
}

struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor target, "
      "Tensor? bias, Tensor? class_weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, ScalarType? dtype, bool check_target, "
      "float? softcap, float temperature, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor)";
  static constexpr auto meta = of_call<forward_outputs, Wanted>;
  static constexpr auto kernel = of_call<forward, Wanted>;
};

// ---- backward of losses per row ----

Three backward_outputs(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted) {
  constexpr const char* kBackward = "linear_cross_entropy_backward";
  check(kBackward, call);
  check_tensors(kBackward, {{"x", call.layer.x}, {"grad", grad}, {"state", state}});
  check_dtype(kBackward, "grad", grad);
  check_same_shape(kBackward, "grad", grad, "target", call.target);
  check_vector(kBackward, "state", state, call.rows() * 3, "the numbers of each row");
  return empty_gradients(call.layer, wanted);
}

Three backward(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted) {
  const int64_t rows = call.target.numel();
  Three outputs = backward_outputs(call, grad, state, rows == 0 ? wanted : without_weight(wanted));
  auto& [grad_x, grad_weight, grad_bias] = outputs;
  if (rows == 0) {
    for (const Tensor& each : {grad_x, grad_weight, grad_bias}) each.zero_();
    return outputs;
  }
  const Call flat = in_rows(call);
  const double temperature = call.layer.temperature;
  Tensor grads = grad.reshape({-1});
  if (temperature != 1) grads = grads.to(state.scalar_type()) / temperature;
  const Tensor of_weight = for_each_chunk_of_logits(
      flat.layer, wanted, grad_x, grad_bias,
      [&](ChunkLogits& logits, const LayerGradients& gradients, const Rows& chunk) {
        logits.compute(chunk);
        const RowState kept = row_state(state, rows, flat.loss.reduction, chunk.begin);
        const Tensor& of_logits =
            logits.differentiate(kName, chunk.of(grads), chunk.of(flat.target), flat.loss, kept);
        gradients.add(logits.layer(), chunk, of_logits);
      });
  if (wanted[1]) grad_weight = of_weight;
  return outputs;
}

struct Backward {
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor target, "
      "Tensor? bias, Tensor? class_weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, ScalarType? dtype, bool check_target, "
      "float? softcap, float temperature, Tensor grad, Tensor state, bool[3] wanted) "
      "-> (Tensor, Tensor, Tensor)";
  static constexpr auto meta = of_call<backward_outputs, const Tensor&, const Tensor&, Wanted>;
  static constexpr auto kernel = of_call<backward, const Tensor&, const Tensor&, Wanted>;
};

// ---- the op ----

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
