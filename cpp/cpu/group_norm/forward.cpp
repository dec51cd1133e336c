#include <cmath>

#include "group_norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// Writes the statistics of a group, from sums relative to its first element: the sum of squares
/// loses few digits where the mean is far from 0.
template <class T>
void write_statistics(const GroupNorm& p, int64_t group) {
  using C = Compute<T>;
  double sums[kSums] = {}, squares[kSums] = {}, origin = 0;
  bool is_first = true;
  C buffer[kChannelRun];
  for_each_group_run(p.layout, group, [&](int64_t at, int64_t count, int64_t) {
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
    if (is_first) origin = static_cast<double>(x[0]);
    is_first = false;
    add_run(sums, squares, true, count, [&](int64_t i) {
      const double distance = static_cast<double>(x[i]) - origin;
      return Pair<double>{distance, distance * distance};
    });
  });
  const double total = total_of(sums), count = static_cast<double>(p.layout.count());
  const double from_origin = total / count, all_squares = total_of(squares);
  const double rest = std::max(all_squares - total * from_origin, all_squares * 0);
  const double mean = origin + from_origin;
  const int64_t groups = p.layout.all_groups();
  C* const to = static_cast<C*>(p.statistics) + group;
  to[0] = static_cast<C>(mean);
  to[groups] = static_cast<C>(mean - static_cast<double>(to[0]));
  to[2 * groups] = static_cast<C>(1 / std::sqrt(rest / count + p.eps));
}

template <class T>
void outputs(const GroupNorm& p, int64_t group) {
  using C = Compute<T>;
  const GroupFactors<C> factors(p, group);
  C buffer[kChannelRun], z[kChannelRun], scales[kChannelRun];
  with_activation(
      p.activation,
      [&](auto act) {
        using Act = typename decltype(act)::type;
        for_each_group_run(p.layout, group, [&](int64_t at, int64_t count, int64_t channel) {
          const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
          factors.argument(z, scales, x, count, channel);
#pragma GCC ivdep
          for (int64_t i = 0; i < count; ++i) z[i] = Act::template value<ExactMath>(z[i]);
          narrow_run(static_cast<T*>(p.y) + at, z, count);
        });
      },
      Activations{});
}

}  // namespace

Status group_norm(const GroupNorm& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t group = begin; group < end; ++group) {
      write_statistics<T>(p, group);
      outputs<T>(p, group);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(group_norm, (const GroupNorm& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace torchkiln::cpu
