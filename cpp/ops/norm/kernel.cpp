// The kernels of layer_norm, rms_norm and their sums with a residual: checks, outputs, launches. A
// row is normalized in one pass; backward computes the gradients of weight and bias in a second
// step (launch_split). norm.cpp has the ops, written.cpp their forms that write to given tensors.

#include "detail/rows_view.h"
#include "norm/norm.h"
#include "quantize/quantize.h"
#include "torchkiln/kernels/norm.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::norm_ops {
namespace {

void check_parameter(const Call& call, const char* name, const MaybeTensor& parameter) {
  check_normalized_parameter(call.op(), name, parameter, call.shape,
                             call.residual_is_wider() ? "residual" : "x", call.wider());
}

/// The address of rstd, which is the last row of `stats`.
void* rstd_of(const Tensor& stats, int64_t rows) {
  const auto bytes = (stats.size(0) - 1) * rows * static_cast<int64_t>(stats.itemsize());
  return static_cast<char*>(stats.data_ptr()) + bytes;
}

}  // namespace

void check(const Call& call) {
  check_tensor(call.op(), "x", call.x);
  if (call.quantized) {
    quantize_ops::check_source(call.op(), "x", call.x);
  } else {
    check_dtype(call.op(), "x", call.x);
  }
  if (call.residual) check_like_or_mixed(call.op(), "residual", *call.residual, "x", call.x);
  check_normalized_shape(call.op(), call.x, call.shape);
  check_parameter(call, "weight", call.weight);
  check_parameter(call, "bias", call.bias);
  if (call.weight && call.bias)
    check_same_dtype(call.op(), "bias", *call.bias, "weight", *call.weight);
  check_eps(call.op(), call.eps);
  TORCH_CHECK(!call.quantized || call.shape.size() == 1, "torchkiln.", call.op(),
              ": normalized_shape: got ", call.shape,
              ", expected one size: a scale is for 128 elements of the last dimension");
}

Three outputs(const Call& call, bool wants_stats) {
  check(call);
  const Tensor& like = call.wider();
  Tensor stats;
  if (wants_stats) {
    const auto leading = call.x->dim() - static_cast<int64_t>(call.shape.size());
    c10::SymDimVector sizes{call.centered ? 2 : 1};
    for (int64_t d = 0; d < leading; ++d) sizes.push_back(call.x->sym_size(d));
    stats = empty_of(sizes, call.x->options().dtype(compute_dtype(call.x->scalar_type())));
  }
  return {call.quantized ? Tensor() : empty_contiguous(like),
          call.residual ? empty_contiguous(like) : Tensor(), stats};
}

Three run(const Call& call, bool wants_stats) { return run_into(call, outputs(call, wants_stats)); }

Three run_into(const Call& call, Three to, const Two& quantized) {
  auto& [y, sum, stats] = to;
  const auto& [fp8, scale] = quantized;
  const Tensor& like = call.wider();
  if (like.numel() == 0) return to;
  const int64_t columns = c10::multiply_integers(
      like.sizes().slice(like.dim() - static_cast<int64_t>(call.shape.size())));
  const int64_t rows = like.numel() / columns;
  // Adding two transposed tensors as they are, and copying the sum, takes less time than copying
  // both.
  const bool adds_first = like.is_cpu() && call.residual && has_columns_apart(like) &&
                          like.strides().equals(call.narrower().strides()) &&
                          like.scalar_type() == call.narrower().scalar_type();
  if (adds_first) {
    sum.copy_(at::add(like, call.narrower()));
    trace::note("copied: the sum of x and residual, whose columns are not adjacent");
  }
  const bool has_residual = call.residual && !adds_first;
  const RowsView x = view_as_rows(adds_first ? sum : call.wider(), rows, columns);
  const RowsView residual = has_residual ? view_as_rows(call.narrower(), rows, columns) : x;
  const Tensor weight = contiguous(call.weight);
  const Tensor bias = contiguous(call.bias);
  const Tensor& parameter = weight.defined() ? weight : bias.defined() ? bias : like;
  Norm arguments{};
  arguments.x = x.tensor->const_data_ptr();
  arguments.residual = has_residual ? residual.tensor->const_data_ptr() : nullptr;
  arguments.weight = data(weight);
  arguments.bias = data(bias);
  if (y.defined()) arguments.y = y.data_ptr();
  if (fp8.defined()) {
    arguments.data = static_cast<uint8_t*>(fp8.data_ptr());
    arguments.scale = scale.data_ptr<float>();
  }
  arguments.sum = has_residual ? sum.data_ptr() : nullptr;
  if (stats.defined()) {
    arguments.rstd = rstd_of(stats, rows);
    if (call.centered) arguments.mean = stats.data_ptr();
  }
  arguments.dtype = dtype_of(like);
  arguments.residual_dtype = dtype_of(*residual.tensor);
  arguments.weight_dtype = dtype_of(parameter);
  arguments.centered = call.centered;
  arguments.eps = call.eps;
  arguments.weight_offset = call.offset == 0 ? -0.0 : call.offset;  // keeps a weight of -0
  arguments.rounds_normalized = call.round == NormRounding::input;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.x_row_stride = x.stride;
  arguments.residual_row_stride = residual.stride;
  launch_allocating(
      call.op(), like, rows, std::max<int64_t>(1, kElementwiseGrain / columns),
      [&](Allocate allocate, auto stream) { return cuda::norm(arguments, allocate, stream); },
      [&](int64_t begin, int64_t end) { return cpu::norm(arguments, begin, end); });
  return to;
}

Two Forward::meta(const Arguments& call) {
  auto [y, sum, stats] = outputs(call, /*wants_stats=*/true);
  return {y, stats};
}

Two Forward::kernel(const Arguments& call) {
  auto [y, sum, stats] = run(call, /*wants_stats=*/true);
  return {y, stats};
}

Three Backward::meta(const Arguments& call) {
  const Tensor &grad = call.grad, &stats = call.stats;
  const MaybeTensor& weight = call.weight;
  const Wanted wanted = call.wanted;
  constexpr const char* kName = "norm_backward";
  check_tensor(kName, "grad", grad);
  check_dtype(kName, "grad", grad);
  check_like(kName, "z", call.z, "grad", grad);
  if (call.grad_sum) check_like(kName, "grad_sum", *call.grad_sum, "grad", grad);
  check_same_device(kName, "stats", stats, "grad", grad);
  const int64_t leading = stats.dim() - 1;
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  TORCH_CHECK(leading >= 0 && leading < grad.dim() && stats.scalar_type() == compute &&
                  (stats.sym_size(0) == 1 || stats.sym_size(0) == 2) &&
                  stats.sym_sizes().slice(1).equals(grad.sym_sizes().slice(0, leading)),
              "torchkiln.", kName, ": stats: got ", dtype_name(stats.scalar_type()), " ",
              stats.sym_sizes(), ", expected ", dtype_name(compute),
              " [1 or 2, leading sizes of grad], the statistics of the forward");
  TORCH_CHECK(
      !wanted[2] || stats.sym_size(0) == 2, "torchkiln.", kName,
      ": wanted: got the gradient of the bias of an RMS norm, expected those of x and weight");
  const c10::SymIntArrayRef shape = grad.sym_sizes().slice(leading);
  check_parameter_dtype(kName, "weight_dtype", call.weight_dtype, "grad", grad.scalar_type());
  if (weight) {
    check_same_device(kName, "weight", *weight, "grad", grad);
    TORCH_CHECK(weight->scalar_type() == call.weight_dtype && weight->sym_sizes().equals(shape),
                "torchkiln.", kName, ": weight: got ", dtype_name(weight->scalar_type()), " ",
                weight->sym_sizes(), ", expected the ", dtype_name(call.weight_dtype), " ", shape,
                " of the forward");
  }
  const at::TensorOptions parameter = grad.options().dtype(call.weight_dtype);
  return {wanted[0] ? empty_contiguous(grad) : no_output(grad),
          wanted[1] ? empty_of(shape, parameter) : no_output(grad),
          wanted[2] ? empty_of(shape, parameter) : no_output(grad)};
}

Three Backward::kernel(const Arguments& call) {
  auto [grad_x, grad_weight, grad_bias] = meta(call);
  const Tensor& grad = call.grad;
  // Inductor gives saved tensors of 4 or 5 dimensions the strides of channels_last behind a
  // convolution, the statistics included.
  const MaybeCopy kept = as_contiguous(call.stats);
  const Tensor& stats = *kept;
  const Wanted wanted = call.wanted;
  if (grad.numel() == 0) return {grad_x, grad_weight.zero_(), grad_bias.zero_()};
  if (!wanted[0] && !wanted[1] && !wanted[2]) return {grad_x, grad_weight, grad_bias};

  const bool centered = stats.size(0) == 2;
  const int64_t rows = stats.numel() / stats.size(0);
  const int64_t columns = grad.numel() / rows;
  const RowsView grad_rows = view_as_rows(grad, rows, columns);
  const RowsView z_rows = view_as_rows(call.z, rows, columns);
  const RowsView sum_rows = call.grad_sum ? view_as_rows(*call.grad_sum, rows, columns) : grad_rows;
  const Tensor weights = contiguous(call.weight);
  NormBackward arguments{};
  arguments.grad = grad_rows.tensor->const_data_ptr();
  arguments.grad_sum = call.grad_sum ? sum_rows.tensor->const_data_ptr() : nullptr;
  arguments.z = z_rows.tensor->const_data_ptr();
  arguments.weight = data(weights);
  arguments.mean = centered ? stats.const_data_ptr() : nullptr;
  arguments.rstd = rstd_of(stats, rows);
  arguments.grad_x = wanted[0] ? grad_x.data_ptr() : nullptr;
  arguments.grad_weight = wanted[1] ? grad_weight.data_ptr() : nullptr;
  arguments.grad_bias = wanted[2] ? grad_bias.data_ptr() : nullptr;
  arguments.dtype = dtype_of(grad);
  arguments.weight_dtype = dtype_of(call.weight_dtype);
  arguments.centered = centered;
  arguments.weight_offset = call.offset;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.grad_row_stride = grad_rows.stride;
  arguments.grad_sum_row_stride = sum_rows.stride;
  arguments.z_row_stride = z_rows.stride;
  launch_split(
      "norm_backward", grad, arguments, kElementwiseGrain / 64, cpu::split,
      [&](Allocate allocate, auto stream) {
        return cuda::norm_backward(arguments, allocate, stream);
      },
      cpu::norm_backward, cpu::norm_backward_finish);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace torchkiln::norm_ops
