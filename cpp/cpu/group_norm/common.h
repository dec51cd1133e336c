#pragma once

// Spans of groups, their runs, and the factors of their channels, for forward and backward of group
// norm on the CPU.

#include <vector>

#include "batch_norm/common.h"
#include "detail/short_rows.h"
#include "torchkiln/kernels/group_norm.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Groups whose channels have fewer pixels are computed as rows of elements with their own factors.
inline constexpr int64_t kFewGroupPixels = 32;

/// How the groups of a call are computed.
enum class GroupPath {
  short_rows,  // tiles of groups of few elements
  row,         // a group as one row, whose elements have factors of their own
  spans,       // planes, or rows of adjacent channels
};

inline GroupPath path_of(const GroupLayout& layout) {
  if (layout.channels_last && layout.inner > 1) return GroupPath::spans;
  if (layout.count() <= kShortGroup) return GroupPath::short_rows;
  return layout.inner < kFewGroupPixels ? GroupPath::row : GroupPath::spans;
}

inline ShortRows short_rows_of(const GroupLayout& layout) {
  return {layout.count(), layout.groups, layout.channels_per_group()};
}

/// The layout of the same groups with a single channel in each.
inline GroupLayout as_rows(const GroupLayout& layout) {
  return {layout.batch, layout.groups, layout.groups, layout.count(), false};
}

/// A span: whole groups of a sample that are computed together. If each channel is a plane, a span
/// is one group. If the channels of a pixel are adjacent, a span has up to kChannelRun channels.
class GroupSpan {
 public:
  /// A span that begins with `group` and ends at most before `end`; groups are counted over all
  /// samples.
  GroupSpan(const GroupLayout& layout, int64_t group, int64_t end)
      : rows_(layout.channels_last || layout.inner == 1),
        group_(group),
        channels_per_group_(layout.channels_per_group()) {
    const int64_t left = std::min(end - group, layout.groups - group % layout.groups);
    groups_ = rows_ ? std::clamp<int64_t>(kChannelRun / channels_per_group_, 1, left) : 1;
    first_channel_ = group % layout.groups * channels_per_group_;
    const int64_t sample = group / layout.groups * layout.channels * layout.inner;
    begin_ = sample + first_channel_ * (rows_ ? 1 : layout.inner);
    count_ = rows_ ? layout.inner : channels();
    width_ = rows_ ? channels() : layout.inner;
    stride_ = rows_ ? layout.channels : layout.inner;
  }

  /// Whether a run has elements of adjacent channels. If not, all its elements belong to one
  /// channel.
  bool rows() const { return rows_; }
  int64_t group() const { return group_; }
  int64_t groups() const { return groups_; }
  int64_t first_channel() const { return first_channel_; }
  int64_t channels() const { return groups_ * channels_per_group_; }
  int64_t elements() const { return count_ * width_; }
  /// The index of a channel's group within the span; `channel` is counted within the span, too.
  int64_t group_of(int64_t channel) const { return channel / channels_per_group_; }

  /// Calls body(at, count, channel) for all runs. `channel` is the first channel of the run,
  /// counted within the span.
  template <class Body>
  void for_each_run(const Body& body) const {
    for (int64_t row = 0; row < count_; ++row) {
      for (int64_t done = 0; done < width_; done += kChannelRun)
        body(begin_ + row * stride_ + done, std::min(kChannelRun, width_ - done),
             rows_ ? done : row);
    }
  }

 private:
  bool rows_;
  int64_t group_;
  int64_t groups_;
  int64_t channels_per_group_;
  int64_t first_channel_;
  int64_t begin_;
  int64_t count_;
  int64_t width_;
  int64_t stride_;
};

/// Calls body(span, rows) for the spans of a range; `rows` is span.rows() as a std::bool_constant.
template <class Body>
void for_each_span(const GroupLayout& layout, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const GroupSpan span(layout, begin, end);
    if (span.rows()) {
      body(span, std::true_type{});
    } else {
      body(span, std::false_type{});
    }
    begin += span.groups();
  }
}

/// A value for each channel of a span.
template <class C>
using ChannelValues = std::vector<C>;

/// The values for the elements of a run: one per channel of a row, or one for the run's only
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
RunValues<kRows, C> values_of_run(const ChannelValues<C>& values, int64_t channel) {
  if constexpr (kRows) {
    return {values.data() + channel};
  } else {
    return {values[static_cast<size_t>(channel)]};
  }
}

/// The factors of a span: the argument of the activation is (x - mean) * scale + shift.
template <class C>
struct GroupFactors {
  ChannelValues<C> mean, low, rstd, weight, scale, shift;

  template <class Problem>
  GroupFactors(const Problem& p, const GroupSpan& span)
      : mean(static_cast<size_t>(span.channels())),
        low(mean),
        rstd(mean),
        weight(mean.size(), C(1)),
        scale(mean),
        shift(mean) {
    const int64_t groups = p.layout.all_groups();
    for (int64_t i = 0; i < span.channels(); ++i) {
      const auto at = static_cast<size_t>(i);
      const C* const statistics =
          static_cast<const C*>(p.statistics) + span.group() + span.group_of(i);
      mean[at] = statistics[0];
      low[at] = statistics[groups];
      rstd[at] = statistics[2 * groups];
    }
    const int64_t first = span.first_channel();
    read(weight, p.weight, first, p.parameter_dtype);
    read(shift, p.bias, first, p.parameter_dtype);
    for (size_t i = 0; i < scale.size(); ++i) {
      scale[i] = weight[i] * rstd[i];
      // If the weight is infinite, its product with the rounding error of the mean (perhaps 0) must
      // not make the result NaN.
      if (scale[i] - scale[i] == C(0)) shift[i] -= low[i] * scale[i];
    }
  }

 private:
  static void read(ChannelValues<C>& to, const void* values, int64_t first, Dtype dtype) {
    if (values == nullptr) return;
    C buffer[kChannelRun];
    const auto count = static_cast<int64_t>(to.size());
    for (int64_t done = 0; done < count; done += kChannelRun) {
      const int64_t length = std::min(kChannelRun, count - done);
      std::copy_n(read_run(buffer, values, first + done, 1, length, dtype), length,
                  to.data() + done);
    }
  }
};

/// The factors of the elements of a run of whole channels, for GroupPath::row.
template <class C>
struct RowFactors {
  C mean, low, rstd;
  C weight[kChannelRun], scale[kChannelRun], shift[kChannelRun];

  template <class Problem>
  RowFactors(const Problem& p, int64_t group) {
    const C* const statistics = static_cast<const C*>(p.statistics) + group;
    mean = statistics[0];
    low = statistics[p.layout.all_groups()];
    rstd = statistics[2 * p.layout.all_groups()];
  }

  /// Sets the factors of `count` channels: `weight` for each channel, the others for each element.
  template <class Problem>
  void load(const Problem& p, int64_t channel, int64_t count) {
    C weights[kChannelRun], biases[kChannelRun];
    std::fill_n(weight, count, C(1));
    C shifts[kChannelRun] = {};
    if (p.weight != nullptr)
      std::copy_n(read_run(weights, p.weight, channel, 1, count, p.parameter_dtype), count, weight);
    if (p.bias != nullptr)
      std::copy_n(read_run(biases, p.bias, channel, 1, count, p.parameter_dtype), count, shifts);
    C scales[kChannelRun];
    for (int64_t i = 0; i < count; ++i) {
      scales[i] = weight[i] * rstd;
      // For an infinite weight as in GroupFactors.
      shifts[i] -= scales[i] - scales[i] == C(0) ? low * scales[i] : C(0);
    }
    const int64_t pixels = p.layout.inner;
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) {
        scale[i * pixels + pixel] = scales[i];
        shift[i * pixels + pixel] = shifts[i];
      }
    }
  }
};

/// Calls body(at, count, channel, channels) for the runs of a group, which are whole channels.
template <class Body>
void for_each_row_run(const GroupLayout& layout, int64_t group, const Body& body) {
  const int64_t all = layout.channels_per_group(), most = kChannelRun / layout.inner;
  for (int64_t channel = 0; channel < all; channel += most) {
    const int64_t channels = std::min(most, all - channel);
    body(group * layout.count() + channel * layout.inner, channels * layout.inner,
         group % layout.groups * all + channel, channels);
  }
}

/// The factors of a tile of short groups.
template <class C>
struct TileFactors {
  C mean[kMostTileRows] = {}, low[kMostTileRows] = {}, rstd[kMostTileRows] = {};
  Tile<C> weight, bias;

  /// Computes the argument of the activation: x becomes x - mean.
  void read_argument(const ShortRows& rows, C* x, C* z) const {
    for (int64_t at = 0; at < rows.elements(); at += rows.width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < rows.width; ++k) {
        const C scale = weight.at[at + k] * rstd[k];
        const C shift = bias.at[at + k] - (scale - scale == C(0) ? low[k] * scale : C(0));
        x[at + k] -= mean[k];
        z[at + k] = x[at + k] * scale + shift;
      }
    }
  }

  template <class Problem>
  void read_parameters(const Problem& p, const ShortRows& rows, int64_t group) {
    rows.read_parameters<C>(weight, p.weight, p.parameter_dtype, group, 1);
    rows.read_parameters<C>(bias, p.bias, p.parameter_dtype, group, 0);
  }
};

/// Computes x - mean into from_mean[i], and the argument of the activation into z[i].
template <bool kRows, class C>
void read_argument(C* from_mean, C* z, const GroupFactors<C>& factors, const C* x, int64_t count,
                   int64_t channel) {
  const auto mean = values_of_run<kRows>(factors.mean, channel);
  const auto scale = values_of_run<kRows>(factors.scale, channel);
  const auto shift = values_of_run<kRows>(factors.shift, channel);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    from_mean[i] = x[i] - mean[i];
    z[i] = from_mean[i] * scale[i] + shift[i];
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
