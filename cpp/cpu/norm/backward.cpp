#include "torchkiln/kernels/norm.h"

#include <algorithm>

#include "detail/short_rows.h"
#include "norm/common.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Rows per group: their terms of the gradients of weight and bias are added in registers, before
// the running sums, which are as long as a row, are read and written. Short float32 rows are not
// grouped: their sums stay in the L1 cache, and memory is written faster in one stream than in
// several. Short rows of 16-bit types are grouped, because their conversions take longer, and short
// float64 rows, because no wider type could add the sums of their blocks.
constexpr int64_t kGroup = 4;
constexpr int64_t kShort = 1024;
// Rows, or groups of rows, per block. The sums of a block have the compute type and are added to
// the sums of a chunk in double, as in reductions. The rounding error in float is that of 16
// additions for any number of rows.
constexpr int64_t kBlockAdditions = 16;

// Most columns of rows that are computed as tiles.
constexpr int64_t kTileColumns = 7;

/// Computes grad_x of `rows` rows from `row` on, and adds their terms to the gradients of weight
/// and bias.
template <class T, class W, int rows>
void rows_backward(const NormBackward& p, int64_t row, Compute<T>* grad_weight,
                   Compute<T>* grad_bias) {
  using C = Compute<T>;
  const PerColumn<W> weight(p.weight, 1);
  const C offset = p.weight == nullptr ? C(0) : static_cast<C>(p.weight_offset);
  // Local copies of the pointers and strides in p, because g++ must assume that a store changes p.
  const int64_t columns = p.columns;
  const T* grad[rows];
  const T* z[rows];
  const T* grad_sum[rows] = {};
  T* grad_x[rows] = {};
  C mean[rows];
  C rstd[rows];
  C scale[rows];
  C mean_d[rows] = {};
  C mean_dn[rows] = {};
  const bool has_grad_x = p.grad_x != nullptr;
  const bool has_grad_sum = p.grad_sum != nullptr;
  for (int r = 0; r < rows; ++r) {
    grad[r] = static_cast<const T*>(p.grad) + (row + r) * p.grad_row_stride;
    z[r] = static_cast<const T*>(p.z) + (row + r) * p.z_row_stride;
    mean[r] = p.centered ? static_cast<const C*>(p.mean)[row + r] : C(0);
    rstd[r] = static_cast<const C*>(p.rstd)[row + r];
    // A single column has a distance of 0 from its mean, so its gradient is 0. Fused multiply-adds
    // would leave a rounding error of g * w, times rstd.
    scale[r] = p.centered && columns == 1 ? C(0) : rstd[r];
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
      Lanes<C> gx = (g * w - mean_d[r] - n * mean_dn[r]) * scale[r];
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
  constexpr int64_t kChunkElements = 1 << 15;  // take longer than the start of a thread
  constexpr int64_t kMaxChunks = 64;
  // At least 32 rows per chunk, because with fewer, reading partial sums takes as long as the rows.
  // Up to 8 chunks may be shorter, because for few long rows several threads matter more.
  const int64_t most = std::max(p.rows / 32, std::min<int64_t>(p.rows, 8));
  return std::clamp<int64_t>(p.rows * p.columns / kChunkElements, 1,
                             std::clamp<int64_t>(most, 1, kMaxChunks));
}

/// The split of the rows and of the workspace. The workspace has, for all chunks, the sums for both
/// gradients in double, followed by the sums of each chunk's current block in the compute type. If
/// each chunk is one block, there are only the sums of blocks.
struct ChunkPlan {
  int64_t chunks;
  int64_t rows_per_chunk;
  bool in_groups;
  int64_t rows_per_block;
  bool has_blocks;
  int64_t sums;  // for both gradients, per chunk
  size_t size_of_sum;

  explicit ChunkPlan(const NormBackward& p)
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

/// Computes grad_x of short rows, and adds their terms to the gradients of weight and bias.
template <class T>
void short_backward(const NormBackward& p, int64_t begin, int64_t end, double* grad_weight,
                    double* grad_bias) {
  using C = Compute<T>;
  const ShortRows rows(p.columns, 1, p.columns);
  const int64_t width = rows.width, elements = rows.elements();
  Tile<C> weight, grad, n, weight_sums, bias_sums;
  rows.read_parameters<C>(weight, p.weight, p.weight_dtype, 0, 1);
  const C offset = static_cast<C>(p.weight_offset);
  for (int64_t i = 0; p.weight != nullptr && i < elements; ++i) weight.at[i] += offset;
  C mean[kMostTileRows] = {}, rstd[kMostTileRows] = {};
  const C share = 1 / static_cast<C>(p.columns);
  const C share_of_d = p.centered ? share : C(0);
  const bool is_alone = p.centered && p.columns == 1;  // as in rows_backward()
  const auto tile = [&](int64_t first, int64_t count, int64_t) {
    if (p.centered) rows.read_rows(mean, static_cast<const C*>(p.mean) + first, count);
    rows.read_rows(rstd, static_cast<const C*>(p.rstd) + first, count);
    rows.read(grad, static_cast<const T*>(p.grad) + first * p.grad_row_stride, p.grad_row_stride,
              count);
    rows.read(n, static_cast<const T*>(p.z) + first * p.z_row_stride, p.z_row_stride, count);
    C d_sum[kMostTileRows] = {}, dn_sum[kMostTileRows] = {};
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k) {
        const C g = grad.at[at + k], normalized = (n.at[at + k] - mean[k]) * rstd[k];
        const C d = g * weight.at[at + k];
        n.at[at + k] = normalized;
        weight_sums.at[at + k] += g * normalized;
        bias_sums.at[at + k] += g;
        d_sum[k] += d;
        dn_sum[k] += d * normalized;
      }
    }
    if (p.grad_x == nullptr) return;
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k) {
        const C d = grad.at[at + k] * weight.at[at + k];
        const C projected = d - d_sum[k] * share_of_d - n.at[at + k] * (dn_sum[k] * share);
        grad.at[at + k] = projected * (is_alone ? C(0) : rstd[k]);
      }
    }
    if (p.grad_sum != nullptr) {
      const int64_t stride = p.grad_sum_row_stride;
      rows.read(n, static_cast<const T*>(p.grad_sum) + first * stride, stride, count);
      for (int64_t i = 0; i < elements; ++i) grad.at[i] += n.at[i];
    }
    rows.write(static_cast<T*>(p.grad_x) + first * p.columns, grad, count);
  };
  rows.for_each_tile(begin, end, 0, 1, tile, [&](int64_t) {
    rows.add_parameters<C>(grad_weight, weight_sums, 0);
    rows.add_parameters<C>(grad_bias, bias_sums, 0);
  });
}

template <class T, class W>
void chunk_backward(const NormBackward& p, const ChunkPlan& plan, int64_t chunk) {
  using C = Compute<T>;
  const int64_t first = std::min(chunk * plan.rows_per_chunk, p.rows);
  const int64_t last = std::min(first + plan.rows_per_chunk, p.rows);
  double* const chunk_sums = plan.chunk_sums(p, chunk);
  C* const sums = plan.block_sums<C>(p, chunk);
  C* const grad_weight = p.grad_weight == nullptr ? nullptr : sums;
  C* const grad_bias =
      p.grad_bias == nullptr ? nullptr : sums + (p.grad_weight == nullptr ? 0 : p.columns);
  if (p.columns <= kTileColumns) {
    double weight_sums[kTileColumns] = {}, bias_sums[kTileColumns] = {};
    short_backward<T>(p, first, last, weight_sums, bias_sums);
    const auto store = [&](auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      const auto put = [&](const double* from) {
        for (int64_t i = 0; i < p.columns; ++i) *to++ = static_cast<To>(from[i]);
      };
      if (p.grad_weight != nullptr) put(weight_sums);
      if (p.grad_bias != nullptr) put(bias_sums);
    };
    plan.has_blocks ? store(chunk_sums) : store(sums);
    return;
  }
  if (plan.has_blocks) std::fill_n(chunk_sums, plan.sums, 0.0);
  std::fill_n(sums, plan.sums, C(0));
  for (int64_t block = first; block < last; block += plan.rows_per_block) {
    const int64_t end = std::min(block + plan.rows_per_block, last);
    int64_t row = block;
    for (; plan.in_groups && row + kGroup <= end; row += kGroup)
      rows_backward<T, W, kGroup>(p, row, grad_weight, grad_bias);
    for (; row < end; ++row) rows_backward<T, W, 1>(p, row, grad_weight, grad_bias);
    for (int64_t i = 0; plan.has_blocks && i < plan.sums; ++i) {
      chunk_sums[i] += static_cast<double>(sums[i]);
      sums[i] = 0;
    }
  }
}

/// Adds the sums of all chunks for one gradient. `offset`: index of its first sum among the sums of
/// a chunk.
template <class W>
void finish(const NormBackward& p, const ChunkPlan& plan, int64_t offset, void* out, int64_t begin,
            int64_t end) {
  using C = Compute<W>;
  constexpr int64_t kRun = 512;
  double sum[kRun];
  for (int64_t column = begin; column < end; column += kRun) {
    const int64_t count = std::min(kRun, end - column);
    std::fill_n(sum, count, 0.0);
    const auto add = [&](const auto* partial) {
      partial += offset + column;
      for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(partial[i]);
    };
    for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
      plan.has_blocks ? add(plan.chunk_sums(p, chunk)) : add(plan.block_sums<C>(p, chunk));
    }
    narrow_sums(static_cast<W*>(out) + column, sum, count);
  }
}

}  // namespace

Status norm_backward(const NormBackward& p, int64_t begin, int64_t end) {
  const ChunkPlan plan(p);
  return dispatch_weighted(p.dtype, p.weight_dtype, [&](auto tag, auto weight_tag) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      chunk_backward<typename decltype(tag)::type, typename decltype(weight_tag)::type>(p, plan,
                                                                                        chunk);
    return Status{};
  });
}

Status norm_backward_finish(const NormBackward& p, int64_t begin, int64_t end) {
  const ChunkPlan plan(p);
  return dispatch_floating(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.grad_weight != nullptr) finish<W>(p, plan, 0, p.grad_weight, begin, end);
    const int64_t behind = p.grad_weight == nullptr ? 0 : p.columns;
    if (p.grad_bias != nullptr) finish<W>(p, plan, behind, p.grad_bias, begin, end);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(norm_backward, (const NormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(norm_backward_finish, (const NormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const NormBackward& p) {
  const TORCHKILN_ISA::ChunkPlan plan(p);
  return {plan.chunks, plan.workspace_bytes(), plan.sums == 0 ? 0 : p.columns};
}

#endif

}  // namespace torchkiln::cpu
