// Batch norm in training of an x whose moments are known, because the op that made x computed them.

#include "batch_norm/batch_norm.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/empty.h"

namespace torchkiln::batch_norm_ops {
namespace {

constexpr const char* kFromMoments = "bn_act_from_moments";

Call call_of(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
             const MaybeTensor& running_mean, const MaybeTensor& running_var,
             const MaybeTensor& residual, Activation act, double momentum, double eps) {
  return {x,
          weight,
          bias,
          running_mean,
          running_var,
          residual,
          act,
          /*training=*/true,
          momentum,
          eps,
          /*updates=*/true,
          kFromMoments};
}

/// The forward that also returns {y, statistics, signs} for backward.
struct MomentsForward {
  static constexpr const char* kSchema =
      "torchkiln::bn_act_from_moments_forward(Tensor x, Tensor moments, Tensor? weight, "
      "Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, "
      "str act, float momentum, float eps) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Tensor& x, const Tensor& moments, const MaybeTensor& weight,
                    const MaybeTensor& bias, const MaybeTensor& running_mean,
                    const MaybeTensor& running_var, const MaybeTensor& residual, Activation act,
                    double momentum, double eps) {
    const Call call =
        call_of(x, weight, bias, running_mean, running_var, residual, act, momentum, eps);
    Three found = outputs(call, /*for_backward=*/true);
    check_moments(kFromMoments, moments, x);
    return found;
  }

  static Three kernel(const Tensor& x, const Tensor& moments, const MaybeTensor& weight,
                      const MaybeTensor& bias, const MaybeTensor& running_mean,
                      const MaybeTensor& running_var, const MaybeTensor& residual, Activation act,
                      double momentum, double eps) {
    auto [y, statistics, signs] =
        meta(x, moments, weight, bias, running_mean, running_var, residual, act, momentum, eps);
    if (x.numel() == 0) return {y, statistics.zero_(), signs};
    const Tensor count = empty_of({1}, moments.options());
    merge_moments(kFromMoments, x, moments, {running_mean, running_var, std::nullopt, momentum},
                  eps, statistics, count);
    normalize(kFromMoments, x, statistics, weight, bias, residual, act, y, signs);
    return {y, statistics, signs};
  }
};

struct FromMoments {
  static constexpr const char* kSchema =
      "torchkiln::bn_act_from_moments(Tensor x, Tensor moments, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, str act, "
      "float momentum, float eps) -> Tensor";

  static Tensor meta(const Tensor& x, const Tensor& moments, const MaybeTensor& weight,
                     const MaybeTensor& bias, const MaybeTensor& running_mean,
                     const MaybeTensor& running_var, const MaybeTensor& residual, Activation act,
                     double momentum, double eps) {
    return std::get<0>(MomentsForward::meta(x, moments, weight, bias, running_mean, running_var,
                                            residual, act, momentum, eps));
  }

  static Tensor kernel(const Tensor& x, const Tensor& moments, const MaybeTensor& weight,
                       const MaybeTensor& bias, const MaybeTensor& running_mean,
                       const MaybeTensor& running_var, const MaybeTensor& residual, Activation act,
                       double momentum, double eps) {
    return std::get<0>(MomentsForward::kernel(x, moments, weight, bias, running_mean, running_var,
                                              residual, act, momentum, eps));
  }

  /// The moments again, from x: their derivatives belong to those of the result.
  static Tensor composite(const Tensor& x, const Tensor&, const MaybeTensor& weight,
                          const MaybeTensor& bias, const MaybeTensor& running_mean,
                          const MaybeTensor& running_var, const MaybeTensor& residual,
                          Activation act, double momentum, double eps) {
    return composite_of(
        call_of(x, weight, bias, running_mean, running_var, residual, act, momentum, eps));
  }

  static Tensor recorded(const Below& below, const Tensor& x, const Tensor& moments,
                         const MaybeTensor& weight, const MaybeTensor& bias,
                         const MaybeTensor& running_mean, const MaybeTensor& running_var,
                         const MaybeTensor& residual, Activation act, double momentum, double eps) {
    return recorded_outputs(
        below.call<MomentsForward>(x, moments, weight, bias, running_mean, running_var, residual,
                                   act, momentum, eps),
        x, weight, bias, residual,
        {act, /*training=*/true, eps, residual.has_value(), channels_are_last(x)});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<MomentsForward, FromMoments>(m); }

}  // namespace torchkiln::batch_norm_ops
