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
  planes,      // one channel after another
  spans,       // rows of adjacent channels
};

inline GroupPath path_of(const GroupLayout& layout) {
  if (layout.channels_last && layout.inner > 1) return GroupPath::spans;
  if (layout.count() <= kShortGroup) return GroupPath::short_rows;
  return layout.inner < kFewGroupPixels ? GroupPath::row : GroupPath::planes;
}

inline ShortRows short_rows_of(const GroupLayout& layout) {
  return {layout.count(), layout.groups, layout.channels_per_group()};
}

/// The statistics of a group: the mean, rounded; its rounding error; rstd.
template <class C>
struct GroupStatistics {
  C mean, low, rstd;

  /// The shift of a channel whose weight times rstd is `scale`. If the weight is infinite, its
  /// product with the rounding error of the mean (perhaps 0) must not make the result NaN.
  C shift(C bias, C scale) const { return bias - (scale - scale == C(0) ? low * scale : C(0)); }
};

/// The factors of a channel: the argument of the activation is (x - mean) * scale + shift.
template <class C>
struct GroupFactors {
  C mean, scale, shift;
};

/// The parameters of all channels and the statistics of all groups, in the compute type.
template <class C>
class GroupOperands {
 public:
  template <class Problem>
  explicit GroupOperands(const Problem& p)
      : layout_(p.layout),
        statistics_(static_cast<const C*>(p.statistics)),
        weight_(static_cast<size_t>(p.layout.channels), C(1)),
        bias_(weight_.size(), C(0)) {
    read(weight_, p.weight, p.parameter_dtype);
    read(bias_, p.bias, p.parameter_dtype);
  }

  /// The statistics of a group; groups are counted over all samples.
  GroupStatistics<C> statistics(int64_t group) const {
    const C* const own = statistics_ + group;
    const int64_t groups = layout_.all_groups();
    return {own[0], own[groups], own[2 * groups]};
  }
  const C* weight(int64_t channel) const { return weight_.data() + channel; }
  const C* bias(int64_t channel) const { return bias_.data() + channel; }

  /// The factors of a plane; planes are counted over all samples.
  GroupFactors<C> of_plane(int64_t plane) const {
    const GroupStatistics<C> own = statistics(plane / layout_.channels_per_group());
    const auto channel = static_cast<size_t>(plane % layout_.channels);
    const C scale = weight_[channel] * own.rstd;
    return {own.mean, scale, own.shift(bias_[channel], scale)};
  }

 private:
  static void read(std::vector<C>& to, const void* values, Dtype dtype) {
    if (values == nullptr) return;
    C buffer[kChannelRun];
    const auto count = static_cast<int64_t>(to.size());
    for (int64_t done = 0; done < count; done += kChannelRun) {
      const int64_t length = std::min(kChannelRun, count - done);
      std::copy_n(read_run(buffer, values, done, 1, length, dtype), length, to.data() + done);
    }
  }

  GroupLayout layout_;
  const C* statistics_;
  std::vector<C> weight_, bias_;
};

/// Groups of planes that are computed together: at most as many elements as a run has.
inline int64_t groups_per_run(const GroupLayout& layout) {
  return std::max<int64_t>(kChannelRun / layout.count(), 1);
}

/// Calls body(at, plane, planes, length) for the runs of planes first <= plane < last, which are
/// counted over all samples: some whole planes, or a part of one. `length` elements of each are in
/// the run.
template <class Body>
void for_each_plane_run(int64_t pixels, int64_t first, int64_t last, const Body& body) {
  const int64_t most = std::max<int64_t>(kChannelRun / pixels, 1);
  for (int64_t plane = first; plane < last; plane += most) {
    const int64_t planes = std::min(most, last - plane);
    for (int64_t done = 0; done < pixels; done += kChannelRun)
      body(plane * pixels + done, plane, planes, std::min(kChannelRun, pixels - done));
  }
}

/// Adjacent channels of a sample, whose pixels are rows: whole groups with at most kChannelRun
/// channels, or one group. A run has as many pixels as fit if it had all channels. The sums of a
/// channel therefore have the same order in spans of any groups.
struct GroupSpan {
  int64_t group, groups;  // the first one, counted over all samples
  int64_t channel, width;
  int64_t begin, pixels, pixels_per_run;
  SpacedRows rows;

  /// A span that begins with `first` and ends at most before `end`.
  GroupSpan(const GroupLayout& layout, int64_t first, int64_t end) : group(first) {
    const int64_t each = layout.channels_per_group(), own = group % layout.groups;
    groups = std::clamp<int64_t>(kChannelRun / each, 1, std::min(end - group, layout.groups - own));
    channel = own * each;
    width = groups * each;
    pixels = layout.inner;
    begin = group / layout.groups * layout.channels * pixels + channel;
    pixels_per_run = std::clamp<int64_t>(kChannelRun / layout.channels, 1, pixels);
    rows = {0, width, 1, layout.channels};
  }

  int64_t elements() const { return pixels * width; }
  /// Elements of a run, or of a pixel if it has several runs.
  int64_t slots() const { return pixels_per_run * width; }
  bool is_dense() const { return width == rows.row_stride; }

  /// Calls body(at, slot, count) for all runs. `slot` is not 0 if the run is not the first one of a
  /// pixel.
  template <class Body>
  void for_each_run(const Body& body) const {
    for (int64_t pixel = 0; pixel < pixels; pixel += pixels_per_run) {
      const int64_t length = std::min(pixels_per_run, pixels - pixel) * width;
      for (int64_t done = 0; done < length; done += kChannelRun) {
        body(begin + pixel * rows.row_stride + done, done, std::min(kChannelRun, length - done));
      }
    }
  }

  template <class C>
  const C* read(C* buffer, const void* from, int64_t at, int64_t count, Dtype dtype) const {
    return read_rows<kChannelRun>(buffer, from, at, rows, count, dtype);
  }

  template <class T, class C>
  void write(T* to, const C* from, int64_t count) const {
    if (rows.is_run(count)) return narrow_run(to, from, count);
    for (int64_t done = 0; done < count; done += width, to += rows.row_stride)
      narrow_run(to, from + done, width);
  }

  /// Repeats the values of the channels for the other pixels of a run.
  template <class C>
  void repeat(std::vector<C>& values) const {
    const int64_t all = slots();
    for (int64_t filled = width; filled < all; filled *= 2)
      std::copy_n(values.data(), std::min(filled, all - filled), values.data() + filled);
  }

  /// Adds the sums of equal channels, as a tree. They become the first `width` sums.
  template <class C>
  void fold(std::vector<C>& sums) const {
    for (int64_t left = pixels_per_run; left > 1;) {
      const int64_t half = (left + 1) / 2;
      C* const to = sums.data();
      const C* const from = to + half * width;
#pragma GCC ivdep
      for (int64_t i = 0; i < (left - half) * width; ++i) to[i] += from[i];
      left = half;
    }
  }
};

/// Calls body(span) for the spans of a range of groups.
template <class Body>
void for_each_span(const GroupLayout& layout, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const GroupSpan span(layout, begin, end);
    body(span);
    begin += span.groups;
  }
}

/// The factors of a span for each slot.
template <class C>
struct SpanFactors {
  std::vector<C> mean, scale, shift;

  void load(const GroupOperands<C>& operands, const GroupSpan& span) {
    for (auto* const each : {&mean, &scale, &shift})
      each->resize(static_cast<size_t>(span.slots()));
    const int64_t of_group = span.width / span.groups;
    for (int64_t i = 0; i < span.groups; ++i) {
      const GroupStatistics<C> own = operands.statistics(span.group + i);
      const int64_t at = i * of_group;
      const C* const weight = operands.weight(span.channel + at);
      const C* const bias = operands.bias(span.channel + at);
      C* const scales = scale.data() + at;
      C* const shifts = shift.data() + at;
      std::fill_n(mean.data() + at, of_group, own.mean);
#pragma GCC ivdep
      for (int64_t k = 0; k < of_group; ++k) {
        scales[k] = weight[k] * own.rstd;
        shifts[k] = own.shift(bias[k], scales[k]);
      }
    }
    for (auto* const each : {&mean, &scale, &shift}) span.repeat(*each);
  }
};

/// The factors of the elements of a run of whole channels, for GroupPath::row.
template <class C>
struct RowFactors {
  const C* weight;  // for each channel, unlike the others
  C scale[kChannelRun], shift[kChannelRun];

  /// Loads the factors of `count` channels.
  void load(const GroupOperands<C>& operands, const GroupStatistics<C>& own, int64_t pixels,
            int64_t channel, int64_t count) {
    weight = operands.weight(channel);
    const C* const bias = operands.bias(channel);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) {
        const C each = weight[i] * own.rstd;
        scale[i * pixels + pixel] = each;
        shift[i * pixels + pixel] = own.shift(bias[i], each);
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
        const GroupStatistics<C> own{mean[k], low[k], rstd[k]};
        const C scale = weight.at[at + k] * own.rstd;
        const C shift = own.shift(bias.at[at + k], scale);
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

}  // namespace torchkiln::cpu::TORCHKILN_ISA
