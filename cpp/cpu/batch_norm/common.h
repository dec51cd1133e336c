#pragma once

// The split of the elements into tasks and runs, and the factors of each channel, for forward and
// backward of batch norm on the CPU.

#include <algorithm>

#include "detail/simd.h"
#include "torchkiln/core/functors.h"
#include "torchkiln/cpu/half.h"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Maximum number of elements per run. They are converted and computed together, and stay in the L1
// cache.
inline constexpr int64_t kChannelRun = 512;

/// The split of sums over the channels into tasks. A task is a chunk of `outer` and, if the
/// elements of a channel are adjacent, a group of channels. The workspace has the sums of each
/// task's channels.
struct ChannelPlan {
  int64_t chunks;
  int64_t outer_per_chunk;
  int64_t groups;
  int64_t channels_per_group;

  explicit ChannelPlan(const ChannelLayout& layout) {
    constexpr int64_t kTaskElements = 1 << 15;  // take longer than the start of a thread
    constexpr int64_t kMostChunks = 64;
    const bool rows = layout.inner == 1;
    const int64_t wanted =
        layout.numel() / kTaskElements / (rows ? 1 : std::max<int64_t>(layout.channels, 1));
    const int64_t most = std::clamp<int64_t>(layout.outer, 1, kMostChunks);
    const int64_t parts = std::clamp<int64_t>(wanted, 1, most);
    outer_per_chunk = std::max<int64_t>((layout.outer + parts - 1) / parts, 1);
    chunks = std::max<int64_t>((layout.outer + outer_per_chunk - 1) / outer_per_chunk, 1);
    const int64_t of_channel = std::max<int64_t>(outer_per_chunk * layout.inner, 1);
    channels_per_group = rows ? layout.channels
                              : std::clamp<int64_t>(kTaskElements / of_channel, 1,
                                                    std::max<int64_t>(layout.channels, 1));
    channels_per_group = std::max<int64_t>(channels_per_group, 1);
    groups = (layout.channels + channels_per_group - 1) / channels_per_group;
  }

  int64_t tasks() const { return chunks * groups; }
};

/// Calls body(at, count, channel) for runs of the elements begin <= i < end in memory. All elements
/// of a run belong to `channel`; with inner = 1 they belong to channel, channel + 1, ...
template <class Body>
void for_each_channel_run(const ChannelLayout& layout, int64_t begin, int64_t end,
                          const Body& body) {
  const bool rows = layout.inner == 1;
  const int64_t row = rows ? layout.channels : layout.inner;
  int64_t place = begin % row;
  int64_t plane = begin / row % layout.channels;
  for (int64_t at = begin; at < end;) {
    const int64_t count = std::min({kChannelRun, row - place, end - at});
    body(at, count, rows ? place : plane);
    at += count;
    place += count;
    if (place < row) continue;
    place = 0;
    if (++plane == layout.channels) plane = 0;
  }
}

/// Calls body(at, count, channel, is_first) for the runs of a task: channel by channel or, with
/// inner = 1, for kChannelRun adjacent channels at a time. is_first marks the first run of these
/// channels; end(count, channel) is called after their last run.
template <class Body, class End>
void for_each_task_run(const ChannelLayout& layout, const ChannelPlan& plan, int64_t task,
                       const Body& body, const End& end) {
  const int64_t chunk = task / plan.groups;
  const int64_t first = chunk * plan.outer_per_chunk;
  const int64_t last = std::min(first + plan.outer_per_chunk, layout.outer);
  const int64_t channel = task % plan.groups * plan.channels_per_group;
  const int64_t last_channel = std::min(channel + plan.channels_per_group, layout.channels);
  const int64_t step = layout.inner == 1 ? kChannelRun : 1;
  for (int64_t c = channel; c < last_channel; c += step) {
    const int64_t width = std::min(step, last_channel - c);
    bool is_first = true;
    for (int64_t outer = first; outer < last; ++outer) {
      const int64_t begin = (outer * layout.channels + c) * layout.inner;
      const int64_t length = width * layout.inner;
      for (int64_t done = 0; done < length; done += kChannelRun) {
        body(begin + done, std::min(kChannelRun, length - done), c, is_first);
        is_first = false;
      }
    }
    end(width, c);
  }
}

// Number of running sums of one channel.
inline constexpr int64_t kSums = 8;

/// Adds the pair term(i) of each element of a run to sums. If `one_channel`, all elements add to
/// kSums running sums of that channel; else element i adds to first[i] and second[i].
template <class Term>
void add_run(double* first, double* second, bool one_channel, int64_t count, const Term& term) {
  if (!one_channel) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const Pair<double> pair = term(i);
      first[i] += pair.first;
      second[i] += pair.second;
    }
    return;
  }
  // Running sums in registers. They start at 0 in each run, which limits the rounding error of many
  // terms.
  double a[kSums] = {}, b[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kSums; ++lane) {
      const Pair<double> pair = term(i + lane);
      a[lane] += pair.first;
      b[lane] += pair.second;
    }
  }
  for (; i < count; ++i) {
    const Pair<double> pair = term(i);
    a[i % kSums] += pair.first;
    b[i % kSums] += pair.second;
  }
  for (int64_t lane = 0; lane < kSums; ++lane) {
    first[lane] += a[lane];
    second[lane] += b[lane];
  }
}

/// The total of the running sums of one channel.
inline double total_of(const double* sums) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// The factors of the elements of a run: the argument of the activation is (x - mean) * scale +
/// shift. If the next run has the same channels, the factors are reused.
template <class T>
class ChannelFactors {
 public:
  using C = Compute<T>;
  C mean[kChannelRun];
  C scale[kChannelRun];
  C shift[kChannelRun];

  template <class Problem>
  void load(const Problem& p, int64_t channel, int64_t count) {
    const bool one_channel = p.layout.inner != 1;
    if (channel == channel_ && (one_channel || count == count_)) return;
    channel_ = channel;
    count_ = count;
    if (one_channel) count = 1;
    const C* const statistics = static_cast<const C*>(p.statistics) + channel;
    const C* const low = statistics + p.layout.channels;
    const C* const rstd = low + p.layout.channels;
    std::copy_n(statistics, count, mean);
    std::fill_n(scale, count, C(1));
    std::fill_n(shift, count, C(0));
    C buffer[kChannelRun];
    if (p.weight != nullptr)
      std::copy_n(read_run(buffer, p.weight, channel, 1, count, p.parameter_dtype), count, scale);
    if (p.bias != nullptr)
      std::copy_n(read_run(buffer, p.bias, channel, 1, count, p.parameter_dtype), count, shift);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) scale[i] *= rstd[i];
    // If the weight is infinite, its product with the rounding error of the mean (perhaps 0) must
    // not make the result NaN.
    for (int64_t i = 0; i < count; ++i)
      if (scale[i] - scale[i] == C(0)) shift[i] -= low[i] * scale[i];
    if (!one_channel) return;
    std::fill_n(mean, kChannelRun, mean[0]);
    std::fill_n(scale, kChannelRun, scale[0]);
    std::fill_n(shift, kChannelRun, shift[0]);
  }

 private:
  int64_t channel_ = -1;
  int64_t count_ = 0;
};

/// Computes the argument of the activation into z[i]. Forward and backward call this function, so
/// their roundings are equal.
template <class T, class C = Compute<T>>
void read_argument(C* z, const ChannelFactors<T>& factors, const void* x, const void* residual,
                   int64_t at, int64_t count, Dtype dtype) {
  C buffer[kChannelRun];
  const C* const from = read_run(buffer, x, at, 1, count, dtype);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i)
    z[i] = (from[i] - factors.mean[i]) * factors.scale[i] + factors.shift[i];
  if (residual == nullptr) return;
  const C* const added = read_run(buffer, residual, at, 1, count, dtype);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) z[i] += added[i];
}

/// The loops over the elements of a run that depend on the activation. They are functions, because
/// a copy of all loops for each activation would take a third of the compile time of the kernels.
template <class C>
struct ActivationLoops {
  void (*values)(C* z, int64_t count);
  void (*gradients)(C* g, const C* grad, const C* z, int64_t count);
};

/// Replaces z[i] by the activation.
template <class Act, class C>
void activation_values(C* z, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) z[i] = Act::template value<ExactMath>(z[i]);
}

/// Computes the gradient of the activation's argument. Does not read z if the activation is linear.
template <class Act, class C>
void activation_gradients(C* g, const C* grad, const C* z, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i)
    g[i] =
        gradient_from_input<Act, ExactMath>(grad[i], Act::kSaved == Saved::nothing ? C(0) : z[i]);
}

template <class C>
ActivationLoops<C> loops_of(Activation activation) {
  ActivationLoops<C> loops{};
  with_activation(
      activation,
      [&](auto act) {
        using Act = typename decltype(act)::type;
        loops = {activation_values<Act, C>, activation_gradients<Act, C>};
      },
      Activations{});
  return loops;
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
