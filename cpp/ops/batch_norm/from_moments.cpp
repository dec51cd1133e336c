// Batch norm in training if the moments of x are known, because the op that made x computed them.
// It saves the pass over x for moments; backward is that of bn_act.

#include "batch_norm/batch_norm.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/empty.h"

namespace torchkiln::batch_norm_ops {
namespace {

constexpr const char* kFromMoments = "bn_act_from_moments";

struct MomentsCall : Call {
  Borrowed<Tensor> moments;

  void complete() {
    training = updates = true;
    name = kFromMoments;
  }

  TORCHKILN_FIELDS(self.x, self.moments, self.weight, self.bias, self.running_mean,
                   self.running_var, self.residual, self.act, self.momentum, self.eps);
};

/// The forward op whose results {y, statistics, signs} backward needs.
struct MomentsForward {
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_from_moments_forward(Tensor x, Tensor moments, Tensor? weight, "
      "Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, "
      "str act, float momentum, float eps) -> (Tensor, Tensor, Tensor)";

  static Three meta(const MomentsCall& call) {
    Three found = outputs(call, /*for_backward=*/true);
    check_moments(kFromMoments, call.moments, call.x);
    return found;
  }

  static Three kernel(const MomentsCall& call) {
    auto [y, statistics, signs] = meta(call);
    if (y.numel() == 0) return {y, statistics.zero_(), signs};
    const Tensor count = empty_of({1}, call.moments->options());
    merge_moments(call, call.moments, std::nullopt, statistics, count);
    normalize(call, statistics, y, signs);
    return {y, statistics, signs};
  }
};

struct FromMoments {
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_from_moments(Tensor x, Tensor moments, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, str act, "
      "float momentum, float eps) -> Tensor";

  static Tensor meta(const MomentsCall& call) { return std::get<0>(MomentsForward::meta(call)); }
  static Tensor kernel(const MomentsCall& call) {
    return std::get<0>(MomentsForward::kernel(call));
  }
  /// Computes the moments again from x, because the derivative of the result includes theirs.
  static Tensor composite(const MomentsCall& call) { return composite_of(call); }
  static Tensor recorded(const Below& below, const MomentsCall& call) {
    return recorded_outputs(below.call<MomentsForward>(call), call);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<MomentsForward, FromMoments>(m); }

}  // namespace torchkiln::batch_norm_ops
