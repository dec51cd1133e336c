#include <cmath>

#include "batch_norm/moments.h"
#include "detail/bitmask.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

template <class T>
void task_moments(const BatchNorm& p, const ChannelPlan& plan, int64_t task) {
  using C = Compute<T>;
  const bool one_channel = !has_rows(p.layout);
  const int64_t pixels = p.layout.inner;
  const int64_t part = task / plan.groups;
  Moments* const to = static_cast<Moments*>(p.workspace) + part * p.layout.channels;
  double sums[kChannelRun], squares[kChannelRun], origins[kChannelRun], count = 0;
  Moments of_channel{};
  int64_t slots = 0;
  const int64_t sample = p.layout.channels * pixels;
  C buffer[kChannelRun];
  for_each_task_run(
      p.layout, plan, task,
      [&](int64_t at, int64_t length, int64_t, bool is_first) {
        const C* const x = read_run(buffer, p.x, at, 1, length, p.dtype);
        if (one_channel) {
          of_channel = merged(is_first ? Moments{} : of_channel, run_moments(x, length));
          return;
        }
        if (is_first) {
          count = 0;
          slots = length;
          std::fill_n(sums, length, 0.0);
          std::fill_n(squares, length, 0.0);
          for (int64_t i = 0; i < length; ++i)
            origins[i] = static_cast<double>(x[i % sample / pixels * pixels]);
        }
        count += static_cast<double>(length > sample ? length / sample * pixels : pixels);
        add_run(sums, squares, false, length, [&](int64_t i) {
          const double distance = static_cast<double>(x[i]) - origins[i];
          return Pair<double>{distance, distance * distance};
        });
      },
      [&](int64_t width, int64_t channel) {
        if (one_channel) {
          to[channel] = of_channel;
          return;
        }
        for (int64_t i = 0; i < width; ++i) {
          const int64_t first = i * pixels;
          double sum = 0, of_squares = 0;
          // A sum for each sample, because the rounding error grows with the number of terms.
          for (int64_t at = first; at < slots; at += width * pixels) {
            double part = 0, part_of_squares = 0;
            for (int64_t k = at; k < at + pixels; ++k) {
              part += sums[k];
              part_of_squares += squares[k];
            }
            sum += part;
            of_squares += part_of_squares;
          }
          to[channel + i] = moments_of(count, origins[first], sum, of_squares);
        }
      });
}

double read_one(const void* from, int64_t at, Dtype dtype) {
  double value = 0;
  return *read_run(&value, from, at, 1, 1, dtype);
}

void move_running(const RunningStatistic& running, int64_t channel, double value, double momentum,
                  Dtype dtype) {
  if (running.data == nullptr) return;
  const int64_t at = channel * running.stride;
  const double moved = momentum * value + (1 - momentum) * read_one(running.data, at, dtype);
  (void)dispatch_floating(dtype, [&](auto tag) {
    narrow(static_cast<typename decltype(tag)::type*>(running.data) + at, moved);
    return Status{};
  });
}

template <class C, class Problem>
void write_statistics(const Problem& p, int64_t channels, int64_t channel, double mean,
                      double variance) {
  C* const to = static_cast<C*>(p.statistics) + channel;
  to[0] = static_cast<C>(mean);
  to[channels] = static_cast<C>(mean - static_cast<double>(to[0]));
  to[2 * channels] = static_cast<C>(1 / std::sqrt(variance + p.eps));
}

template <class C>
void finish_channel(const BatchNorm& p, const ChannelPlan& plan, int64_t channel) {
  const int64_t channels = p.layout.channels;
  if (!p.training) {
    write_statistics<C>(
        p, channels, channel,
        read_one(p.running_mean.data, channel * p.running_mean.stride, p.running_dtype),
        read_one(p.running_var.data, channel * p.running_var.stride, p.running_dtype));
    return;
  }
  Moments all{};
  const Moments* const parts = static_cast<const Moments*>(p.workspace) + channel;
  for (int64_t part = 0; part < plan.parts(); ++part) all = merged(all, parts[part * channels]);
  if (p.moments != nullptr) {
    p.moments[channel] = all.mean;
    p.moments[channels + channel] = all.squares;
    if (channel == 0) p.moments[2 * channels] = all.count;
    return;
  }
  write_statistics<C>(p, channels, channel, all.mean, all.squares / all.count);
  move_running(p.running_mean, channel, all.mean, p.momentum, p.running_dtype);
  move_running(p.running_var, channel, all.squares / (all.count - 1), p.momentum, p.running_dtype);
}

template <class C>
void merge_channel(const BatchNormMerge& p, int64_t channel) {
  Moments all{};
  for (int64_t process = 0; process < p.processes; ++process) {
    const double* const from = p.moments + process * (2 * p.channels + 1);
    const Moments each{from[2 * p.channels], from[channel], from[p.channels + channel]};
    if (each.count > 0) all = merged(all, each);
  }
  if (channel == 0) *p.count = all.count;
  write_statistics<C>(p, p.channels, channel, all.mean, all.squares / all.count);
  if (all.count == 0) return;
  const double momentum = p.batches == nullptr ? p.momentum : 1 / static_cast<double>(*p.batches);
  move_running(p.running_mean, channel, all.mean, momentum, p.running_dtype);
  move_running(p.running_var, channel, all.squares / (all.count - 1), momentum, p.running_dtype);
}

template <bool kRows, class T>
void outputs(const BatchNorm& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  ChannelFactors<T> factors;
  const auto activation = loops_of<C>(p.activation);
  C buffer[kChannelRun], z[kChannelRun];
  for_each_channel_run(p.layout, begin, end, [&](int64_t at, int64_t count, int64_t place) {
    factors.load(p, place, count);
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
    read_argument<kRows>(z, factors, x, p.residual, at, count, p.dtype);
    activation.values(z, count);
    narrow_run(static_cast<T*>(p.y) + at, z, count);
  });
  if (p.signs != nullptr) pack_signs(p.signs, static_cast<const T*>(p.y), begin, end);
}

}  // namespace

Status batch_norm_moments(const BatchNorm& p, int64_t begin, int64_t end) {
  const ChannelPlan plan(p.layout);
  return dispatch_floating(p.dtype, [&](auto tag) {
    for (int64_t task = begin; task < end; ++task)
      task_moments<typename decltype(tag)::type>(p, plan, task);
    return Status{};
  });
}

Status batch_norm_finish(const BatchNorm& p, int64_t begin, int64_t end) {
  const ChannelPlan plan(p.layout);
  for (int64_t channel = begin; channel < end; ++channel) {
    p.dtype == Dtype::float64 ? finish_channel<double>(p, plan, channel)
                              : finish_channel<float>(p, plan, channel);
  }
  return {};
}

Status batch_norm_merge(const BatchNormMerge& p, int64_t begin, int64_t end) {
  for (int64_t channel = begin; channel < end; ++channel)
    p.dtype == Dtype::float64 ? merge_channel<double>(p, channel)
                              : merge_channel<float>(p, channel);
  return {};
}

Status batch_norm(const BatchNorm& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    has_rows(p.layout) ? outputs<true, T>(p, begin, end) : outputs<false, T>(p, begin, end);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(batch_norm_moments, (const BatchNorm& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(batch_norm_finish, (const BatchNorm& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(batch_norm_merge, (const BatchNormMerge& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(batch_norm, (const BatchNorm& p, int64_t begin, int64_t end), (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const BatchNorm& p) {
  if (!p.training) return {0, 0, p.layout.channels};
  const TORCHKILN_ISA::ChannelPlan plan(p.layout);
  const auto moments = static_cast<size_t>(plan.parts() * p.layout.channels);
  return {plan.tasks(), moments * 3 * sizeof(double), p.layout.channels};
}

#endif

}  // namespace torchkiln::cpu
