#include "norm.h"

#include <torch/library.h>

#include "torchkiln/checks.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/norm.h"
#include "torchkiln/launch.h"
#include "torchkiln/workspace.h"

namespace torchkiln::norm_ops {
namespace {

using at::Tensor;

constexpr const char* kBackwardOp = "norm_backward";

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

void check_shape(const NormCall& call) {
  const auto dims = static_cast<int64_t>(call.shape.size());
  TORCH_CHECK(dims >= 1, "torchkiln.", call.op(),
              ": normalized_shape: got [], expected at least 1 dimension");
  TORCH_CHECK(dims <= call.x.dim(), "torchkiln.", call.op(), ": normalized_shape: got ", call.shape,
              ", expected the last sizes of x, which has shape ", call.x.sym_sizes());
  const c10::SymIntArrayRef last = call.x.sym_sizes().slice(call.x.dim() - dims);
  TORCH_CHECK(call.shape.equals(last), "torchkiln.", call.op(), ": normalized_shape: got ",
              call.shape, ", expected ", last, ", the last ",
              dims == 1 ? std::string("dimension") : c10::str(dims, " dimensions"), " of x");
}

void check_residual(const NormCall& call) {
  const Tensor& residual = *call.residual;
  check_tensor(call.op(), "residual", residual);
  check_same_device(call.op(), "residual", residual, "x", call.x);
  TORCH_CHECK(residual.scalar_type() == call.x.scalar_type(), "torchkiln.", call.op(),
              ": residual: got dtype ", dtype_name(residual.scalar_type()), ", expected ",
              dtype_name(call.x.scalar_type()), ", the dtype of x");
  TORCH_CHECK(residual.sym_sizes().equals(call.x.sym_sizes()), "torchkiln.", call.op(),
              ": residual: got shape ", residual.sym_sizes(), ", expected ", call.x.sym_sizes(),
              ", the shape of x");
}

void check_parameter(const NormCall& call, const char* name, const Tensor& parameter) {
  check_tensor(call.op(), name, parameter);
  check_same_device(call.op(), name, parameter, "x", call.x);
  const at::ScalarType dtype = call.x.scalar_type();
  TORCH_CHECK(
      parameter.scalar_type() == dtype || (is_half(dtype) && parameter.scalar_type() == at::kFloat),
      "torchkiln.", call.op(), ": ", name, ": got dtype ", dtype_name(parameter.scalar_type()),
      ", expected ", dtype_name(dtype), ", the dtype of x", is_half(dtype) ? ", or float32" : "");
  TORCH_CHECK(parameter.sym_sizes().equals(call.shape), "torchkiln.", call.op(), ": ", name,
              ": got shape ", parameter.sym_sizes(), ", expected ", call.shape,
              ", the normalized_shape");
}

at::ScalarType parameter_dtype(const NormCall& call) {
  const Tensor* parameter = call.weight ? call.weight : call.bias;
  return parameter ? parameter->scalar_type() : call.x.scalar_type();
}

Tensor empty_as(const Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// An output of a schema must be a tensor: what there is not is an empty one.
Tensor nothing(const Tensor& like) { return at::empty({0}, like.options()); }

/// A tensor as rows whose columns are adjacent: a view wherever the rows are evenly spaced.
struct Rows {
  Tensor tensor;
  int64_t stride;

  Rows(const Tensor& from, int64_t rows, int64_t columns) : tensor(from), stride(columns) {
    if (from.is_contiguous()) return;
    tensor = from.reshape({rows, columns});
    if (columns > 1 && tensor.stride(1) != 1) tensor = tensor.contiguous();
    if (tensor.const_data_ptr() != from.const_data_ptr())
      explain::note("copied: strides ", from.strides(), " are no evenly spaced rows of ", columns,
                    " adjacent elements");
    stride = tensor.stride(0);
  }
};

Tensor contiguous(const Tensor* tensor) { return tensor ? tensor->contiguous() : Tensor(); }

const void* data(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

int64_t row_grain(int64_t columns) { return std::max<int64_t>(1, kElementwiseGrain / columns); }

/// rstd, which comes last in the statistics.
void* last_of(const Tensor& stats, int64_t rows) {
  const auto bytes = (stats.size(0) - 1) * rows * static_cast<int64_t>(stats.itemsize());
  return static_cast<char*>(stats.data_ptr()) + bytes;
}

/// `stats` is not defined when it is not wanted.
void run(const NormCall& call, const Tensor& y, const Tensor& sum, const Tensor& stats) {
  if (y.numel() == 0) return;
  const int64_t columns =
      c10::multiply_integers(y.sizes().slice(y.dim() - static_cast<int64_t>(call.shape.size())));
  const int64_t rows = y.numel() / columns;
  const Rows x(call.x, rows, columns);
  const Rows residual = call.residual ? Rows(*call.residual, rows, columns) : x;
  const Tensor weight = contiguous(call.weight);
  const Tensor bias = contiguous(call.bias);
  Norm arguments{};
  arguments.x = x.tensor.const_data_ptr();
  arguments.residual = call.residual ? residual.tensor.const_data_ptr() : nullptr;
  arguments.weight = data(weight);
  arguments.bias = data(bias);
  arguments.y = y.data_ptr();
  arguments.sum = call.residual ? sum.data_ptr() : nullptr;
  if (stats.defined()) {
    arguments.rstd = last_of(stats, rows);
    if (call.centered) arguments.mean = stats.data_ptr();
  }
  arguments.dtype = dtype_of(y);
  arguments.weight_dtype = dtype_of(parameter_dtype(call));
  arguments.centered = call.centered;
  arguments.eps = call.eps;
  arguments.weight_offset = call.offset;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.x_row_stride = x.stride;
  arguments.residual_row_stride = residual.stride;
  launch(
      call.op(), y, rows, row_grain(columns),
      [&](auto stream) { return cuda::norm(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::norm(arguments, begin, end); });
}

/// The results, and what backward needs of each row.
Three forward_outputs(const NormCall& call) {
  auto [y, sum] = norm_outputs(call);
  const auto leading = call.x.dim() - static_cast<int64_t>(call.shape.size());
  c10::SymDimVector sizes{call.centered ? 2 : 1};
  for (int64_t d = 0; d < leading; ++d) sizes.push_back(call.x.sym_size(d));
  const at::ScalarType dtype = compute_dtype(call.x.scalar_type());
  return {std::move(y), std::move(sum), at::empty_symint(sizes, call.x.options().dtype(dtype))};
}

Three forward_real(const NormCall& call) {
  auto [y, sum, stats] = forward_outputs(call);
  run(call, y, sum, stats);
  return {std::move(y), std::move(sum), std::move(stats)};
}

template <Three (*function)(const NormCall&)>
Two norm_forward(const Tensor& x, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                 const MaybeTensor& bias, double eps, double offset, bool centered) {
  auto [y, sum, stats] =
      function({x, nullptr, shape, pointer_to(weight), pointer_to(bias), eps, offset, centered});
  return {std::move(y), std::move(stats)};
}

template <Three (*function)(const NormCall&)>
Three add_norm_forward(const Tensor& x, const Tensor& residual, c10::SymIntArrayRef shape,
                       const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                       double offset, bool centered) {
  return function(
      {x, &residual, shape, pointer_to(weight), pointer_to(bias), eps, offset, centered});
}

void check_as(const char* name, const Tensor& tensor, const Tensor& grad) {
  check_tensor(kBackwardOp, name, tensor);
  check_same_device(kBackwardOp, name, tensor, "grad", grad);
  TORCH_CHECK(
      tensor.scalar_type() == grad.scalar_type() && tensor.sym_sizes().equals(grad.sym_sizes()),
      "torchkiln.", kBackwardOp, ": ", name, ": got ", dtype_name(tensor.scalar_type()), " ",
      tensor.sym_sizes(), ", expected ", dtype_name(grad.scalar_type()), " ", grad.sym_sizes(),
      ", as grad");
}

/// The checked, empty gradients; on Meta and symbolic tensors, too. `z` is what was normalized:
/// x or x + residual. The shape of `stats` tells which sizes of it were normalized together.
Three backward_outputs(const Tensor& grad, const MaybeTensor& grad_sum, const Tensor& z,
                       const Tensor& stats, const MaybeTensor& weight, double,
                       at::ScalarType weight_dtype, NormWanted wanted) {
  check_tensor(kBackwardOp, "grad", grad);
  check_dtype(kBackwardOp, "grad", grad);
  check_as("z", z, grad);
  if (grad_sum.has_value()) check_as("grad_sum", *grad_sum, grad);
  check_same_device(kBackwardOp, "stats", stats, "grad", grad);
  const int64_t leading = stats.dim() - 1;
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  TORCH_CHECK(leading >= 0 && leading < grad.dim() && stats.scalar_type() == compute &&
                  stats.is_contiguous() && (stats.sym_size(0) == 1 || stats.sym_size(0) == 2) &&
                  stats.sym_sizes().slice(1).equals(grad.sym_sizes().slice(0, leading)),
              "torchkiln.", kBackwardOp, ": stats: got ", dtype_name(stats.scalar_type()), " ",
              stats.sym_sizes(), ", expected those of the forward, ", dtype_name(compute),
              " [1 or 2, leading sizes of grad]");
  const c10::SymIntArrayRef shape = grad.sym_sizes().slice(leading);
  const bool is_known = weight_dtype == grad.scalar_type() ||
                        (is_half(grad.scalar_type()) && weight_dtype == at::kFloat);
  TORCH_CHECK(is_known, "torchkiln.", kBackwardOp, ": weight_dtype: got ", dtype_name(weight_dtype),
              ", expected ", dtype_name(grad.scalar_type()),
              is_half(grad.scalar_type()) ? " or float32" : "");
  if (weight.has_value()) {
    check_same_device(kBackwardOp, "weight", *weight, "grad", grad);
    TORCH_CHECK(weight->scalar_type() == weight_dtype && weight->sym_sizes().equals(shape),
                "torchkiln.", kBackwardOp, ": weight: expected the ", dtype_name(weight_dtype), " ",
                shape, " of the forward");
  }
  const at::TensorOptions parameter =
      grad.options().dtype(weight_dtype).memory_format(at::MemoryFormat::Contiguous);
  return {wanted[0] ? empty_as(grad) : nothing(grad),
          wanted[1] ? at::empty_symint(shape, parameter) : nothing(grad),
          wanted[2] ? at::empty_symint(shape, parameter) : nothing(grad)};
}

Three backward_real(const Tensor& grad, const MaybeTensor& grad_sum, const Tensor& z,
                    const Tensor& stats, const MaybeTensor& weight, double offset,
                    at::ScalarType weight_dtype, NormWanted wanted) {
  auto [grad_x, grad_weight, grad_bias] =
      backward_outputs(grad, grad_sum, z, stats, weight, offset, weight_dtype, wanted);
  if (grad.numel() == 0) return {grad_x, grad_weight.zero_(), grad_bias.zero_()};
  if (!wanted[0] && !wanted[1] && !wanted[2]) return {grad_x, grad_weight, grad_bias};

  const bool centered = stats.size(0) == 2;
  const int64_t rows = stats.numel() / stats.size(0);
  const int64_t columns = grad.numel() / rows;
  const Rows grad_rows(grad, rows, columns);
  const Rows z_rows(z, rows, columns);
  const Rows grad_sum_rows = grad_sum.has_value() ? Rows(*grad_sum, rows, columns) : grad_rows;
  const Tensor weights = contiguous(pointer_to(weight));
  NormBackward arguments{};
  arguments.grad = grad_rows.tensor.const_data_ptr();
  arguments.grad_sum = grad_sum.has_value() ? grad_sum_rows.tensor.const_data_ptr() : nullptr;
  arguments.z = z_rows.tensor.const_data_ptr();
  arguments.weight = data(weights);
  arguments.mean = centered ? stats.const_data_ptr() : nullptr;
  arguments.rstd = last_of(stats, rows);
  arguments.grad_x = wanted[0] ? grad_x.data_ptr() : nullptr;
  arguments.grad_weight = wanted[1] ? grad_weight.data_ptr() : nullptr;
  arguments.grad_bias = wanted[2] ? grad_bias.data_ptr() : nullptr;
  arguments.dtype = dtype_of(grad);
  arguments.weight_dtype = dtype_of(weight_dtype);
  arguments.centered = centered;
  arguments.weight_offset = offset;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.grad_row_stride = grad_rows.stride;
  arguments.grad_sum_row_stride = grad_sum_rows.stride;
  arguments.z_row_stride = z_rows.stride;

  Workspace workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = Workspace(grad.device(), bytes);
    arguments.workspace = workspace.data();
  };
  if (grad.is_cpu()) allocate(cpu::workspace_bytes(arguments));
  launch(
      kBackwardOp, grad, cpu::chunk_count(arguments), 1,
      [&](auto stream) {
        allocate(cuda::workspace_bytes(arguments));
        return cuda::norm_backward(arguments, stream);
      },
      [&](int64_t begin, int64_t end) { return cpu::norm_backward(arguments, begin, end); });
  if (grad.is_cpu() && (wanted[1] || wanted[2])) {
    at::parallel_for(0, columns, kElementwiseGrain / 64, [&](int64_t begin, int64_t end) {
      check_status(kBackwardOp, cpu::norm_backward_finish(arguments, begin, end));
    });
  }
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def(
      "norm_forward(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "float offset, bool centered) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "add_norm_forward(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, float offset, bool centered) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "norm_backward(Tensor grad, Tensor? grad_sum, Tensor z, Tensor stats, Tensor? weight, "
      "float offset, ScalarType weight_dtype, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl("norm_forward", TORCH_FN(norm_forward<forward_real>));
  m.impl("add_norm_forward", TORCH_FN(add_norm_forward<forward_real>));
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl("norm_forward", TORCH_FN(norm_forward<forward_outputs>));
  m.impl("add_norm_forward", TORCH_FN(add_norm_forward<forward_outputs>));
  m.impl(kBackwardOp, TORCH_FN(backward_outputs));
}

}  // namespace torchkiln::norm_ops

namespace torchkiln {

void check_norm(const NormCall& call) {
  check_tensor(call.op(), "x", call.x);
  check_dtype(call.op(), "x", call.x);
  if (call.residual) norm_ops::check_residual(call);
  norm_ops::check_shape(call);
  if (call.weight) norm_ops::check_parameter(call, "weight", *call.weight);
  if (call.bias) norm_ops::check_parameter(call, "bias", *call.bias);
  TORCH_CHECK(!call.weight || !call.bias || call.weight->scalar_type() == call.bias->scalar_type(),
              "torchkiln.", call.op(), ": bias: got dtype ", dtype_name(call.bias->scalar_type()),
              ", expected ", dtype_name(call.weight->scalar_type()), ", the dtype of weight");
  TORCH_CHECK_VALUE(call.eps > 0, "torchkiln.", call.op(), ": eps: got ", call.eps,
                    ", expected a number greater than 0");
}

NormResult norm_outputs(const NormCall& call) {
  check_norm(call);
  return {norm_ops::empty_as(call.x), call.residual ? norm_ops::empty_as(call.x) : at::Tensor()};
}

NormResult norm_real(const NormCall& call) {
  auto [y, sum] = norm_outputs(call);
  norm_ops::run(call, y, sum, at::Tensor());
  return {std::move(y), std::move(sum)};
}

}  // namespace torchkiln
