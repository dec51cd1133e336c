// The kernels of bn_act: checks, outputs and launches. operands.h has the tensors in the form that
// kernels read.

#include "batch_norm/operands.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {
namespace {

constexpr const char* kName = "bn_act";
constexpr const char* kBackward = "bn_act_backward";

void check_parameter(const Call& call, const char* name, const MaybeTensor& parameter) {
  if (!parameter) return;
  check_tensors(call.name, {{"x", call.x}, {name, *parameter}});
  check_parameter_dtype(call.name, name, parameter->scalar_type(), "x", call.x->scalar_type());
  check_vector(call.name, name, *parameter, call.x->sym_size(1), "the channels of x");
}

void check_running(const Call& call) {
  TORCH_CHECK_VALUE(call.running_mean.has_value() == call.running_var.has_value(), "torchkiln.",
                    call.name, ": running_var: got ", call.running_var ? "a tensor" : "None",
                    ", expected ", call.running_mean ? "a tensor" : "None",
                    ", as for running_mean");
  TORCH_CHECK_VALUE(call.training || call.running_mean, "torchkiln.", call.name,
                    ": running_mean: got None, expected a tensor of [", call.x->sym_size(1),
                    "] unless training=True");
}

}  // namespace

bool channels_are_last(const Tensor& x) {
  return !x.is_contiguous() && with_channels_last(x).is_contiguous();
}

void check(const Call& call) {
  check_tensor(call.name, "x", call.x);
  check_dtype(call.name, "x", call.x);
  check_rank(call.name, "x", call.x, 2, INT64_MAX, "[batch, channels, ...]");
  check_parameter(call, "weight", call.weight);
  check_parameter(call, "bias", call.bias);
  if (call.weight && call.bias)
    check_same_dtype(call.name, "bias", *call.bias, "weight", *call.weight);
  check_running(call);
  check_parameter(call, "running_mean", call.running_mean);
  check_parameter(call, "running_var", call.running_var);
  if (call.running_mean)
    check_same_dtype(call.name, "running_var", *call.running_var, "running_mean",
                     *call.running_mean);
  if (call.residual) check_like(call.name, "residual", *call.residual, "x", call.x);
  TORCH_CHECK_VALUE(call.eps >= 0, "torchkiln.", call.name, ": eps: got ", call.eps,
                    ", expected a number of at least 0");
}

void check_all(const Call& call) {
  check(call);
  TORCH_CHECK_VALUE(!call.training || call.x->sym_numel() != call.x->sym_size(1), "torchkiln.",
                    call.name, ": x: got shape ", call.x->sym_sizes(),
                    ", expected more than 1 value for each channel in training");
  TORCH_CHECK_VALUE(call.updates || !call.training || !call.running_mean, "torchkiln.", call.name,
                    ": running_mean: got a tensor in training, expected None; "
                    "torch.ops.torchkiln._bn_act_update updates running statistics");
}

Three outputs(const Call& call, bool for_backward) {
  check_all(call);
  return empty_outputs(call, for_backward);
}

Three empty_outputs(const Call& call, bool for_backward) {
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
  const Operands operands(call.x, call.weight, call.bias, call.residual);
  // Kernels read the statistics from memory, except for the GPU kernel in eval mode. If they are
  // not an output, temporary memory holds them.
  Tensor all = statistics;
  if (!for_backward && (call.training || !y.is_cuda()))
    all = at::empty({3, y.size(1)}, statistics.options());
  BatchNorm arguments{};
  operands.fill(arguments);
  arguments.running_mean = running(call.running_mean);
  arguments.running_var = running(call.running_var);
  arguments.y = y.data_ptr();
  arguments.signs = static_cast<uint8_t*>(output(signs));
  arguments.statistics = output(all);
  arguments.running_dtype = dtype_of(call.running_mean ? *call.running_mean : y);
  arguments.activation = call.act;
  arguments.training = call.training;
  arguments.momentum = call.momentum;
  arguments.eps = call.eps;
  launch_split(
      kName, y, arguments, kGrain, cpu::split,
      [&](Allocate allocate, auto stream) { return cuda::batch_norm(arguments, allocate, stream); },
      cpu::batch_norm_moments, cpu::batch_norm_finish);
  if (y.is_cpu()) {
    for_each_element(kName, y, [&](int64_t begin, int64_t end) {
      return cpu::batch_norm(arguments, begin, end);
    });
  }
  if (call.training) {
    count_change(call.running_mean);
    count_change(call.running_var);
  }
  return {y, statistics, signs};
}

void check_statistics(const char* name, const Tensor& statistics, const Tensor& x) {
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  const c10::SymInt& channels = x.sym_size(1);
  check_same_device(name, "statistics", statistics, "x", x);
  TORCH_CHECK(statistics.scalar_type() == compute && statistics.is_contiguous() &&
                  statistics.dim() == 2 && statistics.sym_size(0) == 3 &&
                  statistics.sym_size(1) == channels,
              "torchkiln.", name, ": statistics: got ", dtype_name(statistics.scalar_type()), " ",
              statistics.sym_sizes(), ", expected ", dtype_name(compute), " [3, ", channels,
              "], the statistics of the forward");
}

void check_backward(const char* name, const Gradient& given) {
  const Tensor &grad = given.grad, &x = given.x, &statistics = given.statistics;
  check_tensors(name, {{"grad", grad}, {"x", x}, {"statistics", statistics}});
  check_dtype(name, "grad", grad);
  check_rank(name, "grad", grad, 2, INT64_MAX, "[batch, channels, ...]");
  check_like(name, "x", x, "grad", grad);
  if (given.residual) check_like(name, "residual", *given.residual, "grad", grad);
  check_statistics(name, statistics, x);
  const c10::SymInt& channels = x.sym_size(1);
  const auto check_factor = [&](const char* factor, const MaybeTensor& parameter) {
    if (!parameter) return;
    check_same_device(name, factor, *parameter, "grad", grad);
    check_parameter_dtype(name, factor, parameter->scalar_type(), "grad", grad.scalar_type());
    check_vector(name, factor, *parameter, channels, "the channels of x");
  };
  check_factor("weight", given.weight);
  check_factor("bias", given.bias);
  if (given.signs) {
    const Tensor& signs = *given.signs;
    const c10::SymInt bytes = (x.sym_numel() + 7) / 8;
    check_same_device(name, "signs", signs, "grad", grad);
    TORCH_CHECK(
        signs.scalar_type() == at::kByte && signs.is_contiguous() && signs.sym_numel() == bytes,
        "torchkiln.", name, ": signs: got ", dtype_name(signs.scalar_type()), " ",
        signs.sym_sizes(), ", expected a bit for each element of x, uint8 [", bytes, "]");
  }
}

Four empty_gradients(const Gradient& given, const std::array<bool, 4>& wanted) {
  const Tensor& x = given.x;
  const Tensor parameter = given.weight ? *given.weight : given.bias ? *given.bias : x;
  const bool channels_last = channels_are_last(x);
  const auto vector = [&](bool wants) {
    return wants ? empty_of({x.sym_size(1)}, parameter.options()) : no_output(parameter);
  };
  return {wanted[0] ? empty_in_channel_layout(x, channels_last) : no_output(x), vector(wanted[1]),
          vector(wanted[2]), wanted[3] ? empty_in_channel_layout(x, channels_last) : no_output(x)};
}

BatchNormBackward arguments_of(const Gradient& given, const Operands& operands,
                               const Tensor& grad) {
  BatchNormBackward arguments{};
  operands.fill(arguments);
  arguments.grad = grad.const_data_ptr();
  arguments.signs = given.signs ? given.signs->const_data_ptr<uint8_t>() : nullptr;
  arguments.statistics = given.statistics->const_data_ptr();
  arguments.activation = given.act;
  arguments.training = true;
  return arguments;
}

void check_backward(const Backward::Arguments& call) {
  check_backward(kBackward, call);
  if (!call.second) return;
  check_like(kBackward, "second", *call.second, "grad", call.grad);
  TORCH_CHECK(
      call.signs && call.wanted[3], "torchkiln.", kBackward,
      ": second: got a tensor, expected None: it needs signs and a gradient of the residual");
}

Four Backward::meta(const Arguments& call) {
  check_backward(call);
  return empty_gradients(call, call.wanted);
}

Four Backward::kernel(const Arguments& call) {
  check_backward(call);
  const Tensor& x = call.x;
  if (call.second && x.is_cpu()) {
    const Tensor sum = *call.grad + *call.second;
    Arguments with_sum = call;
    with_sum.grad = sum;
    with_sum.second = Borrowed<MaybeTensor>();
    return kernel(with_sum);
  }
  auto [grad_x, grad_weight, grad_bias, grad_residual] = empty_gradients(call, call.wanted);
  if (x.numel() == 0) return {grad_x, grad_weight.zero_(), grad_bias.zero_(), grad_residual};
  const Operands operands(x, call.weight, call.bias, call.residual);
  const MaybeCopy dense_grad = in_layout("grad", *call.grad, operands.channels_last());
  const MaybeCopy dense_second = in_layout("second", call.second, operands.channels_last());
  BatchNormBackward arguments = arguments_of(call, operands, *dense_grad);
  arguments.second = data(*dense_second);
  arguments.training = call.training;
  arguments.grad_x = output(grad_x);
  arguments.grad_weight = output(grad_weight);
  arguments.grad_bias = output(grad_bias);
  arguments.grad_residual = output(grad_residual);
  Tensor coefficients;  // also used after the workspace of the sums is freed
  if (x.is_cpu() && call.training && call.wanted[0]) {
    coefficients = at::empty({2, x.size(1)}, call.statistics->options());
    arguments.coefficients = coefficients.data_ptr();
  }
  launch_split(
      kBackward, x, arguments, kGrain, cpu::split,
      [&](Allocate allocate, auto stream) {
        return cuda::batch_norm_backward(arguments, allocate, stream);
      },
      cpu::batch_norm_sums, cpu::batch_norm_sums_finish);
  if (x.is_cpu() && call.wanted[0] && call.training) {
    for_each_element(kBackward, x, [&](int64_t begin, int64_t end) {
      return cpu::batch_norm_backward(arguments, begin, end);
    });
  }
  return {grad_x, grad_weight, grad_bias, grad_residual};
}

}  // namespace torchkiln::batch_norm_ops
