#include "batch_norm/batch_norm.h"
#include "detail/maybe_copy.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::batch_norm_ops {
namespace {

constexpr const char* kName = "bn_act";

/// Elements per unit of work on the CPU: threads never share a byte of the signs.
constexpr int64_t kUnit = 64;

void check_parameter(const Call& call, const char* name, const MaybeTensor& parameter) {
  if (!parameter) return;
  check_tensors(kName, {{"x", call.x}, {name, *parameter}});
  check_parameter_dtype(kName, name, parameter->scalar_type(), "x", call.x.scalar_type());
  check_vector(kName, name, *parameter, call.x.sym_size(1), "the channels of x");
}

void check_running(const Call& call) {
  TORCH_CHECK_VALUE(call.running_mean.has_value() == call.running_var.has_value(), "torchkiln.",
                    kName, ": running_var: got ", call.running_var ? "a tensor" : "None",
                    ", expected ", call.running_mean ? "a tensor" : "None",
                    ", as for running_mean");
  TORCH_CHECK_VALUE(call.training || call.running_mean, "torchkiln.", kName,
                    ": running_mean: got None, expected a tensor of [", call.x.sym_size(1),
                    "] unless training=True");
}

void check(const Call& call) {
  check_tensor(kName, "x", call.x);
  check_dtype(kName, "x", call.x);
  check_rank(kName, "x", call.x, 2, INT64_MAX, "[batch, channels, ...]");
  check_parameter(call, "weight", call.weight);
  check_parameter(call, "bias", call.bias);
  if (call.weight && call.bias) check_same_dtype(kName, "bias", *call.bias, "weight", *call.weight);
  check_running(call);
  check_parameter(call, "running_mean", call.running_mean);
  check_parameter(call, "running_var", call.running_var);
  if (call.running_mean)
    check_same_dtype(kName, "running_var", *call.running_var, "running_mean", *call.running_mean);
  if (call.residual) check_like(kName, "residual", *call.residual, "x", call.x);
  TORCH_CHECK_VALUE(call.eps >= 0, "torchkiln.", kName, ": eps: got ", call.eps,
                    ", expected a number of at least 0");
  TORCH_CHECK_VALUE(!call.training || call.x.sym_numel() != call.x.sym_size(1), "torchkiln.", kName,
                    ": x: got shape ", call.x.sym_sizes(),
                    ", expected more than 1 value for each channel in training");
  TORCH_CHECK_VALUE(call.updates || !call.training || !call.running_mean, "torchkiln.", kName,
                    ": running_mean: got a tensor in training, expected None; "
                    "torch.ops.torchkiln.bn_act_update updates running statistics");
}

/// x with its channels as the last dimension.
Tensor with_channels_last(const Tensor& x) { return x.movedim(1, -1); }

/// An uninitialised dense tensor of x's shape, with adjacent channels if x has them.
Tensor empty_in_channel_layout(const Tensor& x, bool channels_last) {
  if (!channels_last) return empty_contiguous(x);
  c10::SymDimVector strides(static_cast<size_t>(x.dim()), 1);
  c10::SymInt next = x.sym_size(1);
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    if (d == 1) continue;
    strides[static_cast<size_t>(d)] = next;
    next = next * x.sym_size(d);
  }
  return at::empty_strided_symint(x.sym_sizes(), strides, x.options());
}

/// The tensor itself if its memory has the layout, else a copy.
MaybeCopy in_layout(const char* name, const Tensor& tensor, bool channels_last) {
  const bool fits =
      channels_last ? with_channels_last(tensor).is_contiguous() : tensor.is_contiguous();
  if (fits) return MaybeCopy::borrowed(tensor);
  trace::note("copied: ", name, " has strides ", tensor.strides(), ", expected ",
              channels_last ? "adjacent channels, the layout of x" : "a contiguous tensor");
  Tensor copy = empty_in_channel_layout(tensor, channels_last);
  copy.copy_(tensor);
  return MaybeCopy::owned(std::move(copy));
}

MaybeCopy in_layout(const char* name, const MaybeTensor& tensor, bool channels_last) {
  return tensor ? in_layout(name, *tensor, channels_last) : MaybeCopy::owned(Tensor());
}

/// Merges dimensions where that leaves larger ones: a single channel has one plane of all elements.
ChannelLayout layout_of(const Tensor& x, bool channels_last) {
  const int64_t channels = x.size(1);
  const int64_t count = x.numel() / std::max<int64_t>(channels, 1);
  if (channels_last) return {count, channels, 1};
  if (channels == 1) return {1, 1, count};
  return {x.size(0), channels, count / x.size(0)};
}

Tensor contiguous(const MaybeTensor& tensor) { return tensor ? tensor->contiguous() : Tensor(); }

const void* data(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

/// The address of an output; null for one that is not wanted.
void* output(const Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.data_ptr(); }

RunningStatistic running(const MaybeTensor& tensor) {
  if (!tensor) return {nullptr, 0};
  return {const_cast<void*>(tensor->const_data_ptr()), tensor->stride(0)};
}

/// Autograd must see that a tensor was changed: one that was saved may not be used any more.
void mark_changed(const MaybeTensor& tensor) {
  if (tensor) torch::autograd::increment_version(*tensor);
}

/// Runs a CPU kernel for all elements of a problem.
template <class Kernel>
void for_each_element(const Tensor& x, const Kernel& kernel) {
  const int64_t numel = x.numel();
  at::parallel_for(0, (numel + kUnit - 1) / kUnit, kElementwiseGrain / kUnit,
                   [&](int64_t begin, int64_t end) {
                     check_status(kName, kernel(begin * kUnit, std::min(end * kUnit, numel)));
                   });
}

}  // namespace

bool channels_are_last(const Tensor& x) {
  return !x.is_contiguous() && with_channels_last(x).is_contiguous();
}

Three outputs(const Call& call, bool for_backward) {
  check(call);
  const Tensor& x = call.x;
  const bool has_signs =
      for_backward && kept_by_batch_norm(call.act, call.residual.has_value()) == Saved::sign;
  const c10::SymInt bytes = has_signs ? (x.sym_numel() + 7) / 8 : c10::SymInt(0);
  const at::TensorOptions statistics = x.options().dtype(compute_dtype(x.scalar_type()));
  return {empty_in_channel_layout(x, channels_are_last(x)),
          for_backward ? empty_of({3, x.sym_size(1)}, statistics) : empty_of({0}, statistics),
          empty_of({bytes}, x.options().dtype(at::kByte))};
}

Three run(const Call& call, bool for_backward) {
  auto [y, statistics, signs] = outputs(call, for_backward);
  if (y.numel() == 0) return {y, statistics.zero_(), signs};
  const bool channels_last = channels_are_last(call.x);
  const MaybeCopy x = in_layout("x", call.x, channels_last);
  const MaybeCopy residual = in_layout("residual", call.residual, channels_last);
  const Tensor weight = contiguous(call.weight), bias = contiguous(call.bias);
  const Tensor& parameter = weight.defined() ? weight : bias.defined() ? bias : call.x;
  // Kernels read the statistics from memory, except one on the GPU in eval mode.
  Tensor all = statistics;
  if (!for_backward && (call.training || !y.is_cuda()))
    all = at::empty({3, y.size(1)}, statistics.options());
  BatchNorm arguments{};
  arguments.x = x->const_data_ptr();
  arguments.residual = data(*residual);
  arguments.weight = data(weight);
  arguments.bias = data(bias);
  arguments.running_mean = running(call.running_mean);
  arguments.running_var = running(call.running_var);
  arguments.y = y.data_ptr();
  arguments.signs = static_cast<uint8_t*>(output(signs));
  arguments.statistics = output(all);
  arguments.dtype = dtype_of(y);
  arguments.parameter_dtype = dtype_of(parameter);
  arguments.running_dtype = dtype_of(call.running_mean ? *call.running_mean : y);
  arguments.activation = call.act;
  arguments.training = call.training;
  arguments.momentum = call.momentum;
  arguments.eps = call.eps;
  arguments.layout = layout_of(y, channels_last);
  launch_split(
      kName, y, arguments, kElementwiseGrain / kUnit, [&] { return cpu::split(arguments); },
      [&](Allocate allocate, auto stream) { return cuda::batch_norm(arguments, allocate, stream); },
      [&](int64_t begin, int64_t end) { return cpu::batch_norm_moments(arguments, begin, end); },
      [&](int64_t begin, int64_t end) { return cpu::batch_norm_finish(arguments, begin, end); });
  if (y.is_cpu()) {
    for_each_element(
        y, [&](int64_t begin, int64_t end) { return cpu::batch_norm(arguments, begin, end); });
  }
  if (call.training) {
    mark_changed(call.running_mean);
    mark_changed(call.running_var);
  }
  return {y, statistics, signs};
}

Four Backward::meta(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                    const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& residual,
                    const MaybeTensor& signs, Activation, bool, Wanted wanted) {
  constexpr const char* kBackward = "bn_act_backward";
  check_tensors(kBackward, {{"grad", grad}, {"x", x}, {"statistics", statistics}});
  check_dtype(kBackward, "grad", grad);
  check_rank(kBackward, "grad", grad, 2, INT64_MAX, "[batch, channels, ...]");
  check_like(kBackward, "x", x, "grad", grad);
  if (residual) check_like(kBackward, "residual", *residual, "grad", grad);
  const c10::SymInt& channels = x.sym_size(1);
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  TORCH_CHECK(statistics.scalar_type() == compute && statistics.is_contiguous() &&
                  statistics.dim() == 2 && statistics.sym_size(0) == 3 &&
                  statistics.sym_size(1) == channels,
              "torchkiln.", kBackward, ": statistics: got ", dtype_name(statistics.scalar_type()),
              " ", statistics.sym_sizes(), ", expected those of the forward, ", dtype_name(compute),
              " [3, ", channels, "]");
  const auto check_factor = [&](const char* name, const MaybeTensor& parameter) {
    if (!parameter) return;
    check_same_device(kBackward, name, *parameter, "grad", grad);
    check_parameter_dtype(kBackward, name, parameter->scalar_type(), "grad", grad.scalar_type());
    check_vector(kBackward, name, *parameter, channels, "the channels of x");
  };
  check_factor("weight", weight);
  check_factor("bias", bias);
  if (signs) {
    const c10::SymInt bytes = (x.sym_numel() + 7) / 8;
    check_same_device(kBackward, "signs", *signs, "grad", grad);
    TORCH_CHECK(
        signs->scalar_type() == at::kByte && signs->is_contiguous() && signs->sym_numel() == bytes,
        "torchkiln.", kBackward, ": signs: got ", dtype_name(signs->scalar_type()), " ",
        signs->sym_sizes(), ", expected a bit for each element of x, uint8 [", bytes, "]");
  }
  const Tensor parameter = weight ? *weight : bias ? *bias : x;
  const bool channels_last = channels_are_last(x);
  const auto vector = [&](bool wants) {
    return wants ? empty_of({channels}, parameter.options()) : no_output(parameter);
  };
  return {wanted[0] ? empty_in_channel_layout(x, channels_last) : no_output(x), vector(wanted[1]),
          vector(wanted[2]), wanted[3] ? empty_in_channel_layout(x, channels_last) : no_output(x)};
}

Four Backward::kernel(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                      const MaybeTensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& residual, const MaybeTensor& signs, Activation act,
                      bool training, Wanted wanted) {
  auto [grad_x, grad_weight, grad_bias, grad_residual] =
      meta(grad, x, statistics, weight, bias, residual, signs, act, training, wanted);
  if (x.numel() == 0) return {grad_x, grad_weight.zero_(), grad_bias.zero_(), grad_residual};
  const bool channels_last = channels_are_last(x);
  const MaybeCopy dense_x = in_layout("x", x, channels_last);
  const MaybeCopy dense_grad = in_layout("grad", grad, channels_last);
  const MaybeCopy dense_residual = in_layout("residual", residual, channels_last);
  const Tensor weights = contiguous(weight), biases = contiguous(bias);
  BatchNormBackward arguments{};
  arguments.grad = dense_grad->const_data_ptr();
  arguments.x = dense_x->const_data_ptr();
  arguments.residual = data(*dense_residual);
  arguments.signs = signs ? signs->const_data_ptr<uint8_t>() : nullptr;
  arguments.weight = data(weights);
  arguments.bias = data(biases);
  arguments.statistics = statistics.const_data_ptr();
  arguments.grad_x = output(grad_x);
  arguments.grad_weight = output(grad_weight);
  arguments.grad_bias = output(grad_bias);
  arguments.grad_residual = output(grad_residual);
  arguments.dtype = dtype_of(x);
  arguments.parameter_dtype = dtype_of(grad_weight);
  arguments.activation = act;
  arguments.training = training;
  arguments.layout = layout_of(x, channels_last);
  constexpr const char* kBackward = "bn_act_backward";
  Tensor coefficients;  // outlive the workspace of the sums
  if (x.is_cpu()) {
    coefficients = at::empty({2, x.size(1)}, x.options().dtype(at::kDouble));
    arguments.coefficients = coefficients.data_ptr<double>();
  }
  launch_split(
      kBackward, x, arguments, kElementwiseGrain / kUnit, [&] { return cpu::split(arguments); },
      [&](Allocate allocate, auto stream) {
        return cuda::batch_norm_backward(arguments, allocate, stream);
      },
      [&](int64_t begin, int64_t end) { return cpu::batch_norm_sums(arguments, begin, end); },
      [&](int64_t begin, int64_t end) {
        return cpu::batch_norm_sums_finish(arguments, begin, end);
      });
  if (x.is_cpu() && wanted[0]) {
    for_each_element(x, [&](int64_t begin, int64_t end) {
      return cpu::batch_norm_backward(arguments, begin, end);
    });
  }
  return {grad_x, grad_weight, grad_bias, grad_residual};
}

}  // namespace torchkiln::batch_norm_ops
