#include "group_norm/span_gradients.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

ShortChunks short_chunks_of(const GroupLayout& layout) {
  return {short_rows_of(layout), layout.batch};
}

/// The sums of weight * sum and of weight * product over the channels of a run.
template <class C>
void add_weighted(Pair<double>& total, const C* weight, const C* sums, const C* products,
                  int64_t channels) {
  double found[2];
  sum_lanes<C>(found, channels, [&](int64_t i, auto part, auto& lanes) {
    const Lanes<C> own = load_lanes(weight + i, part);
    lanes[0] += own * load_lanes(sums + i, part);
    lanes[1] += own * load_lanes(products + i, part);
  });
  total.first += found[0];
  total.second += found[1];
}

/// Groups as rows.
template <class T>
class RowGradients {
 public:
  using C = Compute<T>;

  explicit RowGradients(const GroupNormBackward& p)
      : p_(p), operands_(p), activation_(loops_of<C>(p.activation)) {
    kept_.reset(p, p.layout.count());
  }

  void compute(int64_t group) {
    own_ = operands_.statistics(group);
    const int64_t all = p_.layout.count();
    double* const sums = sums_of(p_, group / p_.layout.groups);
    const auto place_of = [&](int64_t at) { return kept_.place(at, at - group * all); };
    Pair<double> total{};
    for_each_row_run(p_.layout, group, [&](int64_t at, int64_t count, int64_t channel, int64_t of) {
      C* const g = place_of(at);
      read(g, at, count, channel, of);
      add_channels(total, g, sums + channel, of);
    });
    if (p_.grad_x == nullptr) return;
    const GroupSlope<C> found = slope_of(own_, total, p_.layout);
    const C slope = found.slope, level = found.level;
    const bool is_read = all <= kChannelRun / p_.layout.inner * p_.layout.inner;
    C buffer[kChannelRun], result[kChannelRun];
    for_each_row_run(p_.layout, group, [&](int64_t at, int64_t count, int64_t channel, int64_t of) {
      C* const g = place_of(at);
      C* const to = kept_.is_in_grad_x() ? g : result;
      if (!kept_.keeps()) {
        read(g, at, count, channel, of);
      } else if (!is_read) {
        factors_.load(operands_, own_, p_.layout.inner, channel, of);
        const C* const x = read_run(buffer, p_.x, at, 1, count, p_.dtype);
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) from_mean_[i] = x[i] - own_.mean;
      }
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i)
        to[i] = g[i] * factors_.scale[i] - slope * from_mean_[i] - level;
      if (!kept_.is_in_grad_x()) narrow_run(static_cast<T*>(p_.grad_x) + at, result, count);
    });
  }

 private:
  /// Computes g and x - mean of a run.
  void read(C* g, int64_t at, int64_t count, int64_t channel, int64_t channels) {
    C buffer[kChannelRun], z[kChannelRun];
    factors_.load(operands_, own_, p_.layout.inner, channel, channels);
    const C* const x = read_run(buffer, p_.x, at, 1, count, p_.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      from_mean_[i] = x[i] - own_.mean;
      z[i] = from_mean_[i] * factors_.scale[i] + factors_.shift[i];
    }
    activation_.gradients(g, read_run(buffer, p_.grad, at, 1, count, p_.dtype), z, count);
  }

  /// Adds the channels of a run to the total of the group, and writes their sums.
  void add_channels(Pair<double>& total, const C* g, double* to, int64_t channels) {
    const int64_t pixels = p_.layout.inner;
    C sums[kChannelRun], products[kChannelRun];
    std::fill_n(sums, channels, C(0));
    std::fill_n(products, channels, C(0));
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
#pragma GCC ivdep
      for (int64_t i = 0; i < channels; ++i) {
        sums[i] += g[i * pixels + pixel];
        products[i] += g[i * pixels + pixel] * from_mean_[i * pixels + pixel];
      }
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < channels; ++i)
      products[i] = (products[i] - own_.low * sums[i]) * own_.rstd;
    std::copy_n(sums, channels, to);
    std::copy_n(products, channels, to + p_.layout.channels);
    add_weighted<C>(total, factors_.weight, sums, products, channels);
  }

  const GroupNormBackward& p_;
  GroupOperands<C> operands_;
  ActivationLoops<C> activation_;
  KeptGradients<T> kept_;
  GroupStatistics<C> own_{};
  RowFactors<C> factors_;
  C from_mean_[kChannelRun];
};

/// The gradients of a tile of short groups. x becomes x - mean, and g the gradient of x.
template <class C>
void tile_gradients(const ShortRows& rows, const TileFactors<C>& factors, const C* x, C* g) {
  double total[kMostTileRows] = {}, products[kMostTileRows] = {};
  C slope[kMostTileRows], level[kMostTileRows];
  const int64_t width = rows.width;
  for (int64_t at = 0; at < rows.elements(); at += width) {
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k) {
      const auto each =
          static_cast<double>(g[at + k]) * static_cast<double>(factors.weight.at[at + k]);
      const double distance = static_cast<double>(x[at + k]) - static_cast<double>(factors.low[k]);
      total[k] += each;
      products[k] += each * distance;
    }
  }
  // A group of one element has a distance of 0 from its mean, so its gradient is 0. The difference
  // of rounded products would be their rounding error, times rstd.
  const bool is_one = rows.columns == 1;
  const double share = is_one ? 0 : 1 / static_cast<double>(rows.columns);
#pragma GCC ivdep
  for (int64_t k = 0; k < width; ++k) {
    const auto rstd = static_cast<double>(factors.rstd[k]);
    const double exact = products[k] * rstd * rstd * rstd * share;
    slope[k] = static_cast<C>(exact);
    level[k] =
        static_cast<C>(total[k] * rstd * share - exact * static_cast<double>(factors.low[k]));
  }
  for (int64_t at = 0; at < rows.elements(); at += width) {
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k) {
      const C scale = is_one ? C(0) : factors.weight.at[at + k] * factors.rstd[k];
      g[at + k] = g[at + k] * scale - slope[k] * x[at + k] - level[k];
    }
  }
}

template <class T>
void short_gradients(const GroupNormBackward& p, int64_t task) {
  using C = Compute<T>;
  const ShortRows rows = short_rows_of(p.layout);
  const ShortChunks chunks = short_chunks_of(p.layout);
  const auto activation = loops_of<C>(p.activation);
  double* const sums = sums_of(p, task / chunks.strips);
  double* const products = sums + p.layout.channels;
  const int64_t channel = task % chunks.strips * chunks.groups * rows.parameters;
  const int64_t channels = std::min(chunks.groups * rows.parameters, p.layout.channels - channel);
  std::fill_n(sums + channel, channels, 0.0);
  std::fill_n(products + channel, channels, 0.0);
  TileFactors<C> factors;
  Tile<C> x, grad, z, g, tile_sums, tile_products;
  int64_t known = -1;
  const int64_t groups = p.layout.all_groups();
  chunks.for_each_tile(
      rows, p.layout.batch, task,
      [&](int64_t first, int64_t count, int64_t group) {
        if (group != known) factors.read_parameters(p, rows, group);
        known = group;
        const C* const statistics = static_cast<const C*>(p.statistics) + first;
        rows.read_rows(factors.mean, statistics, count);
        rows.read_rows(factors.low, statistics + groups, count);
        rows.read_rows(factors.rstd, statistics + 2 * groups, count);
        const int64_t at = first * rows.columns;
        rows.read(x, static_cast<const T*>(p.x) + at, rows.columns, count);
        rows.read(grad, static_cast<const T*>(p.grad) + at, rows.columns, count);
        factors.read_argument(rows, x, z);
        activation.gradients(g, grad, z, rows.elements());
        for (int64_t i = 0; i < rows.elements(); i += rows.width) {
          // With an infinite weight, z of the lanes without a row is NaN.
          std::fill_n(g.at + i + count, rows.width - count, C(0));
#pragma GCC ivdep
          for (int64_t k = 0; k < rows.width; ++k) {
            tile_sums.at[i + k] += g.at[i + k];
            tile_products.at[i + k] +=
                g.at[i + k] * ((x.at[i + k] - factors.low[k]) * factors.rstd[k]);
          }
        }
        if (p.grad_x == nullptr) return;
        tile_gradients<C>(rows, factors, x, g);
        rows.write(static_cast<T*>(p.grad_x) + at, static_cast<const C*>(g), count);
      },
      [&](int64_t group) {
        rows.add_parameters<C>(sums, tile_sums, group);
        rows.add_parameters<C>(products, tile_products, group);
      });
}

}  // namespace

Status group_norm_backward(const GroupNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GroupPath path = path_of(p.layout);
    if (path == GroupPath::short_rows) {
      for (int64_t task = begin; task < end; ++task) short_gradients<T>(p, task);
      return Status{};
    }
    if (path == GroupPath::row) {
      RowGradients<T> gradients(p);
      for (int64_t group = begin; group < end; ++group) gradients.compute(group);
      return Status{};
    }
    if (path == GroupPath::planes) {
      PlaneGradients<T> gradients(p);
      const int64_t step = groups_per_run(p.layout);
      for (int64_t group = begin; group < end; group += step)
        gradients.compute(group, std::min(group + step, end));
      return Status{};
    }
    SpanGradients<T> gradients(p);
    for_each_span(p.layout, begin, end, [&](const GroupSpan& span) { gradients.compute(span); });
    return Status{};
  });
}

Status group_norm_backward_finish(const GroupNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.parameter_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    const int64_t parts = path_of(p.layout) == GroupPath::short_rows
                              ? short_chunks_of(p.layout).chunks
                              : p.layout.batch;
    constexpr int64_t kTogether = 64;  // adjacent channels, so that their sums are read together
    for (int64_t channel = begin; channel < end; channel += kTogether) {
      const int64_t count = std::min(kTogether, end - channel);
      double sum[kTogether] = {}, product[kTogether] = {};
      for (int64_t sample = 0; sample < parts; ++sample) {
        const double* const from = sums_of(p, sample) + channel;
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) {
          sum[i] += from[i];
          product[i] += from[p.layout.channels + i];
        }
      }
      for (int64_t i = channel; i < channel + count; ++i) {
        if (p.grad_weight != nullptr)
          narrow(static_cast<W*>(p.grad_weight) + i, product[i - channel]);
        if (p.grad_bias != nullptr) narrow(static_cast<W*>(p.grad_bias) + i, sum[i - channel]);
      }
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(group_norm_backward, (const GroupNormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(group_norm_backward_finish,
                    (const GroupNormBackward& p, int64_t begin, int64_t end), (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const GroupNormBackward& p) {
  if (TORCHKILN_ISA::path_of(p.layout) == TORCHKILN_ISA::GroupPath::short_rows) {
    const TORCHKILN_ISA::ShortChunks chunks = TORCHKILN_ISA::short_chunks_of(p.layout);
    const auto sums = static_cast<size_t>(chunks.chunks * p.layout.channels) * 2;
    return {chunks.tasks(), sums * sizeof(double), p.layout.channels};
  }
  const auto sums = static_cast<size_t>(p.layout.batch * p.layout.channels) * 2;
  return {p.layout.all_groups(), sums * sizeof(double), p.layout.channels};
}

#endif

}  // namespace torchkiln::cpu
