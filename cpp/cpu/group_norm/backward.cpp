#include "group_norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// The gradient of the argument of the activation, g, and x - mean, for a run of elements.
template <class T, class Act>
class ArgumentGradient {
 public:
  using C = Compute<T>;
  C g[kChannelRun];
  C from_mean[kChannelRun];
  C scales[kChannelRun];

  void read(const GroupNormBackward& p, const GroupFactors<C>& factors, int64_t at, int64_t count,
            int64_t channel) {
    C buffer[kChannelRun], z[kChannelRun];
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) from_mean[i] = x[i] - factors.mean;
    factors.argument(z, scales, x, count, channel);
    const C* const grad = read_run(buffer, p.grad, at, 1, count, p.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) g[i] = gradient_from_input<Act, ExactMath>(grad[i], z[i]);
  }
};

/// The workspace: sums of g, then of g * n, for each channel of each sample.
double* sums_of(const GroupNormBackward& p, int64_t sample) {
  return static_cast<double*>(p.workspace) + sample * 2 * p.layout.channels;
}

template <class T, class Act>
void group_gradients(const GroupNormBackward& p, int64_t group) {
  using C = Compute<T>;
  const GroupLayout& layout = p.layout;
  const GroupFactors<C> factors(p, group);
  ArgumentGradient<T, Act> gradient;
  const int64_t channels = layout.channels_per_group();
  double* const sums = sums_of(p, group / layout.groups) + group % layout.groups * channels;
  double* const products = sums + layout.channels;
  std::fill_n(sums, channels, 0.0);
  std::fill_n(products, channels, 0.0);
  for_each_group_run(layout, group, [&](int64_t at, int64_t count, int64_t channel) {
    gradient.read(p, factors, at, count, channel);
    const auto term = [&](int64_t i) {
      const auto each = static_cast<double>(gradient.g[i]);
      return Pair<double>{each, each * static_cast<double>(gradient.from_mean[i])};
    };
    if (layout.channels_last) {
      add_run(sums + channel, products + channel, false, count, term);
      return;
    }
    double of_run[kSums] = {}, products_of_run[kSums] = {};
    add_run(of_run, products_of_run, true, count, term);
    sums[channel] += total_of(of_run);
    products[channel] += total_of(products_of_run);
  });
  const auto low = static_cast<double>(factors.low), rstd = static_cast<double>(factors.rstd);
  double sum = 0, product = 0;
  for (int64_t i = 0; i < channels; ++i) {
    products[i] = (products[i] - low * sums[i]) * rstd;
    const auto weight = static_cast<double>(factors.weight[static_cast<size_t>(i)]);
    sum += weight * sums[i];
    product += weight * products[i];
  }
  if (p.grad_x == nullptr) return;
  const auto count = static_cast<double>(layout.count());
  const double exact_slope = product * rstd * rstd / count;
  const auto slope = static_cast<C>(exact_slope);
  const auto level = static_cast<C>(sum * rstd / count - exact_slope * low);
  C result[kChannelRun];
  for_each_group_run(layout, group, [&](int64_t at, int64_t length, int64_t channel) {
    gradient.read(p, factors, at, length, channel);
#pragma GCC ivdep
    for (int64_t i = 0; i < length; ++i)
      result[i] = gradient.g[i] * gradient.scales[i] - slope * gradient.from_mean[i] - level;
    narrow_run(static_cast<T*>(p.grad_x) + at, result, length);
  });
}

}  // namespace

Status group_norm_backward(const GroupNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    with_activation(
        p.activation,
        [&](auto act) {
          for (int64_t group = begin; group < end; ++group)
            group_gradients<typename decltype(tag)::type, typename decltype(act)::type>(p, group);
        },
        Activations{});
    return Status{};
  });
}

Status group_norm_backward_finish(const GroupNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.parameter_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    for (int64_t channel = begin; channel < end; ++channel) {
      double sum = 0, product = 0;
      for (int64_t sample = 0; sample < p.layout.batch; ++sample) {
        sum += sums_of(p, sample)[channel];
        product += sums_of(p, sample)[p.layout.channels + channel];
      }
      if (p.grad_weight != nullptr) narrow(static_cast<W*>(p.grad_weight) + channel, product);
      if (p.grad_bias != nullptr) narrow(static_cast<W*>(p.grad_bias) + channel, sum);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(group_norm_backward, (const GroupNormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(group_norm_backward_finish,
                    (const GroupNormBackward& p, int64_t begin, int64_t end), (p, begin, end))

#ifdef TORCHKILN_BASELINE

Split split(const GroupNormBackward& p) {
  const auto sums = static_cast<size_t>(p.layout.batch * p.layout.channels) * 2;
  return {p.layout.all_groups(), sums * sizeof(double), p.layout.channels};
}

#endif

}  // namespace torchkiln::cpu
