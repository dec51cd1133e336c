#pragma once

// Spans of groups, their runs, and the factors of their channels, for forward and backward of group
// norm on the CPU.

#include <vector>

#include "batch_norm/common.h"
#include "torchkiln/kernels/group_norm.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

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
