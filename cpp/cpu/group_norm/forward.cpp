#include <cmath>
#include <utility>

#include "batch_norm/moments.h"
#include "group_norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

template <class C>
void write_statistics(const GroupNorm& p, int64_t group, const Moments& moments) {
  const int64_t groups = p.layout.all_groups();
  C* const to = static_cast<C*>(p.statistics) + group;
  to[0] = static_cast<C>(moments.mean);
  to[groups] = static_cast<C>(moments.mean - static_cast<double>(to[0]));
  to[2 * groups] = static_cast<C>(1 / std::sqrt(moments.squares / moments.count + p.eps));
}

/// The statistics of a group whose elements are adjacent.
template <class C>
void dense_statistics(const GroupNorm& p, int64_t group) {
  C buffer[kChannelRun];
  const int64_t all = p.layout.count();
  Moments moments{};
  for (int64_t done = 0; done < all; done += kChannelRun) {
    const int64_t count = std::min(kChannelRun, all - done);
    const C* const x = read_run(buffer, p.x, group * all + done, 1, count, p.dtype);
    moments = merged(moments, run_moments(x, count));
  }
  write_statistics<C>(p, group, moments);
}

template <class T>
void plane_groups(const GroupNorm& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const GroupOperands<C> operands(p);
  const auto activation = loops_of<C>(p.activation);
  const int64_t step = groups_per_run(p.layout), each = p.layout.channels_per_group();
  C buffer[kChannelRun], z[kChannelRun];
  for (int64_t group = begin; group < end; group += step) {
    const int64_t stop = std::min(group + step, end);
    for (int64_t i = group; i < stop; ++i) dense_statistics<C>(p, i);
    const auto write = [&](int64_t at, int64_t plane, int64_t planes, int64_t length) {
      const C* const x = read_run(buffer, p.x, at, 1, planes * length, p.dtype);
      for (int64_t k = 0; k < planes; ++k) {
        const GroupFactors<C> own = operands.of_plane(plane + k);
        const C* const from = x + k * length;
        C* const to = z + k * length;
#pragma GCC ivdep
        for (int64_t i = 0; i < length; ++i) to[i] = (from[i] - own.mean) * own.scale + own.shift;
      }
      activation.values(z, planes * length);
      narrow_run(static_cast<T*>(p.y) + at, z, planes * length);
    };
    for_each_plane_run(p.layout.inner, group * each, stop * each, write);
  }
}

/// Groups of spans. Its vectors keep their memory from one span to the next.
template <class T>
class SpanOutputs {
 public:
  using C = Compute<T>;

  explicit SpanOutputs(const GroupNorm& p)
      : p_(p), operands_(p), activation_(loops_of<C>(p.activation)) {}

  void compute(const GroupSpan& span) {
    add_up(span);
    const auto count = static_cast<double>(p_.layout.count());
    const int64_t each = p_.layout.channels_per_group();
    for (int64_t i = 0; i < span.groups; ++i) {
      double total[kSums] = {}, squares[kSums] = {};
      add_run(total, squares, true, each, [&](int64_t k) {
        const auto at = static_cast<size_t>(i * each + k);
        return Pair<double>{sums_[at], squares_[at]};
      });
      const double origin = origins_[static_cast<size_t>(i * each)];
      write_statistics<C>(p_, span.group + i,
                          moments_of(count, origin, total_of(total), total_of(squares)));
    }
    factors_.load(operands_, span);
    C buffer[kChannelRun], z[kChannelRun];
    span.for_each_run([&](int64_t at, int64_t slot, int64_t count) {
      const C* const x = span.read(buffer, p_.x, at, count, p_.dtype);
      const C* const mean = factors_.mean.data() + slot;
      const C* const scale = factors_.scale.data() + slot;
      const C* const shift = factors_.shift.data() + slot;
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) z[i] = (x[i] - mean[i]) * scale[i] + shift[i];
      activation_.values(z, count);
      span.write(static_cast<T*>(p_.y) + at, static_cast<const C*>(z), count);
    });
  }

 private:
  /// Adds the distances of each channel from the first element of its group, and their squares.
  void add_up(const GroupSpan& span) {
    const auto slots = static_cast<size_t>(span.slots());
    for (auto* const each : {&origins_, &sums_, &squares_}) each->resize(slots);
    C buffer[kChannelRun];
    const int64_t of_group = p_.layout.channels_per_group();
    for (int64_t i = 0; i < span.width; i += of_group) {
      const C* const first = read_run(buffer, p_.x, span.begin + i, 1, 1, p_.dtype);
      std::fill_n(origins_.data() + i, of_group, static_cast<double>(*first));
    }
    span.repeat(origins_);
    span.for_each_run([&](int64_t at, int64_t slot, int64_t count) {
      const C* const x = span.read(buffer, p_.x, at, count, p_.dtype);
      const double* const origin = origins_.data() + slot;
      double* const sums = sums_.data() + slot;
      double* const squares = squares_.data() + slot;
      if (at < span.begin + span.width) {  // the first run of these slots
        std::fill_n(sums, count, 0.0);
        std::fill_n(squares, count, 0.0);
      }
      add_run(sums, squares, false, count, [&](int64_t i) {
        const double distance = static_cast<double>(x[i]) - origin[i];
        return Pair<double>{distance, distance * distance};
      });
    });
    span.fold(sums_);
    span.fold(squares_);
  }

  const GroupNorm& p_;
  GroupOperands<C> operands_;
  ActivationLoops<C> activation_;
  SpanFactors<C> factors_;
  std::vector<double> origins_, sums_, squares_;
};

/// Groups as rows.
template <class T>
void row_groups(const GroupNorm& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const GroupOperands<C> operands(p);
  RowFactors<C> factors;
  C buffer[kChannelRun], z[kChannelRun];
  const auto activation = loops_of<C>(p.activation);
  for (int64_t group = begin; group < end; ++group) {
    dense_statistics<C>(p, group);
    const GroupStatistics<C> own = operands.statistics(group);
    for_each_row_run(p.layout, group, [&](int64_t at, int64_t count, int64_t channel, int64_t of) {
      factors.load(operands, own, p.layout.inner, channel, of);
      const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i)
        z[i] = (x[i] - own.mean) * factors.scale[i] + factors.shift[i];
      activation.values(z, count);
      narrow_run(static_cast<T*>(p.y) + at, z, count);
    });
  }
}

/// The statistics of a tile of short groups.
template <class C>
void tile_statistics(const GroupNorm& p, const ShortRows& rows, const C* x,
                     TileFactors<C>& factors) {
  double total[kMostTileRows] = {}, squares[kMostTileRows] = {};
  const int64_t width = rows.width;
  for (int64_t at = width; at < rows.elements(); at += width) {
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k) {
      const double distance = static_cast<double>(x[at + k]) - static_cast<double>(x[k]);
      total[k] += distance;
      squares[k] += distance * distance;
    }
  }
  // The first element is infinite or NaN, or its distance from itself is 0.
  const auto count = static_cast<double>(rows.columns);
  const double eps = p.eps;
#pragma GCC ivdep
  for (int64_t k = 0; k < width; ++k) {
    const auto origin = static_cast<double>(x[k]);
    const double from_origin = total[k] / count + (origin - origin);
    const double rest = squares[k] - total[k] * from_origin;
    const double mean = origin + from_origin;
    factors.mean[k] = static_cast<C>(mean);
    factors.low[k] = static_cast<C>(mean - static_cast<double>(factors.mean[k]));
    factors.rstd[k] = static_cast<C>(1 / std::sqrt((rest < 0 ? 0 : rest) / count + eps));
  }
}

template <class T>
void short_groups(const GroupNorm& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const ShortRows rows = short_rows_of(p.layout);
  const auto activation = loops_of<C>(p.activation);
  TileFactors<C> factors;
  Tile<C> x, z;
  int64_t known = -1;
  for (int64_t first = begin; first < end; first += rows.rows) {
    const int64_t count = std::min(rows.rows, end - first);
    const int64_t group = first % p.layout.groups, at = first * rows.columns;
    if (group != known) factors.read_parameters(p, rows, group);
    known = group;
    rows.read(x, static_cast<const T*>(p.x) + at, rows.columns, count);
    tile_statistics<C>(p, rows, x, factors);
    C* const statistics = static_cast<C*>(p.statistics) + first;
    const int64_t groups = p.layout.all_groups();
    std::copy_n(factors.mean, count, statistics);
    std::copy_n(factors.low, count, statistics + groups);
    std::copy_n(factors.rstd, count, statistics + 2 * groups);
    factors.read_argument(rows, x, z);
    activation.values(z, rows.elements());
    rows.write(static_cast<T*>(p.y) + at, z, count);
  }
}

}  // namespace

Status group_norm(const GroupNorm& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GroupPath path = path_of(p.layout);
    if (path == GroupPath::short_rows) {
      short_groups<T>(p, begin, end);
      return Status{};
    }
    if (path == GroupPath::row) {
      row_groups<T>(p, begin, end);
    } else if (path == GroupPath::planes) {
      plane_groups<T>(p, begin, end);
    } else {
      SpanOutputs<T> outputs(p);
      for_each_span(p.layout, begin, end, [&](const GroupSpan& span) { outputs.compute(span); });
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(group_norm, (const GroupNorm& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace torchkiln::cpu
