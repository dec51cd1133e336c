#include <cmath>
#include <utility>

#include "group_norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// Sums over a group, of the distances from its first element. With distances the sum of squares
/// loses few digits if the mean is far from 0.
struct GroupSums {
  double origin = 0;
  double total = 0;
  double squares = 0;
};

template <bool kRows, class C>
std::vector<GroupSums> sums_of(const GroupNorm& p, const GroupSpan& span) {
  std::vector<GroupSums> groups(static_cast<size_t>(span.groups()));
  ChannelValues<double> origins(static_cast<size_t>(span.channels()));
  // Sums of the current block of rows and of all earlier blocks: for each channel of a row, or as
  // running sums of one channel. Blocks limit the rounding error of many equal terms.
  const auto size = static_cast<size_t>(kRows ? span.channels() : kSums);
  std::vector<double> sums(size), squares(size), all_sums(size), all_squares(size);
  const auto end_block = [&] {
    for (size_t i = 0; i < size; ++i) {
      all_sums[i] += std::exchange(sums[i], 0.0);
      all_squares[i] += std::exchange(squares[i], 0.0);
    }
  };
  int64_t rows = 0;
  C buffer[kChannelRun];
  bool is_first = true;
  span.for_each_run([&](int64_t at, int64_t count, int64_t channel) {
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
    if (is_first) {
      for (size_t i = 0; i < origins.size(); ++i) {
        const auto first =
            static_cast<int64_t>(i) / p.layout.channels_per_group() * p.layout.channels_per_group();
        origins[i] = static_cast<double>(x[kRows && first < count ? first : 0]);
      }
      is_first = false;
    }
    if (kRows && channel == 0 && ++rows % kBlockRows == 0) end_block();
    const auto origin = values_of_run<kRows>(origins, channel);
    const int64_t to = kRows ? channel : 0;
    add_run(sums.data() + to, squares.data() + to, !kRows, count, [&](int64_t i) {
      const double distance = static_cast<double>(x[i]) - origin[i];
      return Pair<double>{distance, distance * distance};
    });
  });
  end_block();
  const int64_t width = kRows ? p.layout.channels_per_group() : kSums;
  for (size_t i = 0; i < groups.size(); ++i) {
    const int64_t first = static_cast<int64_t>(i) * width;
    double total[kSums] = {}, total_squares[kSums] = {};
    add_run(total, total_squares, true, width, [&](int64_t k) {
      const auto at = static_cast<size_t>(first + k);
      return Pair<double>{all_sums[at], all_squares[at]};
    });
    groups[i] = {origins[static_cast<size_t>(kRows ? first : 0)], total_of(total),
                 total_of(total_squares)};
  }
  return groups;
}

template <bool kRows, class T>
void write_statistics(const GroupNorm& p, const GroupSpan& span) {
  using C = Compute<T>;
  const auto count = static_cast<double>(p.layout.count());
  const int64_t groups = p.layout.all_groups();
  C* to = static_cast<C*>(p.statistics) + span.group();
  for (const GroupSums& group : sums_of<kRows, C>(p, span)) {
    const double from_origin = group.total / count;
    const double rest = std::max(group.squares - group.total * from_origin, group.squares * 0);
    const double mean = group.origin + from_origin;
    to[0] = static_cast<C>(mean);
    to[groups] = static_cast<C>(mean - static_cast<double>(to[0]));
    to[2 * groups] = static_cast<C>(1 / std::sqrt(rest / count + p.eps));
    ++to;
  }
}

template <bool kRows, class T>
void outputs(const GroupNorm& p, const GroupSpan& span) {
  using C = Compute<T>;
  const GroupFactors<C> factors(p, span);
  C buffer[kChannelRun], from_mean[kChannelRun], z[kChannelRun];
  const auto activation = loops_of<C>(p.activation);
  span.for_each_run([&](int64_t at, int64_t count, int64_t channel) {
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
    read_argument<kRows>(from_mean, z, factors, x, count, channel);
    activation.values(z, count);
    narrow_run(static_cast<T*>(p.y) + at, z, count);
  });
}

/// A group as one row.
template <class T>
void row_outputs(const GroupNorm& p, int64_t group) {
  using C = Compute<T>;
  RowFactors<C> factors(p, group);
  C buffer[kChannelRun], z[kChannelRun];
  const auto activation = loops_of<C>(p.activation);
  for_each_row_run(p.layout, group, [&](int64_t at, int64_t count, int64_t channel, int64_t of) {
    factors.load(p, channel, of);
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i)
      z[i] = (x[i] - factors.mean) * factors.scale[i] + factors.shift[i];
    activation.values(z, count);
    narrow_run(static_cast<T*>(p.y) + at, z, count);
  });
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
      GroupNorm one_channel = p;
      one_channel.layout = as_rows(p.layout);
      for (int64_t group = begin; group < end; ++group) {
        write_statistics<false, T>(one_channel, GroupSpan(one_channel.layout, group, end));
        row_outputs<T>(p, group);
      }
      return Status{};
    }
    for_each_span(p.layout, begin, end, [&](const GroupSpan& span, auto rows) {
      write_statistics<rows, T>(p, span);
      outputs<rows, T>(p, span);
    });
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(group_norm, (const GroupNorm& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace torchkiln::cpu
