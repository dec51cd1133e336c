#pragma once

// Gradients of norms for rows that are split among blocks, and for rows whose offset from a 16-byte
// boundary differs between tensors:
//
//   step i      reads grad and z of its rows by columns: a thread has the same columns in each row
//                 weight_sum[column] += grad * n, bias_sum[column] += grad    kept over all steps
//                 sums of d * n and of d over the slab  -- RowExchange -->  sums over the row
//   step i - 1  reads grad and z again, by vectors of grad_x, and writes grad_x
//
// with n = (z - mean) * rstd and d = grad * weight. Only the first reads come from memory.

#include "backward_common.cuh"
#include "backward_split_columns.cuh"
#include "detail/rowwise/grid_team.cuh"
#include "detail/rowwise/inner_vectors.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

constexpr int kMaxSplitParts = kGridThreads >> kLogMinRowThreads;

template <class C, int kSums, int kLanes>
struct SplitStorage {
  // Per row of a step: the sums of each warp or, if a warp has several rows, of each part of a
  // warp.
  C parts[kSplitRows][kSums][kMaxSplitParts];
  RowFactors<C> factors[kSplitRows][kMaxSplitParts];
  C columns[kGridThreads * kLanes];
};

/// kSplit: see GridTeam.
template <class T, bool kCentered, bool kSplit>
class SplitRows {
  using C = Compute<T>;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kSums = kCentered ? 2 : 1;
  static constexpr int kInFlight = kSplitRows / 2;  // rows whose loads are in flight

 public:
  using Storage = SplitStorage<C, kSums, kLanes>;

  __device__ __forceinline__ SplitRows(const NormBackward& p, const GridPlan& plan, C* exchange,
                                       C* partial, Storage& storage)
      : p_(p),
        plan_(plan),
        team_(plan, static_cast<int>(p.columns), kLanes),
        exchange_(exchange, plan.blocks),
        partial_(partial),
        storage_(storage),
        columns_(static_cast<int>(p.columns)) {}

  __device__ __forceinline__ void run() {
    for (int first = team_.begin(); first < team_.end(); first += kGridThreads)
      prefetch(team_.index(), first);
    const int64_t lag = kSplit && p_.grad_x != nullptr ? plan_.teams : 0;
    for (int64_t step = team_.index(); step < plan_.steps + lag; step += plan_.teams) {
      if (step < plan_.steps) add(step);
      if (p_.grad_x == nullptr) continue;
      const int64_t ready = step - lag;
      __syncthreads();
      if constexpr (kSplit) {
        exchange_sums(step, ready);
      } else {
        add_parts(step);
      }
      __syncthreads();
      if (ready >= 0) write(ready);
    }
  }

 private:
  template <class E = T>
  static __device__ __forceinline__ const E* row_at(const void* data, int64_t row, int64_t stride) {
    return static_cast<const E*>(data) + row * stride;
  }
  /// Whether a thread has the same columns in all steps, so that it can keep their sums in
  /// registers.
  __device__ __forceinline__ bool keeps_sums() const { return plan_.slab <= team_.row_threads(); }

  __device__ __forceinline__ void prefetch(int64_t step, int first) const {
    const auto rows_of = [&](const void* data, int64_t stride) {
      team_.prefetch(static_cast<const T*>(data), stride, p_.rows, step, first);
    };
    rows_of(p_.grad, p_.grad_row_stride);
    rows_of(p_.z, p_.z_row_stride);
    if (p_.grad_x != nullptr) rows_of(p_.grad_sum, p_.grad_sum_row_stride);
  }

  /// Adds the rows of a step to the sums of the columns, and stores their sums over the slab.
  __device__ __forceinline__ void add(int64_t step) {
    C sums[kSplitRows][kSums] = {};
    const int threads = team_.row_threads();
    const int end = team_.end_column();
    for (int first = team_.begin(); first < team_.end(); first += threads) {
      const int column = first * kLanes + team_.thread();
      const bool is_whole = column + (kLanes - 1) * threads < end;
      if (step < plan_.teams || !keeps_sums()) load_weights(column, end);
      const auto load = [&](const T* row, bool inside, T(&items)[kLanes]) {
        const T* const from = row + column;
        if (inside && is_whole) {
#pragma unroll
          for (int i = 0; i < kLanes; ++i) items[i] = __ldg(from + i * threads);
        } else {
#pragma unroll
          for (int i = 0; i < kLanes; ++i) {
            items[i] = T(0.0f);
            if (inside && column + i * threads < end) items[i] = __ldg(from + i * threads);
          }
        }
      };
#pragma unroll
      for (int group = 0; group < kSplitRows; group += kInFlight) {
        T grads[kInFlight][kLanes], zs[kInFlight][kLanes];
        C mean[kInFlight], rstd[kInFlight];
#pragma unroll
        for (int r = 0; r < kInFlight; ++r) {
          const int64_t row = team_.row(step, group + r);
          const bool inside = row < p_.rows;
          load(row_at(p_.grad, row, p_.grad_row_stride), inside, grads[r]);
          load(row_at(p_.z, row, p_.z_row_stride), inside, zs[r]);
          mean[r] = kCentered && inside ? *row_at<C>(p_.mean, row, 1) : C(0);
          rstd[r] = inside ? *row_at<C>(p_.rstd, row, 1) : C(0);
        }
#pragma unroll
        for (int r = 0; r < kInFlight; ++r) {
#pragma unroll
          for (int i = 0; i < kLanes; ++i) {
            accumulate<kCentered>(convert<C>(grads[r][i]), convert<C>(zs[r][i]), weight_[i],
                                  mean[r], rstd[r], column_sums_.weight[i],
                                  column_sums_.bias[kCentered ? i : 0], sums[group + r]);
          }
        }
      }
      prefetch(step + plan_.teams, first);
      const bool is_last = step + plan_.teams >= plan_.steps;
      if (is_last || !keeps_sums())
        column_sums_.store(p_, plan_, team_, storage_.columns, partial_, first * kLanes,
                           step < plan_.teams || keeps_sums(), is_last);
    }
    const int lanes = min(threads, kWarpLanes);
#pragma unroll
    for (int r = 0; r < kSplitRows; ++r) {
      reduce_warp(sums[r], Sum{}, lanes);
      if ((threadIdx.x & (lanes - 1)) != 0) continue;
#pragma unroll
      for (int k = 0; k < kSums; ++k) storage_.parts[r][k][threadIdx.x / lanes] = sums[r][k];
    }
  }

  /// Loads weight + weight_offset for the thread's columns.
  __device__ __forceinline__ void load_weights(int column, int end) {
    with_parameter_type<T>(p_.weight_dtype, [&](auto tag) {
      const auto* weights = static_cast<const typename decltype(tag)::type*>(p_.weight);
      const C offset = static_cast<C>(p_.weight_offset);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const int at = column + i * team_.row_threads();
        weight_[i] = C(1);
        if (weights != nullptr && at < end) weight_[i] = convert<C>(__ldg(weights + at)) + offset;
      }
    });
  }

  /// Loads weight + weight_offset for adjacent columns.
  template <int N>
  __device__ __forceinline__ void load_weights(int column, C (&weight)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) weight[i] = C(1);
    if (p_.weight == nullptr) return;
    with_parameter_type<T>(p_.weight_dtype, [&](auto tag) {
      using W = typename decltype(tag)::type;
      load_elements(static_cast<const W*>(p_.weight) + column, weight);
    });
    const C offset = static_cast<C>(p_.weight_offset);
#pragma unroll
    for (int i = 0; i < N; ++i) weight[i] += offset;
  }

  /// Combines the sums and factors of the rows of a block.
  __device__ __forceinline__ void add_parts(int64_t step) const {
    const int parts = max(team_.row_threads() / kWarpLanes, 1);
    for (int at = threadIdx.x; at < kSplitRows * team_.block_rows(); at += kGridThreads) {
      const int r = at / team_.block_rows();
      const int row = at % team_.block_rows();
      C sums[kSums] = {};
      for (int part = 0; part < parts; ++part) {
#pragma unroll
        for (int k = 0; k < kSums; ++k) sums[k] += storage_.parts[r][k][row * parts + part];
      }
      set_factors(step, r, row, sums);
    }
  }

  /// One warp per row publishes the row's sums over the slab, and reads the other blocks' sums of
  /// an earlier step.
  __device__ __forceinline__ void exchange_sums(int64_t step, int64_t ready) const {
    static_assert(kSplitRows <= kGridWarps, "one warp per row");
    const int r = static_cast<int>(threadIdx.x) / kWarpLanes;
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    if (r >= kSplitRows) return;
    if (step < plan_.steps && team_.row(step, r, 0) < p_.rows) {
      C sums[kSums];
      merge_warps(storage_.parts[r], sums, AddValues{});
      if (lane == 0) exchange_.publish(team_.row(step, r, 0), team_.block(), sums);
    }
    if (ready < 0 || team_.row(ready, r, 0) >= p_.rows) return;
    C sums[kSums];
    exchange_.collect(team_.row(ready, r, 0), sums, AddValues{});
    if (lane == 0) set_factors(ready, r, 0, sums);
  }

  __device__ __forceinline__ void set_factors(int64_t step, int r, int row_in_block,
                                              const C (&sums)[kSums]) const {
    const int64_t row = team_.row(step, r, row_in_block);
    if (row >= p_.rows) return;
    const C mean = kCentered ? *row_at<C>(p_.mean, row, 1) : C(0);
    const C rstd = *row_at<C>(p_.rstd, row, 1);
    const C factor = -factor_of_gradient<kCentered>(p_, rstd) / static_cast<C>(columns_);
    storage_.factors[r][row_in_block] = {mean, rstd, factor * sums[0],
                                         kCentered ? factor * sums[kSums - 1] : C(0)};
  }

  /// Writes grad_x of the slab in each row. The last block also writes the edges of the row.
  __device__ __forceinline__ void write(int64_t step) const {
    for (int v = team_.begin() + team_.thread(); v < team_.end(); v += team_.row_threads()) {
      C weight[kLanes];
      int weight_column = -1;
#pragma unroll 2
      for (int r = 0; r < kSplitRows && team_.row(step, r) < p_.rows; ++r) {
        const InnerVectors<T> vectors = inner_vectors(team_.row(step, r));
        if (v >= vectors.count) continue;
        const int column = vectors.column(v);
        // Weights are loaded again only if the column changes: the rows of a step usually have the
        // same offset.
        if (column != weight_column) load_weights(column, weight);
        weight_column = column;
        write(step, r, column, weight);
      }
    }
    if (!team_.is_last_block()) return;
#pragma unroll 1
    for (int r = 0; r < kSplitRows && team_.row(step, r) < p_.rows; ++r) {
      const InnerVectors<T> vectors = inner_vectors(team_.row(step, r));
      for (int e = team_.thread(); e < vectors.edges; e += team_.row_threads()) {
        C weight[1];
        load_weights(vectors.edge_column(e), weight);
        write(step, r, vectors.edge_column(e), weight);
      }
    }
  }
  __device__ __forceinline__ InnerVectors<T> inner_vectors(int64_t row) const {
    return {static_cast<const T*>(p_.grad_x) + row * p_.columns, columns_};
  }

  /// Writes N adjacent elements of row r of a step.
  template <int N>
  __device__ __forceinline__ void write(int64_t step, int r, int column,
                                        const C (&weight)[N]) const {
    const int64_t row = team_.row(step, r);
    PendingElements<T, N> grads, zs, others;
    grads.load(row_at(p_.grad, row, p_.grad_row_stride) + column);
    zs.load(row_at(p_.z, row, p_.z_row_stride) + column);
    if (p_.grad_sum != nullptr)
      others.load(row_at(p_.grad_sum, row, p_.grad_sum_row_stride) + column);
    const auto projection = projection_of<kCentered>(p_, storage_.factors[r][team_.row_in_block()]);
    C g[N], z[N];
    grads.read(g);
    zs.read(z);
    project<T>(projection, z, weight, g);
    if (p_.grad_sum != nullptr) {
      C other[N];
      others.read(other);
      add_lanes(other, g);
    }
    store(static_cast<T*>(p_.grad_x) + row * p_.columns + column, g);
  }

  const NormBackward& p_;
  const GridPlan& plan_;
  GridTeam<kSplitRows, kSplit> team_;
  RowExchange<C, kSums> exchange_;
  C* partial_;
  Storage& storage_;
  int columns_;
  C weight_[kLanes];
  ColumnSums<C, kLanes, kCentered> column_sums_;
};

template <class T, bool kCentered, bool kSplit>
__global__ void __launch_bounds__(kGridThreads, kGridBlocks)
    split_rows(NormBackward p, GridPlan plan, Compute<T>* exchange, Compute<T>* partial) {
  using Rows = SplitRows<T, kCentered, kSplit>;
  __shared__ typename Rows::Storage storage;
  wait_for_previous_kernel();
  Rows(p, plan, exchange, partial, storage).run();
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
