#include "group_norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Maximum number of elements in a span whose gradients g are kept from the first pass for the
// second: 256 KiB in float32. Where grad_x has the compute type, it has room for all of them.
constexpr int64_t kKeptElements = 1 << 16;

/// grad_x as memory for g; null if it has another type, or is not wanted.
template <class T>
Compute<T>* room_in_grad_x(const GroupNormBackward& p) {
  return std::is_same_v<T, Compute<T>> ? static_cast<Compute<T>*>(p.grad_x) : nullptr;
}

/// Computes g, the gradient of the activation's argument, for the runs of a span.
template <bool kRows, class T>
class ArgumentGradient {
 public:
  using C = Compute<T>;

  ArgumentGradient(const GroupNormBackward& p, const GroupSpan& span)
      : p_(p), span_(span), activation_(loops_of<C>(p.activation)), factors_(p, span) {
    if (room_ == nullptr && span.elements() <= kKeptElements)
      kept_.resize(static_cast<size_t>(span.elements()));
  }

  const GroupFactors<C>& factors() const { return factors_; }

  /// Calls body(at, count, channel, g, x - mean) for all runs.
  template <class Body>
  void first_pass(const Body& body) {
    C g[kChannelRun];
    C* next = kept_.data();
    span_.for_each_run([&](int64_t at, int64_t count, int64_t channel) {
      C* const to = room_ != nullptr ? room_ + at : kept_.empty() ? g : next;
      compute(to, at, count, channel);
      body(at, count, channel, to, from_mean_);
      next += kept_.empty() ? 0 : count;
    });
  }

  /// Calls body() for all runs again. Reuses g if the first pass has kept it.
  template <class Body>
  void second_pass(const Body& body) {
    if (room_ == nullptr && kept_.empty()) return first_pass(body);
    const C* next = kept_.data();
    C buffer[kChannelRun];
    span_.for_each_run([&](int64_t at, int64_t count, int64_t channel) {
      const C* const x = read_run(buffer, p_.x, at, 1, count, p_.dtype);
      const auto mean = values_of_run<kRows>(factors_.mean, channel);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) from_mean_[i] = x[i] - mean[i];
      body(at, count, channel, room_ != nullptr ? room_ + at : next, from_mean_);
      next += kept_.empty() ? 0 : count;
    });
  }

 private:
  void compute(C* g, int64_t at, int64_t count, int64_t channel) {
    C buffer[kChannelRun], z[kChannelRun];
    const C* const x = read_run(buffer, p_.x, at, 1, count, p_.dtype);
    read_argument<kRows>(from_mean_, z, factors_, x, count, channel);
    activation_.gradients(g, read_run(buffer, p_.grad, at, 1, count, p_.dtype), z, count);
  }

  const GroupNormBackward& p_;
  const GroupSpan& span_;
  ActivationLoops<C> activation_;
  GroupFactors<C> factors_;
  C from_mean_[kChannelRun];
  C* room_ = room_in_grad_x<T>(p_);
  std::vector<C> kept_;
};

/// The sums in the workspace for a sample, or a chunk of samples: of g, then of g * n, for each
/// channel.
double* sums_of(const GroupNormBackward& p, int64_t sample) {
  return static_cast<double*>(p.workspace) + sample * 2 * p.layout.channels;
}

ShortChunks short_chunks_of(const GroupLayout& layout) {
  return {short_rows_of(layout), layout.batch};
}

template <bool kRows, class T>
void span_gradients(const GroupNormBackward& p, const GroupSpan& span) {
  using C = Compute<T>;
  ArgumentGradient<kRows, T> gradient(p, span);
  const auto channels = static_cast<size_t>(span.channels());
  double* const sums = sums_of(p, span.group() / p.layout.groups) + span.first_channel();
  double* const products = sums + p.layout.channels;
  std::fill_n(sums, channels, 0.0);
  std::fill_n(products, channels, 0.0);
  gradient.first_pass([&](int64_t, int64_t count, int64_t channel, const C* g, const C* from_mean) {
    const auto term = [&](int64_t i) {
      const auto each = static_cast<double>(g[i]);
      return Pair<double>{each, each * static_cast<double>(from_mean[i])};
    };
    if constexpr (kRows) {
      add_run(sums + channel, products + channel, false, count, term);
      return;
    }
    double of_run[kSums] = {}, products_of_run[kSums] = {};
    add_run(of_run, products_of_run, true, count, term);
    sums[channel] += total_of(of_run);
    products[channel] += total_of(products_of_run);
  });
  const GroupFactors<C>& factors = gradient.factors();
  std::vector<Pair<double>> groups(static_cast<size_t>(span.groups()));
  const auto group_of = [&](size_t channel) -> Pair<double>& {
    return groups[static_cast<size_t>(span.group_of(static_cast<int64_t>(channel)))];
  };
  for (size_t i = 0; i < channels; ++i) {
    const auto low = static_cast<double>(factors.low[i]);
    products[i] = (products[i] - low * sums[i]) * static_cast<double>(factors.rstd[i]);
    const auto weight = static_cast<double>(factors.weight[i]);
    group_of(i).first += weight * sums[i];
    group_of(i).second += weight * products[i];
  }
  if (p.grad_x == nullptr) return;
  // grad_x = g * scale - slope * (x - mean) - level
  ChannelValues<C> slopes(channels), levels(channels);
  const auto count = static_cast<double>(p.layout.count());
  for (size_t i = 0; i < channels; ++i) {
    const auto low = static_cast<double>(factors.low[i]);
    const auto rstd = static_cast<double>(factors.rstd[i]);
    const double slope = group_of(i).second * rstd * rstd / count;
    slopes[i] = static_cast<C>(slope);
    levels[i] = static_cast<C>(group_of(i).first * rstd / count - slope * low);
  }
  C result[kChannelRun];
  gradient.second_pass(
      [&](int64_t at, int64_t length, int64_t channel, const C* g, const C* from_mean) {
        const auto scale = values_of_run<kRows>(factors.scale, channel);
        const auto slope = values_of_run<kRows>(slopes, channel);
        const auto level = values_of_run<kRows>(levels, channel);
#pragma GCC ivdep
        for (int64_t i = 0; i < length; ++i)
          result[i] = g[i] * scale[i] - slope[i] * from_mean[i] - level[i];
        narrow_run(static_cast<T*>(p.grad_x) + at, result, length);
      });
}

/// The sum of weight * term over the channels of a group.
template <class C>
void add_weighted(Pair<double>& total, const C* weight, const double* sums, const double* products,
                  int64_t channels) {
  double first[kSums] = {}, second[kSums] = {};
  add_run(first, second, true, channels, [&](int64_t i) {
    const auto w = static_cast<double>(weight[i]);
    return Pair<double>{w * sums[i], w * products[i]};
  });
  total.first += total_of(first);
  total.second += total_of(second);
}

/// A group as one row. `kept` has room for g.
template <class T>
void row_gradients(const GroupNormBackward& p, int64_t group, std::vector<Compute<T>>& kept) {
  using C = Compute<T>;
  RowFactors<C> factors(p, group);
  const auto activation = loops_of<C>(p.activation);
  const int64_t pixels = p.layout.inner;
  const auto low = static_cast<double>(factors.low), rstd = static_cast<double>(factors.rstd);
  double* const all_sums = sums_of(p, group / p.layout.groups);
  C buffer[kChannelRun], grad_buffer[kChannelRun], from_mean[kChannelRun], z[kChannelRun];
  const int64_t begin = group * p.layout.count();
  C* const room = room_in_grad_x<T>(p);
  const bool keeps = room != nullptr || p.layout.count() <= kKeptElements;
  if (room == nullptr) kept.resize(static_cast<size_t>(keeps ? p.layout.count() : kChannelRun));
  const auto place_of = [&](int64_t at) {
    return room != nullptr ? room + at : kept.data() + (keeps ? at - begin : 0);
  };
  const auto read_g = [&](C* g, int64_t at, int64_t count) {
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      from_mean[i] = x[i] - factors.mean;
      z[i] = from_mean[i] * factors.scale[i] + factors.shift[i];
    }
    activation.gradients(g, read_run(grad_buffer, p.grad, at, 1, count, p.dtype), z, count);
  };
  Pair<double> total{};
  for_each_row_run(p.layout, group, [&](int64_t at, int64_t count, int64_t channel, int64_t of) {
    factors.load(p, channel, of);
    C* const g = place_of(at);
    read_g(g, at, count);
    double* const sums = all_sums + channel;
    double* const products = sums + p.layout.channels;
    std::fill_n(sums, of, 0.0);
    std::fill_n(products, of, 0.0);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      add_run(sums, products, false, of, [&](int64_t i) {
        const auto each = static_cast<double>(g[i * pixels + pixel]);
        return Pair<double>{each, each * static_cast<double>(from_mean[i * pixels + pixel])};
      });
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < of; ++i) products[i] = (products[i] - low * sums[i]) * rstd;
    add_weighted(total, factors.weight, sums, products, of);
  });
  if (p.grad_x == nullptr) return;
  const auto elements = static_cast<double>(p.layout.count());
  const double exact_slope = total.second * rstd * rstd / elements;
  const C slope = static_cast<C>(exact_slope);
  const C level = static_cast<C>(total.first * rstd / elements - exact_slope * low);
  C result[kChannelRun];
  for_each_row_run(p.layout, group, [&](int64_t at, int64_t count, int64_t channel, int64_t of) {
    factors.load(p, channel, of);
    C* const g = place_of(at);
    if (!keeps) read_g(g, at, count);
    const C* const x = read_run(buffer, p.x, at, 1, count, p.dtype);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i)
      result[i] = g[i] * factors.scale[i] - slope * (x[i] - factors.mean) - level;
    narrow_run(static_cast<T*>(p.grad_x) + at, result, count);
  });
}

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
      std::vector<Compute<T>> kept;
      for (int64_t group = begin; group < end; ++group) row_gradients<T>(p, group, kept);
      return Status{};
    }
    for_each_span(p.layout, begin, end,
                  [&](const GroupSpan& span, auto rows) { span_gradients<rows, T>(p, span); });
    return Status{};
  });
}

Status group_norm_backward_finish(const GroupNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.parameter_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    const int64_t parts = path_of(p.layout) == GroupPath::short_rows
                              ? short_chunks_of(p.layout).chunks
                              : p.layout.batch;
    for (int64_t channel = begin; channel < end; ++channel) {
      double sum = 0, product = 0;
      for (int64_t sample = 0; sample < parts; ++sample) {
        sum += sums_of(p, sample)[channel];
        product += sums_of(p, sample)[p.layout.channels + channel];
      }
      if (p.grad_weight != nullptr) narrow(static_cast<W*>(p.grad_weight) + channel, product);
      if (p.grad_bias != nullptr) narrow(static_cast<W*>(p.grad_bias) + channel, sum);
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
