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

/// A gradient's own memory for the numbers of a run if it has the compute type, else `buffer`.
template <class T>
Compute<T>* place_of(void* gradient, int64_t at, Compute<T>* buffer) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    if (gradient != nullptr) return static_cast<T*>(gradient) + at;
  }
  return buffer;
}

/// Rounds the numbers of a run, unless they have been computed in place.
template <class T>
void write_run(void* gradient, int64_t at, const Compute<T>* from, int64_t count) {
  if (!std::is_same_v<T, Compute<T>>) narrow_run(static_cast<T*>(gradient) + at, from, count);
}

/// Computes g, the gradient of the argument of the activation, for runs of elements.
template <bool kRows, class T>
class ArgumentGradient {
 public:
  using C = Compute<T>;
  const C* g = nullptr;
  const C* x = nullptr;
  ChannelFactors<T> factors;

  explicit ArgumentGradient(const BatchNormBackward& p)
      : activation_(loops_of<C>(p.activation)),
        is_linear_(saved_by(p.activation) == Saved::nothing) {}

  /// Reads x and computes g. Without an activation g is the incoming gradient.
  void read(const BatchNormBackward& p, int64_t at, int64_t count, int64_t place) {
    C z[kChannelRun];
    factors.load(p, place, count);
    x = read_run(x_, p.x, at, 1, count, p.dtype);
    const C* const grad = read_run(grad_, p.grad, at, 1, count, p.dtype);
    g = grad;
    if (is_linear_) return;
    if (p.signs != nullptr) {
      unpack_signs(z, p.signs, at, count);
    } else {
      read_argument<kRows>(z, factors, x, p.residual, at, count, p.dtype);
    }
    C* const to = place_of<T>(p.grad_residual, at, grad_);
    activation_.gradients(to, grad, z, count);
    g = to;
  }

  /// read() for a run that has been read before: g may be in the gradient of the residual.
  void read_again(const BatchNormBackward& p, int64_t at, int64_t count, int64_t place) {
    if (is_linear_ || !std::is_same_v<T, C> || p.grad_residual == nullptr)
      return read(p, at, count, place);
    factors.load(p, place, count);
    x = read_run(x_, p.x, at, 1, count, p.dtype);
    g = place_of<T>(p.grad_residual, at, grad_);
  }

  void write_residual(const BatchNormBackward& p, int64_t at, int64_t count) {
    if (p.grad_residual == nullptr) return;
    if (is_linear_ || !std::is_same_v<T, C>)
      narrow_run(static_cast<T*>(p.grad_residual) + at, g, count);
  }

 private:
  ActivationLoops<C> activation_;
  bool is_linear_;
  C x_[kChannelRun], grad_[kChannelRun];
};

/// The sums of the channels of a task: of each element of a row, or of one channel.
template <bool kRows, class T>
void task_sums(const BatchNormBackward& p, const ChannelPlan& plan, int64_t task) {
  using C = Compute<T>;
  const int64_t pixels = p.layout.inner;
  GradientSums* const to = sums_of(p, task / plan.groups);
  ArgumentGradient<kRows, T> gradient(p);
  double sums[kChannelRun], products[kChannelRun];
  C block_sums[kChannelRun], block_products[kChannelRun], buffer[kChannelRun];
  int64_t rows = 0, slots = 1;
  const auto end_rows = [&] {
    end_block(sums, block_sums, slots);
    end_block(products, block_products, slots);
  };
  for_each_task_run(
      p.layout, plan, task,
      [&](int64_t at, int64_t count, int64_t channel, bool is_first) {
        if (is_first) {
          slots = kRows ? count : 1;
          for (double* const each : {sums, products}) std::fill_n(each, slots, 0.0);
          for (C* const each : {block_sums, block_products}) std::fill_n(each, slots, C(0));
          rows = 0;
        }
        gradient.read(p, at, count, channel * pixels);
        const C* const g = gradient.g;
        const C* const x = gradient.x;
        const C* const mean = gradient.factors.mean;
        if (kRows) {
          add_row(block_sums, block_products, g, count, [&](int64_t i) { return x[i] - mean[i]; });
          if (++rows % kBlockRows == 0) end_rows();
        } else {
          const Pair<double> of_run = run_sums(g, x, mean[0], count);
          sums[0] += of_run.first;
          products[0] += of_run.second;
        }
        if (!p.training && p.grad_x != nullptr) {
          const auto scale = values_of_run<kRows>(gradient.factors.scale);
          C* const result = place_of<T>(p.grad_x, at, buffer);
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) result[i] = g[i] * scale[i];
          write_run<T>(p.grad_x, at, result, count);
        }
        gradient.write_residual(p, at, count);
      },
      [&](int64_t width, int64_t channel) {
        if (!kRows) {
          to[channel] = {sums[0], products[0]};
          return;
        }
        end_rows();
        for (int64_t i = 0; i < width; ++i) {
          GradientSums all{};
          for (int64_t first = i * pixels; first < slots; first += width * pixels) {
            GradientSums of_sample{};
            for (int64_t k = first; k < first + pixels; ++k) {
              of_sample.gradient += sums[k];
              of_sample.product += products[k];
            }
            all.gradient += of_sample.gradient;
            all.product += of_sample.product;
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

template <bool kRows, class T>
void input_gradients(const BatchNormBackward& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  ArgumentGradient<kRows, T> gradient(p);
  C buffer[kChannelRun], slopes[kChannelRun] = {}, levels[kChannelRun] = {};
  int64_t known = -1, known_count = 0;
  const int64_t pixels = p.layout.inner, channels = p.layout.channels;
  for_each_channel_run(p.layout, begin, end, [&](int64_t at, int64_t count, int64_t place) {
    gradient.read_again(p, at, count, place);
    const int64_t channel = place / pixels;
    const int64_t key = kRows ? place : channel;
    if (key != known || (kRows && count > known_count)) {
      known = key;
      known_count = count;
      const C* const from = static_cast<const C*>(p.coefficients) + channel;
      const int64_t of = kRows ? ChannelFactors<T>::channels_of(p.layout, place, count) : 1;
      std::copy_n(from, of, slopes);
      std::copy_n(from + channels, of, levels);
      if (kRows) ChannelFactors<T>::repeat({slopes, levels}, p.layout, place, count);
    }
    const auto slope = values_of_run<kRows>(slopes);
    const auto level = values_of_run<kRows>(levels);
    const auto scale = values_of_run<kRows>(gradient.factors.scale);
    const auto mean = values_of_run<kRows>(gradient.factors.mean);
    const C* const g = gradient.g;
    const C* const x = gradient.x;
    C* const result = place_of<T>(p.grad_x, at, buffer);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i)
      result[i] = (g[i] - slope[i] * (x[i] - mean[i]) - level[i]) * scale[i];
    write_run<T>(p.grad_x, at, result, count);
  });
}

}  // namespace

Status batch_norm_sums(const BatchNormBackward& p, int64_t begin, int64_t end) {
  const ChannelPlan plan(p.layout);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t task = begin; task < end; ++task)
      has_rows(p.layout) ? task_sums<true, T>(p, plan, task) : task_sums<false, T>(p, plan, task);
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
    using T = typename decltype(tag)::type;
    has_rows(p.layout) ? input_gradients<true, T>(p, begin, end)
                       : input_gradients<false, T>(p, begin, end);
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
