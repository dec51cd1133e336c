#include "batch_norm/common.h"
#include "detail/bitmask.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// Sums over a part of a channel: the sum of g, and the sum of g * (x - mean) with the rounded
/// mean.
struct GradientSums {
  double gradient;
  double product;
};

/// The sums in the workspace for a part of the channels: one per channel.
GradientSums* sums_of(const BatchNormBackward& p, int64_t part) {
  return static_cast<GradientSums*>(p.workspace) + part * p.layout.channels;
}

/// Computes g, the gradient of the argument of the activation, for runs of elements.
template <class T>
class ArgumentGradient {
 public:
  using C = Compute<T>;
  C g[kChannelRun];
  C from_mean[kChannelRun];
  ChannelFactors<T> factors;

  explicit ArgumentGradient(const BatchNormBackward& p)
      : activation_(loops_of<C>(p.activation)),
        reads_argument_(saved_by(p.activation) != Saved::nothing) {}

  void read(const BatchNormBackward& p, int64_t at, int64_t count, int64_t place) {
    C buffer[kChannelRun], z[kChannelRun];
    factors.load(p, place, count);
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) from_mean[i] = x[i] - factors.mean[i];
    if (reads_argument_) {
      if (p.signs != nullptr) {
        unpack_signs(z, p.signs, at, count);
      } else {
        read_argument(z, factors, p.x, p.residual, at, count, p.dtype);
      }
    }
    activation_.gradients(g, read_run(buffer, p.grad, at, 1, count, p.dtype), z, count);
  }

 private:
  ActivationLoops<C> activation_;
  bool reads_argument_;
};

template <class T>
void task_sums(const BatchNormBackward& p, const ChannelPlan& plan, int64_t task) {
  using C = Compute<T>;
  const bool one_channel = !has_rows(p.layout);
  const int64_t pixels = p.layout.inner;
  GradientSums* const to = sums_of(p, task / plan.groups);
  ArgumentGradient<T> gradient(p);
  // Sums of each element of a row, or of one channel.
  double sums[kChannelRun], products[kChannelRun];
  C block_sums[kChannelRun], block_products[kChannelRun], result[kChannelRun];
  int64_t rows = 0;
  for_each_task_run(
      p.layout, plan, task,
      [&](int64_t at, int64_t count, int64_t channel, bool is_first) {
        const int64_t slots = one_channel ? 1 : count;
        if (is_first) {
          std::fill_n(sums, slots, 0.0);
          std::fill_n(products, slots, 0.0);
          std::fill_n(block_sums, slots, C(0));
          std::fill_n(block_products, slots, C(0));
          rows = 0;
        }
        gradient.read(p, at, count, channel * pixels);
        const C* const g = gradient.g;
        if (one_channel) {
          const Pair<double> of_run = run_sums(g, gradient.from_mean, count);
          sums[0] += of_run.first;
          products[0] += of_run.second;
        } else {
          add_row(block_sums, block_products, g, gradient.from_mean, count);
          if (++rows % kBlockRows == 0) {
            end_block(sums, block_sums, count);
            end_block(products, block_products, count);
          }
        }
        if (!p.training && p.grad_x != nullptr) {
          const C* const scale = gradient.factors.scale;
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) result[i] = g[i] * scale[i];
          narrow_run(static_cast<T*>(p.grad_x) + at, result, count);
        }
        if (p.grad_residual != nullptr)
          narrow_run(static_cast<T*>(p.grad_residual) + at, gradient.g, count);
      },
      [&](int64_t width, int64_t channel) {
        if (one_channel) {
          to[channel] = {sums[0], products[0]};
          return;
        }
        end_block(sums, block_sums, width * pixels);
        end_block(products, block_products, width * pixels);
        for (int64_t i = 0; i < width; ++i) {
          GradientSums all{};
          for (int64_t k = i * pixels; k < (i + 1) * pixels; ++k) {
            all.gradient += sums[k];
            all.product += products[k];
          }
          to[channel + i] = all;
        }
      });
}

template <class C>
void finish_channel(const BatchNormBackward& p, const ChannelPlan& plan, int64_t channel) {
  GradientSums all{};
  for (int64_t part = 0; part < plan.parts(); ++part) {
    all.gradient += sums_of(p, part)[channel].gradient;
    all.product += sums_of(p, part)[channel].product;
  }
  const C* const statistics = static_cast<const C*>(p.statistics) + channel;
  const auto low = static_cast<double>(statistics[p.layout.channels]);
  const auto rstd = static_cast<double>(statistics[2 * p.layout.channels]);
  const double product = (all.product - low * all.gradient) * rstd;
  (void)dispatch_floating(p.parameter_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.grad_weight != nullptr) narrow(static_cast<W*>(p.grad_weight) + channel, product);
    if (p.grad_bias != nullptr) narrow(static_cast<W*>(p.grad_bias) + channel, all.gradient);
    return Status{};
  });
  if (p.coefficients == nullptr) return;
  C* const coefficients = static_cast<C*>(p.coefficients) + channel;
  const double count = p.count == nullptr ? static_cast<double>(p.layout.count()) : *p.count;
  const double slope = product * rstd / count;
  coefficients[0] = static_cast<C>(slope);
  coefficients[p.layout.channels] = static_cast<C>(all.gradient / count - slope * low);
}

template <class T>
void input_gradients(const BatchNormBackward& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  ArgumentGradient<T> gradient(p);
  C result[kChannelRun], slope[kChannelRun], level[kChannelRun];
  int64_t known = -1, known_count = 0;
  const bool one_channel = !has_rows(p.layout);
  const int64_t pixels = p.layout.inner, channels = p.layout.channels;
  for_each_channel_run(p.layout, begin, end, [&](int64_t at, int64_t count, int64_t place) {
    gradient.read(p, at, count, place);
    const auto& factors = gradient.factors;
    T* const to = static_cast<T*>(p.grad_x) + at;
    const int64_t channel = place / pixels;
    const int64_t key = one_channel ? channel : place;
    if (key != known || (!one_channel && count != known_count)) {
      known = key;
      known_count = count;
      const C* const from = static_cast<const C*>(p.coefficients) + channel;
      if (one_channel) {
        std::fill_n(slope, kChannelRun, from[0]);
        std::fill_n(level, kChannelRun, from[channels]);
      } else {
        const int64_t skipped = place % pixels, of = (skipped + count + pixels - 1) / pixels;
        std::copy_n(from, of, slope);
        std::copy_n(from + channels, of, level);
        if (pixels > 1) ChannelFactors<T>::repeat({slope, level}, skipped, pixels, count);
      }
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      result[i] = (gradient.g[i] - slope[i] * gradient.from_mean[i] - level[i]) * factors.scale[i];
    }
    narrow_run(to, result, count);
  });
}

}  // namespace

Status batch_norm_sums(const BatchNormBackward& p, int64_t begin, int64_t end) {
  const ChannelPlan plan(p.layout);
  return dispatch_floating(p.dtype, [&](auto tag) {
    for (int64_t task = begin; task < end; ++task)
      task_sums<typename decltype(tag)::type>(p, plan, task);
    return Status{};
  });
}

Status batch_norm_sums_finish(const BatchNormBackward& p, int64_t begin, int64_t end) {
  const ChannelPlan plan(p.layout);
  for (int64_t channel = begin; channel < end; ++channel) {
    p.dtype == Dtype::float64 ? finish_channel<double>(p, plan, channel)
                              : finish_channel<float>(p, plan, channel);
  }
  return {};
}

Status batch_norm_backward(const BatchNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    input_gradients<typename decltype(tag)::type>(p, begin, end);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(batch_norm_sums, (const BatchNormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(batch_norm_sums_finish,
                    (const BatchNormBackward& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(batch_norm_backward, (const BatchNormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const BatchNormBackward& p) {
  const TORCHKILN_ISA::ChannelPlan plan(p.layout);
  const auto sums = static_cast<size_t>(plan.parts() * p.layout.channels);
  return {plan.tasks(), sums * 2 * sizeof(double), p.layout.channels};
}

#endif

}  // namespace torchkiln::cpu
