// linear_fp8: a product of E4M3 tensors with three quantisations around it. The gradients are those
// of the quantised product with respect to its dequantised operands, passed straight through the
// rounding. Backward keeps x in E4M3: transposed, if forward quantises x, so that x is read once;
// else as given, and backward transposes it.

#include "quantize/quantize.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::quantize_ops {
namespace {

struct Call {
  Borrowed<Tensor> x, weight;
  Borrowed<MaybeTensor> bias, scale, source;
  Borrowed<MaybeTensor> weight_data, weight_scale, weight_transposed, weight_transposed_scale;

  TORCHKILN_FIELDS(self.x, self.weight, self.bias, self.scale, self.source, self.weight_data,
                   self.weight_scale, self.weight_transposed, self.weight_transposed_scale);
};

/// The dtype of the result and of the gradient of x: x may be E4M3.
at::ScalarType result_dtype(const Call& call) {
  const MaybeTensor& source = call.source;
  if (source) return source->scalar_type();
  return call.scale ? call.weight->scalar_type() : call.x->scalar_type();
}

void check_prepared(const Call& call) {
  const MaybeTensor& data = call.weight_data;
  TORCH_CHECK(data && call.weight_scale && call.weight_transposed && call.weight_transposed_scale,
              "torchkiln.", kLinear,
              ": quantized: got some of its tensors, expected the result of "
              "torchkiln.quantize_weight()");
  const Tensor& weight = call.weight;
  TORCH_CHECK(data->scalar_type() == kFp8 && data->sym_sizes().equals(weight.sym_sizes()),
              "torchkiln.", kLinear, ": quantized: got ", dtype_name(data->scalar_type()), " ",
              data->sym_sizes(), ", expected float8_e4m3fn ", weight.sym_sizes(),
              ", the shape of weight");
  const c10::SymInt n = weight.sym_size(0), k = weight.sym_size(1);
  const c10::SymInt squares_n = (n + 127) / 128, squares_k = (k + 127) / 128;
  const auto check = [&](const MaybeTensor& part, at::ScalarType dtype, const c10::SymInt& rows,
                         const c10::SymInt& columns) {
    const bool fits = part->scalar_type() == dtype && part->dim() == 2 &&
                      part->sym_size(0) == rows && part->sym_size(1) == columns;
    TORCH_CHECK(fits, "torchkiln.", kLinear, ": quantized: got ", dtype_name(part->scalar_type()),
                " ", part->sym_sizes(), ", expected ", dtype_name(dtype), " [", rows, ", ", columns,
                "], from torchkiln.quantize_weight(weight)");
  };
  check(call.weight_scale, at::kFloat, squares_n, squares_k);
  check(call.weight_transposed, kFp8, k, n);
  check(call.weight_transposed_scale, at::kFloat, squares_k, squares_n);
}

/// The shape of the result.
c10::SymDimVector checked_shape(const Call& call) {
  const Tensor &x = call.x, &weight = call.weight;
  const MaybeTensor &bias = call.bias, &source = call.source;
  check_tensors(kLinear, {{"x", x}, {"weight", weight}});
  const auto check_floating = [](const char* name, const Tensor& tensor) {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || is_half(dtype), "torchkiln.", kLinear, ": ", name,
                ": got dtype ", dtype_name(dtype), ", expected one of float32, float16, bfloat16");
  };
  if (call.scale) {
    check_quantized_rows(kLinear, "x", x, "scale", *call.scale);
  } else {
    check_floating("x", x);
  }
  check_floating("weight", weight);
  check_not_0_dim(kLinear, "x", x);
  check_rank(kLinear, "weight", weight, 2, 2, "[n, k]");
  check_size(kLinear, "weight", weight, 1, x.sym_size(-1), "the last size of x");
  if (source) {
    check_tensors(kLinear, {{"x", x}, {"source", *source}});
    check_floating("source", *source);
    check_same_shape(kLinear, "source", *source, "x", x);
  }
  const at::ScalarType dtype = result_dtype(call);
  if (bias) {
    check_tensors(kLinear, {{"x", x}, {"bias", *bias}});
    check_parameter_dtype(kLinear, "bias", bias->scalar_type(), "the result", dtype);
    check_vector(kLinear, "bias", *bias, weight.sym_size(0), "the rows of weight");
  }
  if (call.weight_data || call.weight_scale || call.weight_transposed ||
      call.weight_transposed_scale)
    check_prepared(call);
  c10::SymDimVector shape(x.sym_sizes());
  shape.back() = weight.sym_size(0);
  return shape;
}

/// The weight in E4M3: as given, or quantised.
Four weight_of(const Call& call) {
  if (!call.weight_data) return call_below<WeightOp>(*call.weight);
  return {*call.weight_data, *call.weight_scale, *call.weight_transposed,
          *call.weight_transposed_scale};
}

/// A gradient summed over its rows.
Tensor summed(const Tensor& grad, at::ScalarType dtype) {
  if (grad.dim() == 1) return grad.to(dtype);
  c10::SmallVector<int64_t, 4> over;
  for (int64_t d = 0; d + 1 < grad.dim(); ++d) over.push_back(d);
  return torchkiln::sum(grad, at::IntArrayRef(over), false, dtype);
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
    Two rows{*call.x, tensor_or_undefined(call.scale)};
    if (!call.scale) rows = call_below<QuantizeOp>(*call.x);
    const auto weight = weight_of(call);
    const MaybeTensor& bias = call.bias;
    return call_below<ProductOp>(std::get<0>(rows), std::get<1>(rows), std::get<0>(weight),
                                 std::get<1>(weight), /*square=*/true, bias, result_dtype(call));
  }

  static Tensor composite(const Call& call) {
    checked_shape(call);
    refuse_transform(kLinear);
  }

  static Tensor recorded(const Below&, const Call& call) {
    checked_shape(call);
    const Tensor& given = call.x;
    const bool is_quantized = call.scale.has_value();
    const at::ScalarType dtype = result_dtype(call), weight_dtype = call.weight->scalar_type();
    Tensor data = given, scale = tensor_or_undefined(call.scale), kept, kept_scale;
    if (is_quantized) {
      kept = data;
      kept_scale = scale;
    } else if (call.weight->requires_grad()) {
      std::tie(data, scale, kept, kept_scale) = call_below<BothOp>(given);
    } else {
      std::tie(data, scale) = call_below<QuantizeOp>(given);
    }
    const auto [weight, weight_scale, transposed, transposed_scale] = weight_of(call);
    const MaybeTensor& bias = call.bias;
    Tensor out =
        call_below<ProductOp>(data, scale, weight, weight_scale, /*square=*/true, bias, dtype);
    const Tensor receiver = is_quantized ? tensor_or_undefined(call.source) : given;
    const Tensor shift = tensor_or_undefined(bias);
    const auto bias_dtype = shift.defined() ? shift.scalar_type() : dtype;
    return record(
        kLinear, {receiver, *call.weight, shift}, std::move(out),
        keep(kept, kept_scale, transposed, transposed_scale),
        [=](const Incoming& in, const Kept<4>& saved) {
          TORCH_CHECK_NOT_IMPLEMENTED(
              !in.needs_composite(), "torchkiln.", kLinear,
              ": got a second derivative (create_graph=True) or batched gradients "
              "(is_grads_batched=True), expected one backward: rounding to float8_e4m3fn has no "
              "derivative; use torchkiln.linear");
          auto [x, x_scale, turned, turned_scale] = saved;
          const Tensor& grad = in[0];
          Tensor rows, rows_scale, columns, columns_scale, grad_x, grad_weight, grad_bias;
          if (in.wants(1)) {
            std::tie(rows, rows_scale, columns, columns_scale) = call_below<BothOp>(grad);
          } else if (in.wants(0)) {
            std::tie(rows, rows_scale) = call_below<QuantizeOp>(grad);
          }
          if (in.wants(0))
            grad_x = call_below<ProductOp>(rows, rows_scale, turned, turned_scale,
                                           /*square=*/true, MaybeTensor(), dtype);
          if (in.wants(1)) {
            if (is_quantized) std::tie(x, x_scale) = call_below<TransposeOp>(x, x_scale);
            grad_weight = call_below<ProductOp>(columns, columns_scale, x, x_scale,
                                                /*square=*/false, MaybeTensor(), weight_dtype);
          }
          if (in.wants(2)) grad_bias = summed(grad, bias_dtype);
          return variable_list{grad_x, grad_weight, grad_bias};
        });
  }

  /// Casts x to the autocast dtype, as torch does. The weight keeps the precision of its scales.
  static Tensor autocast(const Autocast& cast, const Call& call) {
    check_tensors(kLinear, {{"x", call.x}, {"weight", call.weight}});
    Call given = call;
    const Tensor x = call.scale ? *call.x : cast(*call.x);
    const MaybeTensor& own_source = call.source;
    const MaybeTensor source = cast(own_source);
    given.x = x;
    given.source = source;
    const MaybeTensor& own_bias = call.bias;
    const bool reads_bias = !own_bias || own_bias->scalar_type() == at::kFloat;
    const MaybeTensor bias = reads_bias ? own_bias : cast(own_bias);
    given.bias = bias;
    return torchkiln::call<LinearFp8>(given);
  }
};

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<LinearFp8>(m); }

}  // namespace
}  // namespace torchkiln::quantize_ops

namespace torchkiln {

at::Tensor linear_fp8(const at::Tensor& x, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const LinearFp8Options& options) {
  return call<quantize_ops::LinearFp8>(x, weight, bias, options);
}

}  // namespace torchkiln
