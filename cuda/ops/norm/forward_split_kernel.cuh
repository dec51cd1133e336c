#pragma once

// Forward pass of rows that are split among blocks:
//
//   step i      reads x and reduces the moments of each slab:
//                 center   a number near the mean
//                 square   sum of (z - center)^2
//                 rest     sum of z - center               -- RowExchange -->  mean and rstd
//   step i - 1  reads x again, from a cache, and writes y
//
// Each warp takes a center of its own, the mean of 32 elements. Merging moments first moves them to
// a common center near the mean of the row, so that a large mean loses no digits. RMS norm needs
// only the squares.

#include "detail/rowwise/grid_team.cuh"
#include "forward_split_rows.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

constexpr int kNormSplitRows = 4;     // per thread and step
constexpr int kNormSplitVectors = 2;  // per thread and row; more if the grid has too few blocks

template <class T, bool kCentered>
class NormSplitRows {
  using C = Compute<T>;
  using Row = NormRow<T>;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kValues = kCentered ? 3 : 1;  // center, square, rest; or square
  static constexpr int kInFlight = kNormSplitRows / 2;
  using Exchange = RowExchange<C, kValues>;

 public:
  struct Storage {
    // Three steps: a fast warp may begin one while another warp still writes the last but one.
    Row rows[3][kNormSplitRows];
    C parts[kNormSplitRows][kValues][kGridWarps];
    C stats[kNormSplitRows][3];  // mean, what it lost by rounding, rstd
  };

  __device__ __forceinline__ NormSplitRows(const Norm& p, const GridPlan& plan, C* exchange,
                                           Storage& storage)
      : p_(p),
        plan_(plan),
        team_(plan, static_cast<int>(p.columns), kLanes),
        exchange_(exchange, plan.blocks),
        storage_(storage),
        warp_(team_.thread() / kWarpLanes) {}

  __device__ __forceinline__ void run() {
    prefetch(team_.index());
    const Row* ready = nullptr;
    int slot = 0;
    for (int64_t step = team_.index(); step < plan_.steps + plan_.teams; step += plan_.teams) {
      Row* const rows = storage_.rows[slot];
      slot = slot == 2 ? 0 : slot + 1;
      if (team_.thread() < kNormSplitRows)
        rows[team_.thread()] = row_at(team_.row(step, team_.thread()));
      __syncthreads();
      reduce(rows);
      prefetch(step + plan_.teams);
      __syncthreads();
      if (warp_ < kNormSplitRows) {
        publish(rows[warp_]);
        if (ready != nullptr) collect(ready[warp_]);
      }
      __syncthreads();
      if (ready != nullptr) write(ready);
      ready = rows;
    }
  }

 private:
  __device__ __forceinline__ Row row_at(int64_t row) const {
    if (row >= p_.rows) return {nullptr, nullptr, -1, InnerVectors<T>(nullptr, 0)};
    const auto* residual = static_cast<const T*>(p_.residual) + row * p_.residual_row_stride;
    return {static_cast<const T*>(p_.x) + row * p_.x_row_stride,
            has_residual_of_type() ? residual : nullptr, row,
            InnerVectors<T>(static_cast<const T*>(p_.y) + row * p_.columns,
                            static_cast<int>(p_.columns))};
  }
  __device__ __forceinline__ bool has_residual_of_type() const {
    return p_.residual != nullptr && p_.residual_dtype == p_.dtype;
  }
  /// The number of a row's elements that a block has; 0 for a block that does not exist.
  __device__ __forceinline__ C count(const InnerVectors<T>& vectors, int block) const {
    const int inner = min(max(vectors.count - block * plan_.slab, 0), plan_.slab) * kLanes;
    return static_cast<C>(inner + (block == plan_.blocks - 1 ? vectors.edges : 0));
  }
  /// The number of a row's vectors that a warp reads together, from `first` on.
  __device__ __forceinline__ int count(const Row& row, int warp, int first) const {
    const int end = min(row.vectors.count, team_.end());
    return min(max(end - first - warp * kWarpLanes, 0), kWarpLanes);
  }

  __device__ __forceinline__ void prefetch(int64_t step) const {
    for (int first = team_.begin(); first < team_.end(); first += kGridThreads) {
      team_.prefetch(static_cast<const T*>(p_.x), p_.x_row_stride, p_.rows, step, first);
      if (has_residual_of_type())
        team_.prefetch(static_cast<const T*>(p_.residual), p_.residual_row_stride, p_.rows, step,
                       first);
    }
  }

  template <int N>
  static __device__ __forceinline__ void add(const C (&z)[N], C center, C (&moments)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const C distance = z[i] - center;
      moments[0] += distance * distance;
      if constexpr (kCentered) moments[1] += distance;
    }
  }

  /// Reduces the slab's part of the rows of a step over each warp.
  __device__ __forceinline__ void reduce(const Row* rows) const {
#pragma unroll 1
    for (int group = 0; group < kNormSplitRows; group += kInFlight) {
      C center[kInFlight] = {};
      C moments[kInFlight][2] = {};
      for (int first = team_.begin(); first < team_.end(); first += kGridThreads) {
        const int v = first + team_.thread();
        PendingSum<T, kLanes> pending[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const Row& row = rows[group + i];
          if (v < row.vectors.count && v < team_.end()) pending[i].load(row, row.vectors.column(v));
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const Row& row = rows[group + i];
          const bool has = v < row.vectors.count && v < team_.end();
          C z[kLanes] = {};
          if (has) pending[i].read(p_, row, row.vectors.column(v), z);
          if (kCentered && first == team_.begin())
            center[i] = reduce_warp(z[0]) / static_cast<C>(max(count(row, warp_, first), 1));
          if (has) add(z, center[i], moments[i]);
        }
      }
      // The first warp of the last block also has the edges of the row.
#pragma unroll
      for (int i = 0; i < kInFlight && team_.is_last_block() && warp_ == 0; ++i) {
        const Row& row = rows[group + i];
        const bool has = team_.thread() < row.vectors.edges;
        C z[1] = {};
        if (has) read_edge(row, z);
        if (kCentered && count(row, 0, team_.begin()) == 0) center[i] = __shfl_sync(~0u, z[0], 0);
        if (has) add(z, center[i], moments[i]);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        reduce_warp(moments[i], Sum{});
        if (team_.thread() % kWarpLanes > 0) continue;
        auto& parts = storage_.parts[group + i];
        if constexpr (kCentered) parts[0][warp_] = center[i];
        parts[kCentered ? 1 : 0][warp_] = moments[i][0];
        if constexpr (kCentered) parts[2][warp_] = moments[i][1];
      }
    }
  }
  __device__ __forceinline__ void read_edge(const Row& row, C (&z)[1]) const {
    const int column = row.vectors.edge_column(team_.thread());
    PendingSum<T, 1> pending;
    pending.load(row, column);
    pending.read(p_, row, column, z);
  }

  /// Publishes the moments of the slab's part of the warp's row.
  __device__ __forceinline__ void publish(const Row& row) const {
    if (row.index < 0) return;
    C values[kValues];
    if constexpr (kCentered) {
      const int part = team_.thread() % kWarpLanes;
      C parts[1][3] = {}, counts[1] = {};
      if (part < kGridWarps) {
        for (int first = team_.begin(); first < team_.end(); first += kGridThreads)
          counts[0] += static_cast<C>(count(row, part, first) * kLanes);
        if (part == 0 && team_.is_last_block()) counts[0] += static_cast<C>(row.vectors.edges);
#pragma unroll
        for (int i = 0; i < 3; ++i) parts[0][i] = storage_.parts[warp_][i][part];
      }
      merge_moments(counts, parts, count(row.vectors, team_.block()), values);
    } else {
      add_warps(storage_.parts[warp_], values);
    }
    if (team_.thread() % kWarpLanes == 0) exchange_.publish(row.index, team_.block(), values);
  }

  /// Collects the moments of the warp's row, and stores its statistics.
  __device__ __forceinline__ void collect(const Row& row) const {
    if (row.index < 0) return;
    const C columns = static_cast<C>(p_.columns);
    C moments[3] = {};  // center, square, rest
    if constexpr (kCentered) {
      C values[Exchange::kPerLane][kValues], counts[Exchange::kPerLane];
      exchange_.collect(row.index, values);
      const InnerVectors<T> vectors = row.vectors;
#pragma unroll
      for (int k = 0; k < Exchange::kPerLane; ++k)
        counts[k] = count(vectors, Exchange::block_of(k));
      merge_moments(counts, values, columns, moments);
    } else {
      C square[kValues];
      exchange_.collect_sums(row.index, square);
      moments[1] = square[0];
    }
    if (team_.thread() % kWarpLanes > 0) return;
    const C rest = moments[2] / columns;
    const C rstd = rsqrt(moments[1] / columns - rest * rest + static_cast<C>(p_.eps));
    storage_.stats[warp_][0] = moments[0];
    storage_.stats[warp_][1] = rest;
    storage_.stats[warp_][2] = rstd;
    if (team_.block() > 0) return;
    if (p_.mean != nullptr) static_cast<C*>(p_.mean)[row.index] = moments[0] + rest;
    if (p_.rstd != nullptr) static_cast<C*>(p_.rstd)[row.index] = rstd;
  }

  /// Writes y, and the sum with the residual, of the rows of a step.
  __device__ __forceinline__ void write(const Row* rows) const {
    for (int v = team_.begin() + team_.thread(); v < team_.end(); v += kGridThreads) {
      C weight[kLanes], bias[kLanes];
      int loaded = -1;  // the column of weight and bias
#pragma unroll 1
      for (int group = 0; group < kNormSplitRows; group += kInFlight) {
        PendingSum<T, kLanes> pending[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const Row& row = rows[group + i];
          if (v < row.vectors.count) pending[i].load(row, row.vectors.column(v));
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const Row& row = rows[group + i];
          if (v >= row.vectors.count) continue;
          const int column = row.vectors.column(v);
          // The rows of a step usually have the same offset.
          if (column != loaded) load_parameters<T>(p_, column, weight, bias);
          loaded = column;
          C z[kLanes];
          pending[i].read(p_, row, column, z);
          write(row, column, storage_.stats[group + i], weight, bias, z);
        }
      }
    }
    if (!team_.is_last_block()) return;
#pragma unroll 1
    for (int r = 0; r < kNormSplitRows; ++r) {
      if (team_.thread() >= rows[r].vectors.edges) continue;
      const int column = rows[r].vectors.edge_column(team_.thread());
      C weight[1], bias[1], z[1];
      load_parameters<T>(p_, column, weight, bias);
      read_edge(rows[r], z);
      write(rows[r], column, storage_.stats[r], weight, bias, z);
    }
  }

  /// Writes N adjacent elements of a row.
  template <int N>
  __device__ __forceinline__ void write(const Row& row, int column, const C (&stats)[3],
                                        const C (&weight)[N], const C (&bias)[N], C (&z)[N]) const {
    const int64_t at = row.index * p_.columns + column;
    if (p_.residual != nullptr) {
      // The sum may be written over the residual, whose offset may be another one.
      T* const sum = static_cast<T*>(p_.sum) + at;
      if (N > 1 && aligned(sum)) {
        store(sum, z);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = convert<T>(z[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kCentered) z[i] -= stats[0];
      if constexpr (kCentered && sizeof(T) > 2) z[i] -= stats[1];
      z[i] *= stats[2];
    }
    round_normalized<T>(p_, z);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = z[i] * weight[i] + bias[i];
    store(static_cast<T*>(p_.y) + at, z);
  }

  const Norm& p_;
  const GridPlan& plan_;
  GridTeam<kNormSplitRows, true> team_;
  Exchange exchange_;
  Storage& storage_;
  int warp_;
};

template <class T, bool kCentered>
__global__ void __launch_bounds__(kGridThreads, kGridBlocks)
    norm_split_rows(Norm p, GridPlan plan, Compute<T>* exchange) {
  using Rows = NormSplitRows<T, kCentered>;
  __shared__ typename Rows::Storage storage;
  wait_for_previous_kernel();
  Rows(p, plan, exchange, storage).run();
}

}  // namespace
}  // namespace torchkiln::cuda
