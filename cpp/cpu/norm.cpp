#include "torchkiln/kernels/norm.h"

#include <cmath>

#include "detail/simd_row.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Rows whose gradients of weight and bias are formed together, in registers, before they are added
// to the running sums: these are as long as a row, and would else be read and written once a row.
// Short rows go one by one: their sums stay in the first-level cache, and memory is written
// faster in one stream than in several. Not so those of 16 bits, where conversions take longer, and
// of float64, where no wider type adds up the sums of blocks.
constexpr int64_t kGroup = 4;
constexpr int64_t kShort = 1024;
// Rows, or groups of them, whose sums are formed apart before they are added to those of a chunk,
// which are double, as those of reductions: the rounding error of float is that of 16 additions,
// however many rows there are.
constexpr int64_t kBlockAdditions = 16;
// Columns that stay in the first-level cache from one use to the next.
constexpr int64_t kBlockColumns = 2048;

/// Weight or bias, or where there is none, the same number for all columns.
template <class W>
class PerColumn {
 public:
  using C = Compute<W>;

  PerColumn(const void* values, C otherwise)
      : values_(static_cast<const W*>(values)), otherwise_(Lanes<C>{} + otherwise) {}

  template <class Span>
  Lanes<C> load(int64_t i, Span span) const {
    return values_ == nullptr ? otherwise_ : load_lanes(values_ + i, span);
  }

 private:
  const W* values_;
  Lanes<C> otherwise_;
};

/// Calls body(TypeTag<T>{}, TypeTag<W>{}) for the types of the rows and of weight and bias.
template <class Body>
Status dispatch_weighted(Dtype dtype, Dtype weight_dtype, const Body& body) {
  return dispatch_floating(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 2) {
      if (weight_dtype == Dtype::float32) return body(tag, TypeTag<float>{});
    }
    return body(tag, tag);
  });
}

/// The mean of a row in two parts, since far from zero its rounding error is seen in the
/// differences to it, and the reciprocal standard deviation.
template <class C>
struct Moments {
  C mean;
  C rest;
  C rstd;
};

/// Mean and variance are those of blocks that stay in the first-level cache, where the differences
/// to the mean are a second pass, and are put together in double: (n - 1) * variance of two blocks
/// grows by the squared distance of their means.
template <class T>
Moments<Compute<T>> moments(const T* z, const Norm& p) {
  using C = Compute<T>;
  double origin = 0;
  double mean = 0;  // less the origin
  double squares = 0;
  for (int64_t begin = 0; begin < p.columns; begin += kBlockColumns) {
    const int64_t count = std::min(kBlockColumns, p.columns - begin);
    const double share = 1 / static_cast<double>(count);
    const T* const block = z + begin;
    double total[1];
    double totals[2];
    C near = 0;
    if (p.centered) {
      sum_lanes<C>(total, count, [&](int64_t i, auto span, auto& sums) {
        sums[0] += load_lanes(block + i, span);
      });
      near = static_cast<C>(total[0] * share);
    }
    sum_lanes<C>(totals, count, [&](int64_t i, auto span, auto& sums) {
      const Lanes<C> centered = within<C>(load_lanes(block + i, span) - near, span);
      sums[0] += centered;
      sums[1] += centered * centered;
    });
    squares += totals[1];
    if (!p.centered) continue;
    const double rest = totals[0] * share;
    squares -= rest * totals[0];
    if (begin == 0) {
      origin = static_cast<double>(near);
      mean = rest;
      continue;
    }
    const double distance = static_cast<double>(near) - origin + rest - mean;
    const double weight = static_cast<double>(count) / static_cast<double>(begin + count);
    mean += distance * weight;
    squares += distance * distance * weight * static_cast<double>(begin);
  }
  Moments<C> m{};
  m.mean = static_cast<C>(origin + mean);
  m.rest = static_cast<C>(origin - static_cast<double>(m.mean) + mean);
  m.rstd = static_cast<C>(1 / std::sqrt(squares / static_cast<double>(p.columns) + p.eps));
  return m;
}

template <class T, class W>
void norm_row(const Norm& p, int64_t row) {
  using C = Compute<T>;
  const T* z = static_cast<const T*>(p.x) + row * p.x_row_stride;
  if (p.residual != nullptr) {
    const T* x = z;
    const T* residual = static_cast<const T*>(p.residual) + row * p.residual_row_stride;
    T* sum = static_cast<T*>(p.sum) + row * p.columns;
    for_lanes<C>(0, p.columns, [&](int64_t i, auto span) {
      store_lanes(sum + i, load_lanes(x + i, span) + load_lanes(residual + i, span), span);
    });
    z = sum;
  }
  const Moments<C> m = moments(z, p);
  if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = m.mean + m.rest;
  if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = m.rstd;

  const PerColumn<W> weight(p.weight, 1);
  const PerColumn<W> bias(p.bias, 0);
  const C offset = p.weight == nullptr ? C(0) : static_cast<C>(p.weight_offset);
  const C shift = -m.rest * m.rstd;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  for_lanes<C>(0, p.columns, [&](int64_t i, auto span) {
    const Lanes<C> n = (load_lanes(z + i, span) - m.mean) * m.rstd + shift;
    store_lanes(y + i, n * (weight.load(i, span) + offset) + bias.load(i, span), span);
  });
}

/// grad_x of the rows row, row + 1 ..., and their part of the gradients of weight and bias.
template <class T, class W, int rows>
void rows_backward(const NormBackward& p, int64_t row, Compute<T>* grad_weight,
                   Compute<T>* grad_bias) {
  using C = Compute<T>;
  const PerColumn<W> weight(p.weight, 1);
  const C offset = p.weight == nullptr ? C(0) : static_cast<C>(p.weight_offset);
  // The pointers and strides lie here since a store might, for all g++ knows, change those in p.
  const int64_t columns = p.columns;
  const T* grad[rows];
  const T* z[rows];
  const T* grad_sum[rows] = {};
  T* grad_x[rows] = {};
  C mean[rows];
  C rstd[rows];
  C mean_d[rows] = {};
  C mean_dn[rows] = {};
  const bool has_grad_x = p.grad_x != nullptr;
  const bool has_grad_sum = p.grad_sum != nullptr;
  for (int r = 0; r < rows; ++r) {
    grad[r] = static_cast<const T*>(p.grad) + (row + r) * p.grad_row_stride;
    z[r] = static_cast<const T*>(p.z) + (row + r) * p.z_row_stride;
    mean[r] = p.centered ? static_cast<const C*>(p.mean)[row + r] : C(0);
    rstd[r] = static_cast<const C*>(p.rstd)[row + r];
    if (has_grad_sum)
      grad_sum[r] = static_cast<const T*>(p.grad_sum) + (row + r) * p.grad_sum_row_stride;
    if (!has_grad_x) continue;
    grad_x[r] = static_cast<T*>(p.grad_x) + (row + r) * columns;
    double totals[2];
    sum_lanes<C>(totals, columns, [&](int64_t i, auto span, auto& sums) {
      const Lanes<C> d = load_lanes(grad[r] + i, span) * (weight.load(i, span) + offset);
      const Lanes<C> n = (load_lanes(z[r] + i, span) - mean[r]) * rstd[r];
      sums[0] += d;
      sums[1] += d * n;
    });
    mean_d[r] = p.centered ? static_cast<C>(totals[0] / static_cast<double>(columns)) : C(0);
    mean_dn[r] = static_cast<C>(totals[1] / static_cast<double>(columns));
  }
  for_lanes<C>(0, columns, [&](int64_t i, auto span) {
    const Lanes<C> w = weight.load(i, span) + offset;
    Lanes<C> weight_sum{};
    Lanes<C> bias_sum{};
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Lanes<C> g = load_lanes(grad[r] + i, span);
      const Lanes<C> n = (load_lanes(z[r] + i, span) - mean[r]) * rstd[r];
      weight_sum += g * n;
      bias_sum += g;
      if (!has_grad_x) continue;
      Lanes<C> gx = (g * w - mean_d[r] - n * mean_dn[r]) * rstd[r];
      if (has_grad_sum) gx += load_lanes(grad_sum[r] + i, span);
      store_lanes(grad_x[r] + i, gx, span);
    }
    const auto add = [&](C* to, const Lanes<C>& sum) {
      if (to != nullptr) store_lanes(to + i, load_lanes(to + i, span) + sum, span);
    };
    add(grad_weight, weight_sum);
    add(grad_bias, bias_sum);
  });
}

int64_t chunk_count(const NormBackward& p) {
  constexpr int64_t kChunkElements = 1 << 15;  // enough to outweigh the hand-over to a thread
  constexpr int64_t kMostChunks = 64;
  // Partial sums of few rows would cost as much as the rows; of few long rows, threads count more.
  const int64_t most = std::max(p.rows / 32, std::min<int64_t>(p.rows, 8));
  return std::clamp<int64_t>(p.rows * p.columns / kChunkElements, 1,
                             std::clamp<int64_t>(most, 1, kMostChunks));
}

/// How the rows and the workspace are cut up. Each chunk has sums of weight's gradient and of
/// bias's: in double, and, behind those of all chunks, the sums of a block in the compute type;
/// these alone where a chunk is one block.
struct Partials {
  int64_t chunks;
  int64_t rows_per_chunk;
  bool in_groups;
  int64_t rows_per_block;
  bool has_blocks;
  int64_t sums;  // of both gradients
  size_t size_of_sum;

  explicit Partials(const NormBackward& p)
      : chunks(chunk_count(p)),
        rows_per_chunk((p.rows + chunks - 1) / chunks),
        in_groups(p.dtype != Dtype::float32 || p.columns > kShort),
        rows_per_block(in_groups ? kBlockAdditions * kGroup : kBlockAdditions),
        has_blocks(rows_per_chunk > rows_per_block),
        sums(((p.grad_weight != nullptr) + (p.grad_bias != nullptr)) * p.columns),
        size_of_sum(p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float)) {}

  size_t chunk_sums_bytes() const { return has_blocks ? chunks * sums * sizeof(double) : 0; }
  size_t workspace_bytes() const { return chunk_sums_bytes() + chunks * sums * size_of_sum; }

  double* chunk_sums(const NormBackward& p, int64_t chunk) const {
    return static_cast<double*>(p.workspace) + chunk * sums;
  }
  template <class C>
  C* block_sums(const NormBackward& p, int64_t chunk) const {
    char* const begin = static_cast<char*>(p.workspace) + chunk_sums_bytes();
    return reinterpret_cast<C*>(begin) + chunk * sums;
  }
};

template <class T, class W>
void chunk_backward(const NormBackward& p, const Partials& cut, int64_t chunk) {
  using C = Compute<T>;
  const int64_t first = std::min(chunk * cut.rows_per_chunk, p.rows);
  const int64_t last = std::min(first + cut.rows_per_chunk, p.rows);
  double* const chunk_sums = cut.chunk_sums(p, chunk);
  C* const sums = cut.block_sums<C>(p, chunk);
  C* const grad_weight = p.grad_weight == nullptr ? nullptr : sums;
  C* const grad_bias =
      p.grad_bias == nullptr ? nullptr : sums + (p.grad_weight == nullptr ? 0 : p.columns);
  if (cut.has_blocks) std::fill_n(chunk_sums, cut.sums, 0.0);
  std::fill_n(sums, cut.sums, C(0));
  for (int64_t block = first; block < last; block += cut.rows_per_block) {
    const int64_t end = std::min(block + cut.rows_per_block, last);
    int64_t row = block;
    for (; cut.in_groups && row + kGroup <= end; row += kGroup)
      rows_backward<T, W, kGroup>(p, row, grad_weight, grad_bias);
    for (; row < end; ++row) rows_backward<T, W, 1>(p, row, grad_weight, grad_bias);
    for (int64_t i = 0; cut.has_blocks && i < cut.sums; ++i) {
      chunk_sums[i] += static_cast<double>(sums[i]);
      sums[i] = 0;
    }
  }
}

/// The sums of one gradient, whose place among those of a chunk is `place`, over all chunks.
template <class W>
void finish(const NormBackward& p, const Partials& cut, int64_t place, void* out, int64_t begin,
            int64_t end) {
  using C = Compute<W>;
  constexpr int64_t kRun = 512;
  double sum[kRun];
  for (int64_t column = begin; column < end; column += kRun) {
    const int64_t count = std::min(kRun, end - column);
    std::fill_n(sum, count, 0.0);
    const auto add = [&](const auto* partial) {
      partial += place + column;
      for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(partial[i]);
    };
    for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
      cut.has_blocks ? add(cut.chunk_sums(p, chunk)) : add(cut.block_sums<C>(p, chunk));
    }
    for (int64_t i = 0; i < count; ++i) narrow(static_cast<W*>(out) + column + i, sum[i]);
  }
}

}  // namespace

Status norm(const Norm& p, int64_t begin, int64_t end) {
  return dispatch_weighted(p.dtype, p.weight_dtype, [&](auto tag, auto weight_tag) {
    for (int64_t row = begin; row < end; ++row)
      norm_row<typename decltype(tag)::type, typename decltype(weight_tag)::type>(p, row);
    return Status{};
  });
}

Status norm_backward(const NormBackward& p, int64_t begin, int64_t end) {
  const Partials cut(p);
  return dispatch_weighted(p.dtype, p.weight_dtype, [&](auto tag, auto weight_tag) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      chunk_backward<typename decltype(tag)::type, typename decltype(weight_tag)::type>(p, cut,
                                                                                        chunk);
    return Status{};
  });
}

Status norm_backward_finish(const NormBackward& p, int64_t begin, int64_t end) {
  const Partials cut(p);
  return dispatch_floating(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.grad_weight != nullptr) finish<W>(p, cut, 0, p.grad_weight, begin, end);
    const int64_t behind = p.grad_weight == nullptr ? 0 : p.columns;
    if (p.grad_bias != nullptr) finish<W>(p, cut, behind, p.grad_bias, begin, end);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(norm, (const Norm& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(norm_backward, (const NormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(norm_backward_finish, (const NormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))

#ifdef TORCHKILN_BASELINE

Split split(const NormBackward& p) {
  const TORCHKILN_ISA::Partials cut(p);
  return {cut.chunks, cut.workspace_bytes(), cut.sums == 0 ? 0 : p.columns};
}

#endif

}  // namespace torchkiln::cpu
