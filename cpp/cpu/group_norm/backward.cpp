#include "group_norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Maximum number of elements in a span whose gradients g are kept from the first pass for the
// second: 256 KiB in float32.
constexpr int64_t kKeptElements = 1 << 16;

/// Computes g, the gradient of the activation's argument, for the runs of a span.
template <bool kRows, class C>
class ArgumentGradient {
 public:
  ArgumentGradient(const GroupNormBackward& p, const GroupSpan& span)
      : p_(p), span_(span), activation_(loops_of<C>(p.activation)), factors_(p, span) {
    if (span.elements() <= kKeptElements) kept_.resize(static_cast<size_t>(span.elements()));
  }

  const GroupFactors<C>& factors() const { return factors_; }

  /// Calls body(at, count, channel, g, x - mean) for all runs.
  template <class Body>
  void first_pass(const Body& body) {
    C g[kChannelRun];
    C* next = kept_.data();
    span_.for_each_run([&](int64_t at, int64_t count, int64_t channel) {
      C* const to = kept_.empty() ? g : next;
      compute(to, at, count, channel);
      body(at, count, channel, to, from_mean_);
      next += kept_.empty() ? 0 : count;
    });
  }

  /// Calls body() for all runs again. Reuses g if the first pass has kept it.
  template <class Body>
  void second_pass(const Body& body) {
    if (kept_.empty()) return first_pass(body);
    const C* next = kept_.data();
    C buffer[kChannelRun];
    span_.for_each_run([&](int64_t at, int64_t count, int64_t channel) {
      const C* const x = read_run(buffer, p_.x, at, 1, count, p_.dtype);
      const auto mean = values_of_run<kRows>(factors_.mean, channel);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) from_mean_[i] = x[i] - mean[i];
      body(at, count, channel, next, from_mean_);
      next += count;
    });
  }

 private:
  void compute(C* g, int64_t at, int64_t count, int64_t channel) {
    C buffer[kChannelRun], z[kChannelRun];
    const C* const x = read_run(buffer, p_.x, at, 1, count, p_.dtype);
    read_argument<kRows>(from_mean_, z, factors_, x, count, channel);
    activation_.gradients(g, read_run(buffer, p_.grad, at, 1, count, p_.dtype), z, count);
  }

  const GroupNormBackward& p_;
  const GroupSpan& span_;
  ActivationLoops<C> activation_;
  GroupFactors<C> factors_;
  C from_mean_[kChannelRun];
  std::vector<C> kept_;
};

/// The sums in the workspace for a sample: of g, then of g * n, for each channel.
double* sums_of(const GroupNormBackward& p, int64_t sample) {
  return static_cast<double*>(p.workspace) + sample * 2 * p.layout.channels;
}

template <bool kRows, class T>
void span_gradients(const GroupNormBackward& p, const GroupSpan& span) {
  using C = Compute<T>;
  ArgumentGradient<kRows, C> gradient(p, span);
  const auto channels = static_cast<size_t>(span.channels());
  double* const sums = sums_of(p, span.group() / p.layout.groups) + span.first_channel();
  double* const products = sums + p.layout.channels;
  std::fill_n(sums, channels, 0.0);
  std::fill_n(products, channels, 0.0);
  gradient.first_pass([&](int64_t, int64_t count, int64_t channel, const C* g, const C* from_mean) {
    const auto term = [&](int64_t i) {
      const auto each = static_cast<double>(g[i]);
      return Pair<double>{each, each * static_cast<double>(from_mean[i])};
    };
    if constexpr (kRows) {
      add_run(sums + channel, products + channel, false, count, term);
      return;
    }
    double of_run[kSums] = {}, products_of_run[kSums] = {};
    add_run(of_run, products_of_run, true, count, term);
    sums[channel] += total_of(of_run);
    products[channel] += total_of(products_of_run);
  });
  const GroupFactors<C>& factors = gradient.factors();
  std::vector<Pair<double>> groups(static_cast<size_t>(span.groups()));
  const auto group_of = [&](size_t channel) -> Pair<double>& {
    return groups[static_cast<size_t>(span.group_of(static_cast<int64_t>(channel)))];
  };
  for (size_t i = 0; i < channels; ++i) {
    const auto low = static_cast<double>(factors.low[i]);
    products[i] = (products[i] - low * sums[i]) * static_cast<double>(factors.rstd[i]);
    const auto weight = static_cast<double>(factors.weight[i]);
    group_of(i).first += weight * sums[i];
    group_of(i).second += weight * products[i];
  }
  if (p.grad_x == nullptr) return;
  // grad_x = g * scale - slope * (x - mean) - level
  ChannelValues<C> slopes(channels), levels(channels);
  const auto count = static_cast<double>(p.layout.count());
  for (size_t i = 0; i < channels; ++i) {
    const auto low = static_cast<double>(factors.low[i]);
    const auto rstd = static_cast<double>(factors.rstd[i]);
    const double slope = group_of(i).second * rstd * rstd / count;
    slopes[i] = static_cast<C>(slope);
    levels[i] = static_cast<C>(group_of(i).first * rstd / count - slope * low);
  }
  C result[kChannelRun];
  gradient.second_pass(
      [&](int64_t at, int64_t length, int64_t channel, const C* g, const C* from_mean) {
        const auto scale = values_of_run<kRows>(factors.scale, channel);
        const auto slope = values_of_run<kRows>(slopes, channel);
        const auto level = values_of_run<kRows>(levels, channel);
#pragma GCC ivdep
        for (int64_t i = 0; i < length; ++i)
          result[i] = g[i] * scale[i] - slope[i] * from_mean[i] - level[i];
        narrow_run(static_cast<T*>(p.grad_x) + at, result, length);
      });
}

}  // namespace

Status group_norm_backward(const GroupNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_span(p.layout, begin, end,
                  [&](const GroupSpan& span, auto rows) { span_gradients<rows, T>(p, span); });
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

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const GroupNormBackward& p) {
  const auto sums = static_cast<size_t>(p.layout.batch * p.layout.channels) * 2;
  return {p.layout.all_groups(), sums * sizeof(double), p.layout.channels};
}

#endif

}  // namespace torchkiln::cpu
