// The kernels of group_norm: checks, outputs and launches. x may have the same layouts as in batch
// norm. group_norm.cpp has the op and its derivatives.

#include "batch_norm/operands.h"
#include "group_norm/group_norm.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::group_norm_ops {
namespace {

using batch_norm_ops::channels_are_last;
using batch_norm_ops::empty_in_channel_layout;
using batch_norm_ops::in_layout;
using batch_norm_ops::output;

constexpr const char* kName = "group_norm";
constexpr const char* kBackward = "group_norm_backward";

void check_groups(const char* name, const Tensor& x, int64_t num_groups) {
  TORCH_CHECK_VALUE(num_groups > 0 && x.sym_size(1) % num_groups == 0, "torchkiln.", name,
                    ": num_groups: got ", num_groups, ", expected a divisor of ", x.sym_size(1),
                    ", the channels of x");
}

void check_parameters(const char* name, const char* name_of_x, const Tensor& x,
                      const MaybeTensor& weight, const MaybeTensor& bias) {
  const auto check = [&](const char* parameter_name, const MaybeTensor& parameter) {
    if (!parameter) return;
    check_tensors(name, {{name_of_x, x}, {parameter_name, *parameter}});
    check_parameter_dtype(name, parameter_name, parameter->scalar_type(), name_of_x,
                          x.scalar_type());
    check_vector(name, parameter_name, *parameter, x.sym_size(1), "the channels of x");
  };
  check("weight", weight);
  check("bias", bias);
  if (weight && bias) check_same_dtype(name, "bias", *bias, "weight", *weight);
}

void check_backward(const Backward::Arguments& call) {
  const Tensor &grad = call.grad, &x = call.x, &statistics = call.statistics;
  const int64_t num_groups = call.num_groups;
  check_tensors(kBackward, {{"grad", grad}, {"x", x}, {"statistics", statistics}});
  check_dtype(kBackward, "grad", grad);
  check_rank(kBackward, "grad", grad, 2, INT64_MAX, "[batch, channels, ...]");
  check_like(kBackward, "x", x, "grad", grad);
  check_groups(kBackward, x, num_groups);
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  const c10::SymInt& batch = x.sym_size(0);
  TORCH_CHECK(statistics.scalar_type() == compute && statistics.is_contiguous() &&
                  statistics.dim() == 3 && statistics.sym_size(0) == 3 &&
                  statistics.sym_size(1) == batch && statistics.sym_size(2) == num_groups,
              "torchkiln.", kBackward, ": statistics: got ", dtype_name(statistics.scalar_type()),
              " ", statistics.sym_sizes(), ", expected ", dtype_name(compute), " [3, ", batch, ", ",
              num_groups, "], the statistics of the forward");
  check_parameters(kBackward, "grad", x, call.weight, call.bias);
}

/// Uninitialised gradients of x, weight and bias; empty tensors for gradients that are not wanted.
Three empty_gradients(const Backward::Arguments& call) {
  const Tensor& x = call.x;
  const Tensor parameter = call.weight ? *call.weight : call.bias ? *call.bias : x;
  const auto& wanted = call.wanted;
  const auto vector = [&](bool wants) {
    return wants ? empty_of({x.sym_size(1)}, parameter.options()) : no_output(parameter);
  };
  return {wanted[0] ? empty_in_channel_layout(x, channels_are_last(x)) : no_output(x),
          vector(wanted[1]), vector(wanted[2])};
}

/// The dense tensors that forward and backward read, with the layout of x.
class Operands {
 public:
  template <class Call>
  explicit Operands(const Call& call)
      : channels_last_(channels_are_last(call.x)),
        layout_{call.x->size(0), call.x->size(1), call.num_groups,
                call.x->numel() / (call.x->size(0) * call.x->size(1)), channels_last_},
        x_(in_layout("x", *call.x, channels_last_)),
        weight_(contiguous(call.weight)),
        bias_(contiguous(call.bias)) {}

  bool channels_last() const { return channels_last_; }

  template <class Problem>
  void fill(Problem& problem) const {
    problem.x = x_->const_data_ptr();
    problem.weight = data(weight_);
    problem.bias = data(bias_);
    problem.dtype = dtype_of(*x_);
    problem.parameter_dtype = dtype_of(weight_.defined() ? weight_ : bias_.defined() ? bias_ : *x_);
    problem.layout = layout_;
  }

 private:
  bool channels_last_;
  GroupLayout layout_;
  MaybeCopy x_;
  Tensor weight_;
  Tensor bias_;
};

/// Fewest groups per CPU thread.
int64_t grain_of(const GroupLayout& layout) {
  return std::max<int64_t>(kElementwiseGrain / std::max<int64_t>(layout.count(), 1), 1);
}

}  // namespace

Two outputs(const Call& call) {
  const Tensor& x = call.x;
  check_tensor(kName, "x", x);
  check_dtype(kName, "x", x);
  check_rank(kName, "x", x, 2, INT64_MAX, "[batch, channels, ...]");
  check_groups(kName, x, call.num_groups);
  check_parameters(kName, "x", x, call.weight, call.bias);
  TORCH_CHECK_VALUE(call.eps >= 0, "torchkiln.", kName, ": eps: got ", call.eps,
                    ", expected a number of at least 0");
  const at::TensorOptions statistics = x.options().dtype(compute_dtype(x.scalar_type()));
  return {empty_in_channel_layout(x, channels_are_last(x)),
          empty_of({3, x.sym_size(0), call.num_groups}, statistics)};
}

Two run(const Call& call) {
  auto [y, statistics] = outputs(call);
  if (y.numel() == 0) return {y, statistics.zero_()};
  const Operands operands(call);
  GroupNorm arguments{};
  operands.fill(arguments);
  arguments.y = y.data_ptr();
  arguments.statistics = statistics.data_ptr();
  arguments.activation = call.act;
  arguments.eps = call.eps;
  launch_allocating(
      kName, y, arguments.layout.all_groups(), grain_of(arguments.layout),
      [&](Allocate allocate, auto stream) { return cuda::group_norm(arguments, allocate, stream); },
      [&](int64_t begin, int64_t end) { return cpu::group_norm(arguments, begin, end); });
  return {y, statistics};
}

Three Backward::meta(const Arguments& call) {
  check_backward(call);
  return empty_gradients(call);
}

Three Backward::kernel(const Arguments& call) {
  auto [grad_x, grad_weight, grad_bias] = meta(call);
  const Tensor& x = call.x;
  if (x.numel() == 0) return {grad_x, grad_weight.zero_(), grad_bias.zero_()};
  const Operands operands(call);
  const MaybeCopy dense_grad = in_layout("grad", *call.grad, operands.channels_last());
  GroupNormBackward arguments{};
  operands.fill(arguments);
  arguments.grad = dense_grad->const_data_ptr();
  arguments.statistics = call.statistics->const_data_ptr();
  arguments.grad_x = output(grad_x);
  arguments.grad_weight = output(grad_weight);
  arguments.grad_bias = output(grad_bias);
  arguments.activation = call.act;
  launch_split(
      kBackward, x, arguments, kElementwiseGrain, cpu::split,
      [&](Allocate allocate, auto stream) {
        return cuda::group_norm_backward(arguments, allocate, stream);
      },
      cpu::group_norm_backward, cpu::group_norm_backward_finish);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace torchkiln::group_norm_ops
