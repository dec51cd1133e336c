// linear_fp8 and gated_linear_fp8: a product of E4M3 tensors with three quantisations around it.
// The gradients are those of the quantised product with respect to its dequantised operands, passed
// straight through the rounding. For backward x is saved in E4M3. If forward quantises x, it saves
// the transposed matrix with scales of squares, so that x is read once. Else it saves x as given,
// and backward transposes it.

#include "quantize/quantize.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::quantize_ops {
namespace {

struct Call {
  Borrowed<Tensor> x, weight;
  Borrowed<MaybeTensor> bias, scale, source;
  Borrowed<MaybeTensor> weight_data, weight_scale, weight_transposed, weight_transposed_scale;
  const char* op = kLinear;

  TORCHKILN_FIELDS(self.x, self.weight, self.bias, self.scale, self.source, self.weight_data,
                   self.weight_scale, self.weight_transposed, self.weight_transposed_scale);
};

/// The dtype of the result and of the gradient of x. x itself may be E4M3.
at::ScalarType result_dtype(const Call& call) {
  const MaybeTensor& source = call.source;
  if (source) return source->scalar_type();
  return call.scale ? call.weight->scalar_type() : call.x->scalar_type();
}

void check_prepared(const Call& call) {
  const MaybeTensor& data = call.weight_data;
  TORCH_CHECK(data && call.weight_scale && call.weight_transposed && call.weight_transposed_scale,
              "torchkiln.", call.op,
              ": quantized: got some of its tensors, expected the result of "
              "torchkiln.quantize_weight()");
  const Tensor& weight = call.weight;
  TORCH_CHECK(data->scalar_type() == kFp8 && data->sym_sizes().equals(weight.sym_sizes()),
              "torchkiln.", call.op, ": quantized: got ", dtype_name(data->scalar_type()), " ",
              data->sym_sizes(), ", expected float8_e4m3fn ", weight.sym_sizes(),
              ", the shape of weight");
  const c10::SymInt n = weight.sym_size(0), k = weight.sym_size(1);
  const c10::SymInt squares_n = (n + 127) / 128, squares_k = (k + 127) / 128;
  const auto check = [&](const MaybeTensor& part, at::ScalarType dtype, const c10::SymInt& rows,
                         const c10::SymInt& columns) {
    const bool fits = part->scalar_type() == dtype && part->dim() == 2 &&
                      part->sym_size(0) == rows && part->sym_size(1) == columns;
    TORCH_CHECK(fits, "torchkiln.", call.op, ": quantized: got ", dtype_name(part->scalar_type()),
                " ", part->sym_sizes(), ", expected ", dtype_name(dtype), " [", rows, ", ", columns,
                "], from torchkiln.quantize_weight(weight)");
  };
  check(call.weight_scale, at::kFloat, squares_n, squares_k);
  check(call.weight_transposed, kFp8, k, n);
  check(call.weight_transposed_scale, at::kFloat, squares_k, squares_n);
}

/// Checks the arguments, and returns the shape of the result.
c10::SymDimVector checked_shape(const Call& call) {
  const Tensor &x = call.x, &weight = call.weight;
  const MaybeTensor &bias = call.bias, &source = call.source;
  check_tensors(call.op, {{"x", x}, {"weight", weight}});
  const auto check_floating = [&](const char* name, const Tensor& tensor) {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || is_half(dtype), "torchkiln.", call.op, ": ", name,
                ": got dtype ", dtype_name(dtype), ", expected one of float32, float16, bfloat16");
  };
  if (call.scale) {
    check_quantized_rows(call.op, "x", x, "scale", *call.scale);
  } else {
    check_floating("x", x);
  }
  check_floating("weight", weight);
  check_not_0_dim(call.op, "x", x);
  check_rank(call.op, "weight", weight, 2, 2, "[n, k]");
  check_size(call.op, "weight", weight, 1, x.sym_size(-1), "the last size of x");
  if (source) {
    check_tensors(call.op, {{"x", x}, {"source", *source}});
    check_floating("source", *source);
    check_same_shape(call.op, "source", *source, "x", x);
  }
  const at::ScalarType dtype = result_dtype(call);
  if (bias) {
    check_tensors(call.op, {{"x", x}, {"bias", *bias}});
    check_parameter_dtype(call.op, "bias", bias->scalar_type(), "the result", dtype);
    check_vector(call.op, "bias", *bias, weight.sym_size(0), "the rows of weight");
  }
  if (call.weight_data || call.weight_scale || call.weight_transposed ||
      call.weight_transposed_scale)
    check_prepared(call);
  c10::SymDimVector shape(x.sym_sizes());
  shape.back() = weight.sym_size(0);
  return shape;
}

/// The weight in E4M3: the given one, or the weight quantised.
Four weight_of(const Call& call) {
  if (!call.weight_data) return call_below<WeightOp>(*call.weight);
  return {*call.weight_data, *call.weight_scale, *call.weight_transposed,
          *call.weight_transposed_scale};
}

/// The tensor that receives the gradient of x.
Tensor receiver_of(const Call& call) {
  return call.scale ? tensor_or_undefined(call.source) : *call.x;
}

/// The factors in E4M3: x, the weight, and the form of x that is saved for backward.
struct Factors {
  Two x, kept_x;
  Four weight;

  Tensor product(const MaybeTensor& bias, at::ScalarType dtype) const {
    return call_below<ProductOp>(std::get<0>(x), std::get<1>(x), std::get<0>(weight),
                                 std::get<1>(weight), /*square=*/true, bias, dtype);
  }
  Kept<4> kept() const {
    return keep(std::get<0>(kept_x), std::get<1>(kept_x), std::get<2>(weight), std::get<3>(weight));
  }
};

Factors factors_of(const Call& call, bool keeps_x) {
  Two x, kept;
  if (call.scale) {
    x = kept = {*call.x, *call.scale};
  } else if (keeps_x) {
    const auto [data, scale, turned, turned_scale] = call_below<BothOp>(*call.x, /*square=*/true);
    x = {data, scale};
    kept = {turned, turned_scale};
  } else {
    x = call_below<QuantizeOp>(*call.x);
  }
  return {x, kept, weight_of(call)};
}

/// The gradients of x and weight.
struct Rule {
  bool is_quantized;  // x is kept as it was given
  at::ScalarType dtype, weight_dtype;

  /// `kept`: see Factors::kept(). rows() returns the gradient of the product in E4M3, both() also
  /// its transposed matrix.
  template <class Rows, class Both>
  variable_list gradients(const Incoming& in, const Kept<4>& kept, const Rows& rows,
                          const Both& both) const {
    auto [x, x_scale, turned, turned_scale] = kept;
    Tensor data, scale, columns, columns_scale, grad_x, grad_weight;
    if (in.wants(1)) {
      std::tie(data, scale, columns, columns_scale) = both();
    } else if (in.wants(0)) {
      std::tie(data, scale) = rows();
    }
    if (in.wants(0))
      grad_x = call_below<ProductOp>(data, scale, turned, turned_scale, /*square=*/true,
                                     MaybeTensor(), dtype);
    if (in.wants(1)) {
      if (is_quantized) std::tie(x, x_scale) = call_below<TransposeOp>(x, x_scale, true);
      grad_weight = call_below<ProductOp>(columns, columns_scale, x, x_scale, /*square=*/true,
                                          MaybeTensor(), weight_dtype);
    }
    return {grad_x, grad_weight};
  }
};

Rule rule_of(const Call& call) {
  return {call.scale.has_value(), result_dtype(call), call.weight->scalar_type()};
}

void refuse_second_derivative(const char* op, const Incoming& in) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !in.needs_composite(), "torchkiln.", op,
      ": got a second derivative (create_graph=True) or batched gradients "
      "(is_grads_batched=True), expected one backward: rounding to float8_e4m3fn has no "
      "derivative; use torchkiln.linear");
}

/// The sum of a gradient over its rows.
Tensor summed(const Tensor& grad, at::ScalarType dtype) {
  if (grad.dim() == 1) return grad.to(dtype);
  c10::SmallVector<int64_t, 4> over;
  for (int64_t d = 0; d + 1 < grad.dim(); ++d) over.push_back(d);
  return torchkiln::sum(grad, at::IntArrayRef(over), false, dtype);
}

/// Calls the op with x in the autocast dtype, as torch does. The weight is not cast, so its scales
/// keep their precision.
template <class Op, class Arguments>
auto call_with_cast(const Autocast& cast, const Arguments& call) {
  check_tensors(call.op, {{"x", call.x}, {"weight", call.weight}});
  Arguments given = call;
  const Tensor x = call.scale ? *call.x : cast(*call.x);
  const MaybeTensor& own_source = call.source;
  const MaybeTensor source = cast(own_source);
  given.x = x;
  given.source = source;
  const MaybeTensor& own_bias = call.bias;
  const bool reads_bias = !own_bias || own_bias->scalar_type() == at::kFloat;
  const MaybeTensor bias = reads_bias ? own_bias : cast(own_bias);
  given.bias = bias;
  return torchkiln::call<Op>(given);
}

struct LinearFp8 {
  static constexpr const char* kSchema =
      "torchkiln::linear_fp8(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, "
      "Tensor? source=None, Tensor? weight_data=None, Tensor? weight_scale=None, "
      "Tensor? weight_transposed=None, Tensor? weight_transposed_scale=None) -> Tensor";

  static Tensor meta(const Call& call) {
    return empty_of(checked_shape(call), call.x->options().dtype(result_dtype(call)));
  }

  static Tensor kernel(const Call& call) {
    checked_shape(call);
    const MaybeTensor& bias = call.bias;
    return factors_of(call, /*keeps_x=*/false).product(bias, result_dtype(call));
  }

  static Tensor composite(const Call& call) {
    checked_shape(call);
    refuse_transform(kLinear);
  }

  static Tensor recorded(const Below&, const Call& call) {
    checked_shape(call);
    const at::ScalarType dtype = result_dtype(call);
    const Factors factors = factors_of(call, call.weight->requires_grad());
    const MaybeTensor& bias = call.bias;
    Tensor out = factors.product(bias, dtype);
    const Tensor shift = tensor_or_undefined(bias);
    const auto bias_dtype = shift.defined() ? shift.scalar_type() : dtype;
    return record(kLinear, {receiver_of(call), *call.weight, shift}, std::move(out), factors.kept(),
                  [=, rule = rule_of(call)](const Incoming& in, const Kept<4>& kept) {
                    refuse_second_derivative(kLinear, in);
                    const Tensor& grad = in[0];
                    variable_list found = rule.gradients(
                        in, kept, [&] { return call_below<QuantizeOp>(grad); },
                        [&] { return call_below<BothOp>(grad, false); });
                    found.push_back(in.wants(2) ? summed(grad, bias_dtype) : Tensor());
                    return found;
                  });
  }

  static Tensor autocast(const Autocast& cast, const Call& call) {
    return call_with_cast<LinearFp8>(cast, call);
  }
};

/// act(gate) * up in E4M3 for [gate, up] = x weight^T. Its gradient goes to both products of
/// backward in E4M3, without a tensor in floating point.
struct GatedLinearFp8 {
  struct Arguments : Call {
    Gate act;

    void complete() { op = "gated_linear_fp8"; }
    TORCHKILN_FIELDS(self.x, self.weight, self.act, self.scale, self.source, self.weight_data,
                     self.weight_scale, self.weight_transposed, self.weight_transposed_scale);
  };
  static constexpr const char* kSchema =
      "torchkiln::gated_linear_fp8(Tensor x, Tensor weight, str act=\"silu\", "
      "Tensor? scale=None, Tensor? source=None, Tensor? weight_data=None, "
      "Tensor? weight_scale=None, Tensor? weight_transposed=None, "
      "Tensor? weight_transposed_scale=None) -> (Tensor, Tensor, Tensor)";

  static c10::SymDimVector checked_packed_shape(const Arguments& call) {
    c10::SymDimVector shape = checked_shape(call);
    TORCH_CHECK(shape.back() % 2 == 0, "torchkiln.", call.op, ": weight: got ", shape.back(),
                " rows, expected an even number: those of gate and of up");
    return shape;
  }

  static Three meta(const Arguments& call) {
    c10::SymDimVector shape = checked_packed_shape(call);
    shape.back() = shape.back() / 2;
    const Tensor like = empty_of(shape, call.x->options().dtype(result_dtype(call)));
    return std::tuple_cat(empty_quantized(shape, like),
                          std::tuple{stand_in(shape, like.options())});
  }

  static Three kernel(const Arguments& call) {
    checked_packed_shape(call);
    const Tensor packed =
        factors_of(call, /*keeps_x=*/false).product(MaybeTensor(), result_dtype(call));
    return call_below<GatedOp>(packed, MaybeTensor(), call.act);
  }

  static Three composite(const Arguments& call) {
    checked_packed_shape(call);
    refuse_transform(call.op);
  }

  static Three recorded(const Below&, const Arguments& call) {
    checked_packed_shape(call);
    const Factors factors = factors_of(call, call.weight->requires_grad());
    const Tensor packed = factors.product(MaybeTensor(), result_dtype(call));
    const auto [data, scale, source] = call_below<GatedOp>(packed, MaybeTensor(), call.act);
    const auto [x, x_scale, weight, weight_scale] = factors.kept();
    return {data, scale,
            record(call.op, {receiver_of(call), *call.weight}, source,
                   keep(x, x_scale, weight, weight_scale, packed),
                   [rule = rule_of(call), act = call.act, op = call.op](const Incoming& in,
                                                                        const Kept<5>& kept) {
                     refuse_second_derivative(op, in);
                     const auto& [x, x_scale, weight, weight_scale, packed] = kept;
                     const auto both = [&] {
                       return call_below<GatedGradientOp>(in[0], packed, act);
                     };
                     const auto rows = [&] {
                       const auto [data, scale, transposed, transposed_scale] = both();
                       return Two{data, scale};
                     };
                     return rule.gradients(in, keep(x, x_scale, weight, weight_scale), rows, both);
                   })};
  }

  static Three autocast(const Autocast& cast, const Arguments& call) {
    return call_with_cast<GatedLinearFp8>(cast, call);
  }
};

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<LinearFp8, GatedLinearFp8>(m); }

}  // namespace
}  // namespace torchkiln::quantize_ops

namespace torchkiln {

at::Tensor linear_fp8(const at::Tensor& x, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const LinearFp8Options& options) {
  return call<quantize_ops::LinearFp8>(x, weight, bias, options);
}

}  // namespace torchkiln
