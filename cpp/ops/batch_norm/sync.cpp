// Ops for the parts of batch norm over a group of processes. Python runs the collectives between
// them: moments, gather, statistics, forward; and sums, their total, the gradient of x.

#include "batch_norm/operands.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kSync = "sync_bn_act";

/// The moments of x, [2 * channels + 1]: means, sums of the squared distances from the means,
/// count. All are 0 without elements.
struct SyncMoments {
  static constexpr const char* kSchema = "torchkiln::_sync_bn_moments(Tensor x) -> Tensor";

  static Tensor meta(const Tensor& x) {
    check_tensor(kSync, "x", x);
    check_dtype(kSync, "x", x);
    check_rank(kSync, "x", x, 2, INT64_MAX, "[batch, channels, ...]");
    return empty_of({2 * x.sym_size(1) + 1}, x.options().dtype(at::kDouble));
  }

  static Tensor kernel(const Tensor& x) {
    Tensor moments = meta(x);
    if (x.numel() == 0) return moments.zero_();
    const Operands operands(x, {}, {}, {});
    BatchNorm arguments{};
    operands.fill(arguments);
    arguments.training = true;
    arguments.moments = moments.data_ptr<double>();
    launch_split(
        kSync, x, arguments, kGrain, cpu::split,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_moments(arguments, allocate, stream);
        },
        cpu::batch_norm_moments, cpu::batch_norm_finish);
    return moments;
  }
};

/// Computes the statistics, [3, channels], from the moments of all processes, and the elements per
/// channel, [1]. Moves the running statistics, by 1 / batches if that is given.
struct SyncStatistics {
  struct Arguments : Call {
    Borrowed<Tensor> moments;
    Borrowed<MaybeTensor> batches;

    void complete() {
      act = kActivation<None>;
      training = updates = true;
      name = kSync;
    }

    TORCHKILN_FIELDS(self.x, self.moments, self.running_mean, self.running_var, self.batches,
                     self.momentum, self.eps);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_statistics(Tensor x, Tensor moments, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor? batches, float momentum, float eps) -> (Tensor, Tensor)";

  static Two meta(const Arguments& call) {
    check(call);
    const Tensor& x = call.x;
    check_moments(kSync, call.moments, x);
    if (call.batches) {
      const Tensor& batches = *call.batches;
      check_same_device(kSync, "batches", batches, "x", x);
      TORCH_CHECK(batches.scalar_type() == at::kLong && batches.sym_numel() == 1, "torchkiln.",
                  kSync, ": batches: got ", dtype_name(batches.scalar_type()), " ",
                  batches.sym_sizes(), ", expected an int64");
    }
    return {empty_of({3, x.sym_size(1)}, x.options().dtype(compute_dtype(x.scalar_type()))),
            empty_of({1}, call.moments)};
  }

  static Two kernel(const Arguments& call) {
    auto [statistics, count] = meta(call);
    if (call.x->size(1) == 0) return {statistics, count.zero_()};
    merge_moments(call, call.moments, call.batches, statistics, count);
    return {statistics, count};
  }
};

/// y, and the signs if backward needs them, else an empty tensor.
struct SyncForward {
  struct Arguments : Call {
    Borrowed<Tensor> statistics;

    void complete() {
      training = true;
      updates = false;
      momentum = eps = 0;
      name = kSync;
    }

    TORCHKILN_FIELDS(self.x, self.statistics, self.weight, self.bias, self.residual, self.act);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_forward(Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, "
      "Tensor? residual, str act) -> (Tensor, Tensor)";

  static Two meta(const Arguments& call) {
    check(call);
    check_statistics(kSync, call.statistics, call.x);
    auto [y, unused, signs] = empty_outputs(call, /*for_backward=*/true);
    return {y, signs};
  }

  static Two kernel(const Arguments& call) {
    auto [y, signs] = meta(call);
    if (y.numel() > 0) normalize(call, call.statistics, y, signs);
    return {y, signs};
  }
};

/// Returns this process's share of the coefficients of the gradient of x, [2, channels], its share
/// of the gradients of weight and bias, and the gradient of the residual. Results that are not
/// wanted are empty.
struct SyncSums {
  using Wanted = std::array<bool, 4>;
  struct Arguments : Gradient {
    Borrowed<Tensor> count;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.count, self.weight, self.bias,
                     self.residual, self.signs, self.act, self.wanted);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_backward_sums(Tensor grad, Tensor x, Tensor statistics, Tensor count, "
      "Tensor? weight, Tensor? bias, Tensor? residual, Tensor? signs, str act, bool[4] wanted) -> "
      "(Tensor, Tensor, Tensor, Tensor)";

  static Four meta(const Arguments& call) {
    const Tensor &statistics = call.statistics, &count = call.count;
    const Wanted& wanted = call.wanted;
    check_backward(kSync, call);
    check_same_device(kSync, "count", count, "grad", call.grad);
    TORCH_CHECK(count.scalar_type() == at::kDouble && count.sym_numel() == 1, "torchkiln.", kSync,
                ": count: got ", dtype_name(count.scalar_type()), " ", count.sym_sizes(),
                ", expected a float64");
    Four found = empty_gradients(call, {false, wanted[1], wanted[2], wanted[3]});
    std::get<0>(found) =
        wanted[0] ? empty_of({2, call.x->sym_size(1)}, statistics) : no_output(statistics);
    return found;
  }

  static Four kernel(const Arguments& call) {
    auto [coefficients, grad_weight, grad_bias, grad_residual] = meta(call);
    const Tensor& x = call.x;
    if (x.numel() == 0)
      return {coefficients.zero_(), grad_weight.zero_(), grad_bias.zero_(), grad_residual};
    const Operands operands(x, call.weight, call.bias, call.residual);
    const MaybeCopy dense_grad = in_layout("grad", *call.grad, operands.channels_last());
    BatchNormBackward arguments = arguments_of(call, operands, *dense_grad);
    arguments.grad_weight = output(grad_weight);
    arguments.grad_bias = output(grad_bias);
    arguments.grad_residual = output(grad_residual);
    arguments.count = call.count->const_data_ptr<double>();
    arguments.coefficients = output(coefficients);
    launch_split(
        kSync, x, arguments, kGrain, cpu::split,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_backward_sums(arguments, allocate, stream);
        },
        cpu::batch_norm_sums, cpu::batch_norm_sums_finish);
    return {coefficients, grad_weight, grad_bias, grad_residual};
  }
};

/// The gradient of x from the coefficients of all processes.
struct SyncInputGradient {
  struct Arguments : Gradient {
    Borrowed<Tensor> coefficients;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.coefficients, self.weight, self.bias,
                     self.residual, self.signs, self.act);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_backward_input(Tensor grad, Tensor x, Tensor statistics, "
      "Tensor coefficients, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? signs, "
      "str act) -> Tensor";

  static Tensor meta(const Arguments& call) {
    const Tensor &coefficients = call.coefficients, &statistics = call.statistics;
    const c10::SymInt channels = call.x->sym_size(1);
    check_backward(kSync, call);
    check_same_device(kSync, "coefficients", coefficients, "grad", call.grad);
    TORCH_CHECK(coefficients.scalar_type() == statistics.scalar_type() &&
                    coefficients.is_contiguous() && coefficients.sym_numel() == 2 * channels,
                "torchkiln.", kSync, ": coefficients: got ", dtype_name(coefficients.scalar_type()),
                " ", coefficients.sym_sizes(), ", expected ", dtype_name(statistics.scalar_type()),
                " [2, ", channels,
                "]: the coefficients of _sync_bn_backward_sums, added over all processes");
    return std::get<0>(empty_gradients(call, {true, false, false, false}));
  }

  static Tensor kernel(const Arguments& call) {
    Tensor grad_x = meta(call);
    const Tensor& x = call.x;
    if (x.numel() == 0) return grad_x;
    const Operands operands(x, call.weight, call.bias, call.residual);
    const MaybeCopy dense_grad = in_layout("grad", *call.grad, operands.channels_last());
    BatchNormBackward arguments = arguments_of(call, operands, *dense_grad);
    arguments.grad_x = grad_x.data_ptr();
    arguments.coefficients = const_cast<void*>(call.coefficients->const_data_ptr());
    launch_elements(
        kSync, x, [&](auto stream) { return cuda::batch_norm_backward_input(arguments, stream); },
        [&](int64_t begin, int64_t end) {
          return cpu::batch_norm_backward(arguments, begin, end);
        });
    return grad_x;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<SyncMoments, SyncStatistics, SyncForward, SyncSums, SyncInputGradient>(m);
}

}  // namespace torchkiln::batch_norm_ops
