#include "torchkiln/kernels/norm.h"

#include <cmath>
#include <vector>

#include "detail/round_fp8.h"
#include "detail/short_rows.h"
#include "norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Most columns of rows that are computed as tiles.
constexpr int64_t kTileColumns = 4;
// Most columns of rows that are converted together, in a batch whose roots are computed together:
// sums of 16 floats per lane. From 8 on, rows without conversions are faster one by one.
template <class T>
constexpr int64_t kBatchColumns = (sizeof(T) == 2 ? 16 : 8) * kLanes<float>;
// Columns per block, which stay in the L1 cache between the two passes over it.
constexpr int64_t kBlockColumns = 2048;

/// Mean and reciprocal standard deviation of a row. The mean has two parts, rounded value and
/// rounding error, because the error matters in z - mean if the mean is far from 0.
template <class C>
struct Moments {
  C mean;
  C remainder;
  C rstd;
};

/// The moments of a row. Each block takes two passes over the L1 cache, for its mean and its
/// variance. Blocks are merged in double: the sum of squares grows by the squared distance of their
/// means times n1 n2 / (n1 + n2).
template <class T>
Moments<Compute<T>> moments(const T* z, const Norm& p) {
  using C = Compute<T>;
  double origin = 0;
  double mean = 0;  // as a distance from the origin
  double squares = 0;
  for (int64_t begin = 0; begin < p.columns; begin += kBlockColumns) {
    const int64_t count = std::min(kBlockColumns, p.columns - begin);
    const double inverse_count = 1 / static_cast<double>(count);
    const T* const block = z + begin;
    double total[1];
    double totals[2];
    C center = 0;
    if (p.centered) {
      sum_lanes<C>(total, count, [&](int64_t i, auto span, auto& sums) {
        sums[0] += load_lanes(block + i, span);
      });
      center = static_cast<C>(total[0] * inverse_count);
    }
    sum_lanes<C>(totals, count, [&](int64_t i, auto span, auto& sums) {
      const Lanes<C> centered = within<C>(load_lanes(block + i, span) - center, span);
      sums[0] += centered;
      sums[1] += centered * centered;
    });
    squares += totals[1];
    if (!p.centered) continue;
    const double remainder = totals[0] * inverse_count;
    squares -= remainder * totals[0];
    if (begin == 0) {
      origin = static_cast<double>(center);
      mean = remainder;
      continue;
    }
    const double distance = static_cast<double>(center) - origin + remainder - mean;
    const double weight = static_cast<double>(count) / static_cast<double>(begin + count);
    mean += distance * weight;
    squares += distance * distance * weight * static_cast<double>(begin);
  }
  Moments<C> m{};
  m.mean = static_cast<C>(origin + mean);
  m.remainder = static_cast<C>(origin - static_cast<double>(m.mean) + mean);
  m.rstd = static_cast<C>(1 / std::sqrt(squares / static_cast<double>(p.columns) + p.eps));
  return m;
}

/// Calls body(pointer to the row of the residual). The residual has type T or, if T is float32,
/// possibly half precision.
template <class T, class Body>
void with_residual(const Norm& p, int64_t row, const Body& body) {
  const auto call = [&](auto tag) {
    using R = typename decltype(tag)::type;
    body(static_cast<const R*>(p.residual) + row * p.residual_row_stride);
  };
  if constexpr (sizeof(T) == 4) {
    if (p.residual_dtype == Dtype::float16) return call(TypeTag<Half>{});
    if (p.residual_dtype == Dtype::bfloat16) return call(TypeTag<BFloat16>{});
  }
  call(TypeTag<T>{});
}

/// Computes a row of the result into y.
template <class T, class W>
void norm_row(const Norm& p, int64_t row, T* y) {
  using C = Compute<T>;
  const T* z = static_cast<const T*>(p.x) + row * p.x_row_stride;
  if (p.residual != nullptr) {
    T* sum = static_cast<T*>(p.sum) + row * p.columns;
    with_residual<T>(p, row, [&](const auto* residual) {
      for_lanes<C>(0, p.columns, [&](int64_t i, auto span) {
        store_lanes(sum + i, load_lanes(z + i, span) + load_lanes(residual + i, span), span);
      });
    });
    z = sum;
  }
  const Moments<C> m = moments(z, p);
  if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = m.mean + m.remainder;
  if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = m.rstd;

  const PerColumn<W> weight(p.weight, 1);
  const PerColumn<W> bias(p.bias, 0);
  const C offset = p.weight == nullptr ? C(0) : static_cast<C>(p.weight_offset);
  const C shift = -m.remainder * m.rstd;
  for_lanes<C>(0, p.columns, [&](int64_t i, auto span) {
    Lanes<C> n = (load_lanes(z + i, span) - m.mean) * m.rstd + shift;
    if (p.rounds_normalized) n = round_lanes<T>(n);
    store_lanes(y + i, n * (weight.load(i, span) + offset) + bias.load(i, span), span);
  });
}

/// Rounds elements to T, and converts them back.
template <class T>
void round_tile(Compute<T>* tile, int64_t elements) {
  T rounded[kTile];
  narrow_run(rounded, tile, elements);
  widen_run(tile, rounded, 1, elements);
}

/// The moments of rows: mean, its rounding error and rstd.
template <class C>
struct RowMoments {
  C mean[kMostTileRows] = {}, low[kMostTileRows] = {}, rstd[kMostTileRows] = {};

  /// Stores the statistics of `count` rows from `first` on, where they are wanted.
  void store(const Norm& p, int64_t first, int64_t count) const {
    for (int64_t k = 0; p.mean != nullptr && k < count; ++k)
      static_cast<C*>(p.mean)[first + k] = mean[k] + low[k];
    if (p.rstd != nullptr) std::copy_n(rstd, count, static_cast<C*>(p.rstd) + first);
  }
};

/// Reads `count` rows, one after another, and adds the residual, if there is one.
template <class T>
void read_rows(const Norm& p, int64_t first, int64_t count, Compute<T>* z) {
  using C = Compute<T>;
  const T* const x = static_cast<const T*>(p.x) + first * p.x_row_stride;
  widen_rows(z, x, p.x_row_stride, p.columns, count);
  if (p.residual == nullptr) return;
  C added[kTile];
  with_residual<T>(p, first, [&](const auto* residual) {
    widen_rows(added, residual, p.residual_row_stride, p.columns, count);
  });
  const int64_t elements = count * p.columns;
  for (int64_t i = 0; i < elements; ++i) z[i] += added[i];
  T* const sum = static_cast<T*>(p.sum) + first * p.columns;
  narrow_run(sum, z, elements);
  if constexpr (!std::is_same_v<T, C>) widen_run(z, sum, 1, elements);
}

/// The moments of the rows of a tile.
template <class C>
void tile_moments(const Norm& p, const ShortRows& rows, const C* z, RowMoments<C>& m) {
  double means[kMostTileRows] = {}, squares[kMostTileRows] = {};
  const int64_t width = rows.width;
  const double eps = p.eps, count = static_cast<double>(rows.columns);
  for (int64_t at = 0; p.centered && at < rows.elements(); at += width) {
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k) means[k] += static_cast<double>(z[at + k]);
  }
#pragma GCC ivdep
  for (int64_t k = 0; k < width; ++k) means[k] /= count;
  for (int64_t at = 0; at < rows.elements(); at += width) {
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k) {
      const double distance = static_cast<double>(z[at + k]) - means[k];
      squares[k] += distance * distance;
    }
  }
#pragma GCC ivdep
  for (int64_t k = 0; k < width; ++k) {
    m.mean[k] = static_cast<C>(means[k]);
    m.low[k] = static_cast<C>(means[k] - static_cast<double>(m.mean[k]));
    m.rstd[k] = static_cast<C>(1 / std::sqrt(squares[k] / count + eps));
  }
}

/// Computes the rows begin <= row < end, of at most kTileColumns, into y.
template <class T>
void tiled_norm(const Norm& p, int64_t begin, int64_t end, T* y) {
  using C = Compute<T>;
  const ShortRows rows(p.columns, 1, p.columns);
  const int64_t width = rows.width, elements = rows.elements();
  Tile<C> weight, bias, z;
  C natural[kTile];
  rows.read_parameters<C>(weight, p.weight, p.weight_dtype, 0, 1);
  rows.read_parameters<C>(bias, p.bias, p.weight_dtype, 0, 0);
  const C offset = static_cast<C>(p.weight_offset);
  for (int64_t i = 0; p.weight != nullptr && i < elements; ++i) weight.at[i] += offset;
  RowMoments<C> m;
  for (int64_t first = begin; first < end; first += rows.rows) {
    const int64_t count = std::min(rows.rows, end - first);
    read_rows<T>(p, first, count, natural);
    rows.read(z, natural, p.columns, count);
    tile_moments<C>(p, rows, z, m);
    m.store(p, first, count);
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k)
        z.at[at + k] = (z.at[at + k] - m.mean[k]) * m.rstd[k] - m.low[k] * m.rstd[k];
    }
    if (p.rounds_normalized) round_tile<T>(z, elements);
    for (int64_t i = 0; i < elements; ++i) z.at[i] = z.at[i] * weight.at[i] + bias.at[i];
    rows.write(y + (first - begin) * p.columns, z, count);
  }
}

/// The moments of rows that lie one after another, as in moments().
template <class C>
void batch_moments(const Norm& p, const C* z, int64_t count, RowMoments<C>& m) {
  const int64_t columns = p.columns;
  const bool is_centered = p.centered;
  const double inverse_count = 1 / static_cast<double>(columns), eps = p.eps;
  // Sums of the distances from `mean`, then their moments. All rows take the same vector loop.
  C* const totals = m.low;
  C* const squares = m.rstd;
  for (int64_t row = 0; row < count; ++row) {
    const C* const from = z + row * columns;
    Lanes<C> sum{}, square_sum{};
    C center = 0;
    if (is_centered) {
      for_lanes<C>(0, columns, [&](int64_t i, auto span) {
        sum += within<C>(load_lanes(from + i, FullStep{}), span);
      });
      center = static_cast<C>(static_cast<double>(lane_sum<C>(sum)) * inverse_count);
      sum = Lanes<C>{};
    }
    for_lanes<C>(0, columns, [&](int64_t i, auto span) {
      const Lanes<C> centered = within<C>(load_lanes(from + i, FullStep{}) - center, span);
      sum += centered;
      square_sum += centered * centered;
    });
    m.mean[row] = center;
    totals[row] = is_centered ? lane_sum<C>(sum) : C(0);
    squares[row] = lane_sum<C>(square_sum);
  }
  const int64_t lanes = (count + 15) / 16 * 16;
#pragma GCC ivdep
  for (int64_t row = 0; row < lanes; ++row) {
    const double center = static_cast<double>(m.mean[row]);
    const double total = static_cast<double>(totals[row]), remainder = total * inverse_count;
    const double square = static_cast<double>(squares[row]) - remainder * total;
    m.mean[row] = static_cast<C>(center + remainder);
    m.low[row] = static_cast<C>(center - static_cast<double>(m.mean[row]) + remainder);
    m.rstd[row] = static_cast<C>(1 / std::sqrt(square * inverse_count + eps));
  }
}

/// Computes the rows begin <= row < end, of at most kBatchColumns, into y. Registers are read and
/// written whole: the last one of a row reaches into the next row, which is written after it.
template <class T>
void batched_norm(const Norm& p, int64_t begin, int64_t end, T* y) {
  using C = Compute<T>;
  const int64_t columns = p.columns, rows = std::min(kTile / columns, kMostTileRows);
  C weight[kBatchColumns<T> + kLanes<C>], bias[kBatchColumns<T> + kLanes<C>];
  const auto read_parameter = [&](C* to, const void* from, C offset, C otherwise) {
    std::fill_n(to, kBatchColumns<T> + kLanes<C>, otherwise);
    if (from == nullptr) return;
    const C* const run = read_run(to, from, 0, 1, columns, p.weight_dtype);
    for (int64_t i = 0; i < columns; ++i) to[i] = run[i] + offset;
  };
  read_parameter(weight, p.weight, static_cast<C>(p.weight_offset), C(1));
  read_parameter(bias, p.bias, C(-0.0), C(0));
  C z[kTile + kLanes<C>] = {}, results[kTile + kLanes<C>];
  RowMoments<C> m;
  const bool is_rounded = p.rounds_normalized;
  for (int64_t first = begin; first < end; first += rows) {
    const int64_t count = std::min(rows, end - first);
    read_rows<T>(p, first, count, z);
    batch_moments<C>(p, z, count, m);
    m.store(p, first, count);
    for (int64_t row = 0; row < count; ++row) {
      const C mean = m.mean[row], rstd = m.rstd[row], shift = -m.low[row] * rstd;
      const C* const from = z + row * columns;
      C* const to = results + row * columns;
      for (int64_t i = 0; i < columns; i += kLanes<C>) {
        Lanes<C> n = (load_lanes(from + i, FullStep{}) - mean) * rstd + shift;
        if (is_rounded) n = round_lanes<T>(n);
        const Lanes<C> scaled = n * load_lanes(weight + i, FullStep{});
        store_lanes(to + i, scaled + load_lanes(bias + i, FullStep{}), FullStep{});
      }
    }
    narrow_run(y + (first - begin) * columns, results, count * columns);
  }
}

template <class T>
void short_norm(const Norm& p, int64_t begin, int64_t end, T* y) {
  p.columns <= kTileColumns ? tiled_norm<T>(p, begin, end, y) : batched_norm<T>(p, begin, end, y);
}

/// Computes short rows, and quantises them if E4M3 is wanted.
template <class T>
void short_norms(const Norm& p, int64_t begin, int64_t end) {
  if (p.data == nullptr)
    return short_norm<T>(p, begin, end, static_cast<T*>(p.y) + begin * p.columns);
  if constexpr (sizeof(T) <= 4) {
    T y[kTile];
    const int64_t rows = kTile / p.columns;
    for (int64_t first = begin; first < end; first += rows) {
      const int64_t last = std::min(first + rows, end);
      short_norm<T>(p, first, last, y);
      for (int64_t row = first; row < last; ++row)
        quantize_row(y + (row - first) * p.columns, p.columns, p.data + row * p.columns,
                     p.scale + row, p.rows);
    }
  }
}

}  // namespace

Status norm(const Norm& p, int64_t begin, int64_t end) {
  return dispatch_weighted(p.dtype, p.weight_dtype, [&](auto tag, auto weight_tag) {
    using T = typename decltype(tag)::type;
    if (p.columns <= kBatchColumns<T>) {
      short_norms<T>(p, begin, end);
      return Status{};
    }
    std::vector<T> rounded(p.data == nullptr ? 0 : static_cast<size_t>(p.columns));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * p.columns;
      T* const y = p.data == nullptr ? static_cast<T*>(p.y) + at : rounded.data();
      norm_row<T, typename decltype(weight_tag)::type>(p, row, y);
      if constexpr (sizeof(T) <= 4)
        if (p.data != nullptr) quantize_row(y, p.columns, p.data + at, p.scale + row, p.rows);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(norm, (const Norm& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace torchkiln::cpu
