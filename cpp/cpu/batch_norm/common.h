#pragma once

// The split of the elements into tasks and runs, and the factors of each channel, for forward and
// backward of batch norm on the CPU.

#include <algorithm>
#include <initializer_list>

#include "detail/simd_row.h"
#include "torchkiln/core/functors.h"
#include "torchkiln/cpu/half.h"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Maximum number of elements per run. They are converted and computed together, and stay in the L1
// cache.
inline constexpr int64_t kChannelRun = 512;

// Channels of fewer pixels are computed together, with factors for each element: a loop over the
// pixels of one channel would take longer to start than to run.
inline constexpr int64_t kFewPixels = 128;

/// Whether the elements of a sample are one row: runs of it have several channels.
inline bool has_rows(const ChannelLayout& layout) { return layout.inner < kFewPixels; }

/// Channels per run of a row. All of their pixels are in the run.
inline int64_t channels_per_run(const ChannelLayout& layout) {
  return kChannelRun / std::max<int64_t>(layout.inner, 1);
}

/// Samples per run of rows. Samples of few elements are read together: a loop over one of them
/// would take longer to start than to run.
inline int64_t samples_per_run(const ChannelLayout& layout) {
  const int64_t sample = layout.channels * layout.inner;
  return has_rows(layout) ? std::max<int64_t>(kChannelRun / std::max<int64_t>(sample, 1), 1) : 1;
}

/// The split of sums over the channels into tasks. A task is a chunk of `outer`, or for few long
/// planes a segment of each plane of the chunk, and a group of channels. The workspace has the sums
/// of each task's channels.
struct ChannelPlan {
  int64_t chunks;
  int64_t outer_per_chunk;
  int64_t segments;
  int64_t pixels_per_segment;
  int64_t groups;
  int64_t channels_per_group;

  explicit ChannelPlan(const ChannelLayout& layout) {
    constexpr int64_t kTaskElements = 1 << 15;  // take longer than the start of a thread
    constexpr int64_t kMostChunks = 64;
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const bool rows = has_rows(layout);
    const int64_t channels = std::max<int64_t>(layout.channels, 1);
    const int64_t wanted = layout.numel() / kTaskElements / (rows ? 1 : channels);
    // With fewer than 32 rows per chunk, reading the sums of the chunks would take as long as the
    // rows.
    const int64_t most =
        std::clamp<int64_t>(rows ? layout.outer / 32 : layout.outer, 1, kMostChunks);
    const int64_t parts = std::clamp<int64_t>(wanted, 1, most);
    outer_per_chunk = std::max<int64_t>(ceil_div(layout.outer, parts), 1);
    chunks = std::max<int64_t>(ceil_div(layout.outer, outer_per_chunk), 1);
    const int64_t most_segments =
        rows ? 1 : std::max<int64_t>(layout.inner / (kTaskElements / 2), 1);
    segments = std::clamp<int64_t>(std::min(wanted, kMostChunks) / chunks, 1, most_segments);
    const int64_t pixels = std::max<int64_t>(layout.inner, 1);
    pixels_per_segment =
        segments == 1 ? pixels : ceil_div(ceil_div(pixels, segments), kChannelRun) * kChannelRun;
    segments = ceil_div(pixels, pixels_per_segment);
    const int64_t of_channel = std::max<int64_t>(outer_per_chunk * pixels_per_segment, 1);
    channels_per_group = std::clamp<int64_t>(kTaskElements / of_channel, 1, channels);
    if (rows)
      channels_per_group =
          ceil_div(channels_per_group, channels_per_run(layout)) * channels_per_run(layout);
    groups = ceil_div(layout.channels, channels_per_group);
  }

  /// The number of sums of a channel.
  int64_t parts() const { return chunks * segments; }
  int64_t tasks() const { return parts() * groups; }
};

/// Calls body(at, count, place) for runs of the elements begin <= i < end in memory. `place` is the
/// index of a run within its sample. The runs of rows have several channels, and those with the
/// same channels follow one another, or are several samples; all elements of other runs belong to
/// one channel.
template <class Body>
void for_each_channel_run(const ChannelLayout& layout, int64_t begin, int64_t end,
                          const Body& body) {
  const int64_t sample = layout.channels * layout.inner;
  if (const int64_t together = samples_per_run(layout); together > 1) {
    for (int64_t at = begin, place = begin % sample; at < end; place = 0) {
      const int64_t count = std::min(place > 0 ? sample - place : together * sample, end - at);
      body(at, count, place);
      at += count;
    }
    return;
  }
  if (has_rows(layout)) {
    const int64_t step = channels_per_run(layout) * layout.inner;
    const int64_t first = begin / sample * sample;
    for (int64_t place = 0; place < sample; place += step) {
      const int64_t stop = std::min(place + step, sample);
      for (int64_t row = first; row < end; row += sample) {
        const int64_t from = std::max(begin, row + place), to = std::min(end, row + stop);
        if (from < to) body(from, to - from, from - row);
      }
    }
    return;
  }
  int64_t place = begin % sample, left = layout.inner - begin % layout.inner;
  for (int64_t at = begin; at < end;) {
    const int64_t count = std::min({kChannelRun, left, end - at});
    body(at, count, place);
    at += count;
    place += count;
    left -= count;
    if (left == 0) left = layout.inner;
    if (place == sample) place = 0;
  }
}

/// Calls body(at, count, channel, is_first) for the runs of a task: channel by channel or, for
/// rows, for some adjacent channels at a time. is_first marks the first run of these channels,
/// which is the longest; end(width, channel) is called after their last run.
template <class Body, class End>
void for_each_task_run(const ChannelLayout& layout, const ChannelPlan& plan, int64_t task,
                       const Body& body, const End& end) {
  const int64_t part = task / plan.groups;
  const int64_t first = part / plan.segments * plan.outer_per_chunk;
  const int64_t skipped = part % plan.segments * plan.pixels_per_segment;
  const int64_t pixels = std::min(plan.pixels_per_segment, layout.inner - skipped);
  const int64_t last = std::min(first + plan.outer_per_chunk, layout.outer);
  const int64_t channel = task % plan.groups * plan.channels_per_group;
  const int64_t last_channel = std::min(channel + plan.channels_per_group, layout.channels);
  const int64_t step = has_rows(layout) ? channels_per_run(layout) : 1;
  const int64_t together = samples_per_run(layout);  // if several, the task has all channels
  for (int64_t c = channel; c < last_channel; c += step) {
    const int64_t width = std::min(step, last_channel - c);
    bool is_first = true;
    for (int64_t outer = first; outer < last; outer += together) {
      const int64_t begin = (outer * layout.channels + c) * layout.inner + skipped;
      const int64_t length = std::min(together, last - outer) * width * pixels;
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

/// The sums of g and of g * (x - mean) over a run of one channel, in blocks of the compute type.
template <class C>
Pair<double> run_sums(const C* g, const C* x, C mean, int64_t count) {
  double totals[2];
  sum_lanes<C>(totals, count, [&](int64_t i, auto part, auto& sums) {
    const Lanes<C> each = load_lanes(g + i, part);
    sums[0] += each;
    sums[1] += each * within<C>(load_lanes(x + i, part) - mean, part);
  });
  return {totals[0], totals[1]};
}

// Rows per block. The sums of a block have the compute type, and are added in double.
inline constexpr int64_t kBlockRows = 16;

/// Adds g and g * (x - mean) of a row to the sums of a block, for each element. distance(i) is
/// x - mean.
template <class C, class Distance>
void add_row(C* sums, C* products, const C* g, int64_t count, const Distance& distance) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    sums[i] += g[i];
    products[i] += g[i] * distance(i);
  }
}

/// Adds the sums of a block to those in double, and sets them to 0.
template <class C>
void end_block(double* sums, C* block, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    sums[i] += static_cast<double>(block[i]);
    block[i] = C(0);
  }
}

/// The total of the running sums of one channel.
inline double total_of(const double* sums) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// The values for the elements of a run: one for each element of a row, or one for the run's only
/// channel.
template <bool kRows, class C>
struct RunValues {
  const C* own;
  C operator[](int64_t i) const { return own[i]; }
};
template <class C>
struct RunValues<false, C> {
  C own;
  C operator[](int64_t) const { return own; }
};

template <bool kRows, class C>
RunValues<kRows, C> values_of_run(const C* values) {
  if constexpr (kRows) {
    return {values};
  } else {
    return {values[0]};
  }
}

/// The factors of the elements of a run, or of its only channel: the argument of the activation is
/// (x - mean) * scale + shift. If the next run has the same channels, the factors are reused.
template <class T>
class ChannelFactors {
 public:
  using C = Compute<T>;
  C mean[kChannelRun];
  C scale[kChannelRun];
  C shift[kChannelRun];

  /// Loads the factors of a run: `place` is the index of its first element within the sample.
  template <class Problem>
  void load(const Problem& p, int64_t place, int64_t count) {
    const bool rows = has_rows(p.layout);
    const int64_t pixels = p.layout.inner;
    const int64_t channel = place / pixels;
    if (rows ? place == place_ && count <= count_ : channel == channel_) return;
    place_ = place;
    count_ = count;
    channel_ = channel;
    load_channels(p, channel, rows ? channels_of(p.layout, place, count) : 1);
    if (rows) repeat({mean, scale, shift}, p.layout, place, count);
  }

  /// The number of channels of a run of rows.
  static int64_t channels_of(const ChannelLayout& layout, int64_t place, int64_t count) {
    const int64_t pixels = layout.inner;
    return std::min((place % pixels + count + pixels - 1) / pixels, layout.channels);
  }

  /// Replaces the numbers of the channels of a run of rows by one for each element.
  static void repeat(std::initializer_list<C*> numbers, const ChannelLayout& layout, int64_t place,
                     int64_t count) {
    const int64_t pixels = layout.inner;
    const int64_t sample = std::min(count, layout.channels * pixels - place);
    for (C* const to : numbers) {
      if (pixels > 1) {
        C own[kChannelRun];
        std::copy_n(to, channels_of(layout, place, count), own);
        const C* from = own;
        for (int64_t i = 0, left = pixels - place % pixels; i < sample; left = pixels) {
          const int64_t length = std::min(left, sample - i);
          std::fill_n(to + i, length, *from++);
          i += length;
        }
      }
      for (int64_t filled = sample; filled < count; filled *= 2)
        std::copy_n(to, std::min(filled, count - filled), to + filled);
    }
  }

 private:
  template <class Problem>
  void load_channels(const Problem& p, int64_t channel, int64_t count) {
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
  }

  int64_t place_ = -1;
  int64_t channel_ = -1;
  int64_t count_ = 0;
};

/// Computes the argument of the activation into z[i]. Forward and backward call this function, so
/// their roundings are equal.
template <bool kRows, class T, class C = Compute<T>>
void read_argument(C* z, const ChannelFactors<T>& factors, const C* x, const void* residual,
                   int64_t at, int64_t count, Dtype dtype) {
  const auto mean = values_of_run<kRows>(factors.mean);
  const auto scale = values_of_run<kRows>(factors.scale);
  const auto shift = values_of_run<kRows>(factors.shift);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) z[i] = (x[i] - mean[i]) * scale[i] + shift[i];
  if (residual == nullptr) return;
  C buffer[kChannelRun];
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
