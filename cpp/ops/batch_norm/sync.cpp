// Ops for the parts of batch norm over a group of processes. Python runs the collectives between
// them: moments, gather, statistics, forward; and sums, their total, the gradient of x.

#include "batch_norm/operands.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kSync = "sync_bn_act";

/// The moments of x, [2 * channels + 1]: means, sums of the squared distances to them, count. All
/// are 0 without elements.
struct SyncMoments {
  static constexpr const char* kSchema = "torchkiln::sync_bn_moments(Tensor x) -> Tensor";

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
        kSync, x, arguments, kGrain, [&] { return cpu::split(arguments); },
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_moments(arguments, allocate, stream);
        },
        [&](int64_t begin, int64_t end) { return cpu::batch_norm_moments(arguments, begin, end); },
        [&](int64_t begin, int64_t end) { return cpu::batch_norm_finish(arguments, begin, end); });
    return moments;
  }
};

/// Statistics [3, channels] of the moments of all processes, and their count, [1]; moves the
/// running statistics, by 1 / batches if that is given.
struct SyncStatistics {
  static constexpr const char* kSchema =
      "torchkiln::sync_bn_statistics(Tensor x, Tensor moments, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor? batches, float momentum, float eps) -> (Tensor, Tensor)";

  static Two meta(const Tensor& x, const Tensor& moments, const MaybeTensor& running_mean,
                  const MaybeTensor& running_var, const MaybeTensor& batches, double momentum,
                  double eps) {
    const MaybeTensor none;
    check({x, none, none, running_mean, running_var, none, kActivation<None>, /*training=*/true,
           momentum, eps, /*updates=*/true, kSync});
    check_moments(kSync, moments, x);
    if (batches) {
      check_same_device(kSync, "batches", *batches, "x", x);
      TORCH_CHECK(batches->scalar_type() == at::kLong && batches->sym_numel() == 1, "torchkiln.",
                  kSync, ": batches: got ", dtype_name(batches->scalar_type()), " ",
                  batches->sym_sizes(), ", expected an int64");
    }
    return {empty_of({3, x.sym_size(1)}, x.options().dtype(compute_dtype(x.scalar_type()))),
            empty_of({1}, moments)};
  }

  static Two kernel(const Tensor& x, const Tensor& moments, const MaybeTensor& running_mean,
                    const MaybeTensor& running_var, const MaybeTensor& batches, double momentum,
                    double eps) {
    auto [statistics, count] = meta(x, moments, running_mean, running_var, batches, momentum, eps);
    if (x.size(1) == 0) return {statistics, count.zero_()};
    merge_moments(kSync, x, moments, {running_mean, running_var, batches, momentum}, eps,
                  statistics, count);
    return {statistics, count};
  }
};

/// y, and the signs if backward needs them, else an empty tensor.
struct SyncForward {
  static constexpr const char* kSchema =
      "torchkiln::sync_bn_forward(Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, "
      "Tensor? residual, str act) -> (Tensor, Tensor)";

  static Two meta(const Tensor& x, const Tensor& statistics, const MaybeTensor& weight,
                  const MaybeTensor& bias, const MaybeTensor& residual, Activation act) {
    const MaybeTensor none;
    const Call call{x,
                    weight,
                    bias,
                    none,
                    none,
                    residual,
                    act,
                    /*training=*/true,
                    /*momentum=*/0,
                    /*eps=*/0,
                    /*updates=*/false,
                    kSync};
    check(call);
    check_statistics(kSync, statistics, x);
    auto [y, unused, signs] = empty_outputs(call, /*for_backward=*/true);
    return {y, signs};
  }

  static Two kernel(const Tensor& x, const Tensor& statistics, const MaybeTensor& weight,
                    const MaybeTensor& bias, const MaybeTensor& residual, Activation act) {
    auto [y, signs] = meta(x, statistics, weight, bias, residual, act);
    if (x.numel() == 0) return {y, signs};
    normalize(kSync, x, statistics, weight, bias, residual, act, y, signs);
    return {y, signs};
  }
};

/// The coefficients of the gradient of x for the elements of this process, [2, channels]; its
/// gradients of weight and bias; the gradient of the residual. Empty if not wanted.
struct SyncSums {
  using Wanted = std::array<bool, 4>;
  static constexpr const char* kSchema =
      "torchkiln::sync_bn_backward_sums(Tensor grad, Tensor x, Tensor statistics, Tensor count, "
      "Tensor? weight, Tensor? bias, Tensor? residual, Tensor? signs, str act, bool[4] wanted) -> "
      "(Tensor, Tensor, Tensor, Tensor)";

  static Four meta(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                   const Tensor& count, const MaybeTensor& weight, const MaybeTensor& bias,
                   const MaybeTensor& residual, const MaybeTensor& signs, Activation,
                   Wanted wanted) {
    const Gradient given{grad, x, statistics, weight, bias, residual, signs};
    check_backward(kSync, given);
    check_same_device(kSync, "count", count, "grad", grad);
    TORCH_CHECK(count.scalar_type() == at::kDouble && count.sym_numel() == 1, "torchkiln.", kSync,
                ": count: got ", dtype_name(count.scalar_type()), " ", count.sym_sizes(),
                ", expected a float64");
    Four found = empty_gradients(given, {false, wanted[1], wanted[2], wanted[3]});
    std::get<0>(found) =
        wanted[0] ? empty_of({2, x.sym_size(1)}, statistics) : no_output(statistics);
    return found;
  }

  static Four kernel(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                     const Tensor& count, const MaybeTensor& weight, const MaybeTensor& bias,
                     const MaybeTensor& residual, const MaybeTensor& signs, Activation act,
                     Wanted wanted) {
    auto [coefficients, grad_weight, grad_bias, grad_residual] =
        meta(grad, x, statistics, count, weight, bias, residual, signs, act, wanted);
    if (x.numel() == 0)
      return {coefficients.zero_(), grad_weight.zero_(), grad_bias.zero_(), grad_residual};
    const Operands operands(x, weight, bias, residual);
    const MaybeCopy dense_grad = in_layout("grad", grad, operands.channels_last());
    BatchNormBackward arguments = arguments_of({grad, x, statistics, weight, bias, residual, signs},
                                               operands, *dense_grad, act);
    arguments.grad_weight = output(grad_weight);
    arguments.grad_bias = output(grad_bias);
    arguments.grad_residual = output(grad_residual);
    arguments.count = count.const_data_ptr<double>();
    arguments.coefficients = output(coefficients);
    launch_split(
        kSync, x, arguments, kGrain, [&] { return cpu::split(arguments); },
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_backward_sums(arguments, allocate, stream);
        },
        [&](int64_t begin, int64_t end) { return cpu::batch_norm_sums(arguments, begin, end); },
        [&](int64_t begin, int64_t end) {
          return cpu::batch_norm_sums_finish(arguments, begin, end);
        });
    return {coefficients, grad_weight, grad_bias, grad_residual};
  }
};

/// The gradient of x by the coefficients of all processes.
struct SyncInputGradient {
  static constexpr const char* kSchema =
      "torchkiln::sync_bn_backward_input(Tensor grad, Tensor x, Tensor statistics, "
      "Tensor coefficients, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? signs, "
      "str act) -> Tensor";

  static Tensor meta(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                     const Tensor& coefficients, const MaybeTensor& weight, const MaybeTensor& bias,
                     const MaybeTensor& residual, const MaybeTensor& signs, Activation) {
    const Gradient given{grad, x, statistics, weight, bias, residual, signs};
    check_backward(kSync, given);
    check_same_device(kSync, "coefficients", coefficients, "grad", grad);
    TORCH_CHECK(coefficients.scalar_type() == statistics.scalar_type() &&
                    coefficients.is_contiguous() && coefficients.sym_numel() == 2 * x.sym_size(1),
                "torchkiln.", kSync, ": coefficients: got ", dtype_name(coefficients.scalar_type()),
                " ", coefficients.sym_sizes(),
                ", expected the sum of those of sync_bn_backward_sums, ",
                dtype_name(statistics.scalar_type()), " [2, ", x.sym_size(1), "]");
    return std::get<0>(empty_gradients(given, {true, false, false, false}));
  }

  static Tensor kernel(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                       const Tensor& coefficients, const MaybeTensor& weight,
                       const MaybeTensor& bias, const MaybeTensor& residual,
                       const MaybeTensor& signs, Activation act) {
    Tensor grad_x = meta(grad, x, statistics, coefficients, weight, bias, residual, signs, act);
    if (x.numel() == 0) return grad_x;
    const Operands operands(x, weight, bias, residual);
    const MaybeCopy dense_grad = in_layout("grad", grad, operands.channels_last());
    BatchNormBackward arguments = arguments_of({grad, x, statistics, weight, bias, residual, signs},
                                               operands, *dense_grad, act);
    arguments.grad_x = grad_x.data_ptr();
    arguments.coefficients = const_cast<void*>(coefficients.const_data_ptr());
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
