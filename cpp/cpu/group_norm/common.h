#pragma once

// Common to forward and backward of group norm on the CPU: the runs of a group, and the factors of
// its channels.

#include <vector>

#include "batch_norm/common.h"
#include "torchkiln/kernels/group_norm.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Calls body(at, count, channel) for the runs of a group of a sample: elements of one channel of
/// the group, or with adjacent channels of those from `channel` on.
template <class Body>
void for_each_group_run(const GroupLayout& layout, int64_t group, const Body& body) {
  const int64_t channels = layout.channels_per_group();
  const int64_t rows = layout.channels_last ? layout.inner : channels;
  const int64_t width = layout.channels_last ? channels : layout.inner;
  const int64_t sample = group / layout.groups, within = group % layout.groups;
  const int64_t stride = layout.channels_last ? layout.channels : layout.inner;
  const int64_t begin = sample * layout.channels * layout.inner +
                        within * channels * (layout.channels_last ? 1 : layout.inner);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t done = 0; done < width; done += kChannelRun)
      body(begin + row * stride + done, std::min(kChannelRun, width - done),
           layout.channels_last ? done : row);
  }
}

/// The factors of a group: the argument of the activation is (x - mean) * scale + shift.
template <class C>
class GroupFactors {
 public:
  C mean;
  C low;
  C rstd;
  std::vector<C> weight;  // of the group's channels
  std::vector<C> scale;
  std::vector<C> shift;

  template <class Problem>
  GroupFactors(const Problem& p, int64_t group)
      : weight(static_cast<size_t>(p.layout.channels_per_group()), C(1)),
        scale(weight),
        shift(weight.size(), C(0)),
        one_channel_(!p.layout.channels_last) {
    const int64_t groups = p.layout.all_groups();
    const int64_t channels = p.layout.channels_per_group();
    const int64_t first = group % p.layout.groups * channels;
    const C* const statistics = static_cast<const C*>(p.statistics) + group;
    mean = statistics[0];
    low = statistics[groups];
    rstd = statistics[2 * groups];
    for (int64_t i = 0; i < channels; ++i) {
      const auto at = static_cast<size_t>(i);
      if (p.weight != nullptr)
        weight[at] = *read_run(&weight[at], p.weight, first + i, 1, 1, p.parameter_dtype);
      if (p.bias != nullptr)
        shift[at] = *read_run(&shift[at], p.bias, first + i, 1, 1, p.parameter_dtype);
      scale[at] = weight[at] * rstd;
      // An infinite weight must not turn the rounding error of the mean, perhaps 0, into NaN.
      if (scale[at] - scale[at] == C(0)) shift[at] -= low * scale[at];
    }
  }

  /// Sets z[i] to the argument of the activation, and scales[i] to the factor of each element.
  void argument(C* z, C* scales, const C* x, int64_t count, int64_t channel) const {
    const C* const factor = scale.data() + channel;
    const C* const added = shift.data() + channel;
    if (one_channel_) {
      std::fill_n(scales, count, factor[0]);
      const C summand = added[0];
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) z[i] = (x[i] - mean) * scales[i] + summand;
      return;
    }
    std::copy_n(factor, count, scales);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) z[i] = (x[i] - mean) * scales[i] + added[i];
  }

 private:
  bool one_channel_;
};

}  // namespace torchkiln::cpu::TORCHKILN_ISA
