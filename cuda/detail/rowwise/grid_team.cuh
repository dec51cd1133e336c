#pragma once

// Rows that are split among many blocks of a grid, because they are longer than a cluster can hold:
//
//                   block 0    block 1    block 2            the blocks of one team
//   rows of     +----------+----------+----------+--
//   a step      |   slab   |   slab   |   slab   | ...
//               +----------+----------+----------+--
//                    |          |          |
//   step i      sums over the slab, publish()
//   step i - 1  collect() the sums of all blocks, read the slab again, write results
//
// The second read of a slab hits a cache if the slabs of two steps fit there. The exchange is
// hidden: the sums of step i - 1 arrive while the sums of step i are computed. There are no
// atomics: a block writes its own slots, and the slots of a row are added in a fixed order.
//
// Blocks wait for each other, so all of them must be resident: the launch is cooperative.

#include "detail/rowwise/team.cuh"
#include "torchkiln/core/workspace.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::rowwise {
using namespace device;

inline constexpr int kGridWarps = kGridThreads / kWarpLanes;

/// The grid of a plan.
inline Grid make_grid(const GridPlan& plan) {
  const dim3 blocks(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.teams));
  Grid grid{blocks, dim3(kGridThreads)};
  grid.cooperative = plan.blocks > 1;
  return grid;
}

/// A team, as seen by the calling thread. kRows: rows per thread and step. kSplit: a team has
/// several blocks, and all threads of a block have the same row. Otherwise a team is one block,
/// which has whole rows, and several short rows at a time.
template <int kRows, bool kSplit>
class GridTeam {
 public:
  __device__ __forceinline__ GridTeam(const GridPlan& plan, int columns, int lanes)
      : plan_(plan),
        columns_(columns),
        lanes_(lanes),
        index_(static_cast<int>(blockIdx.y)),
        block_(static_cast<int>(blockIdx.x)),
        thread_(static_cast<int>(threadIdx.x) & (row_threads() - 1)),
        row_in_block_(kSplit ? 0 : static_cast<int>(threadIdx.x) >> plan.log_threads),
        begin_(block_ * plan.slab),
        end_(min(begin_ + plan.slab, (columns - 1) / lanes + 1)) {}

  __device__ __forceinline__ int index() const { return index_; }
  /// The block's index in its team, and whether it has the end of each row.
  __device__ __forceinline__ int block() const { return block_; }
  __device__ __forceinline__ bool is_last_block() const { return block_ == plan_.blocks - 1; }
  /// Threads per row in a block, and the index of the calling thread among them.
  __device__ __forceinline__ int row_threads() const {
    return kSplit ? kGridThreads : 1 << plan_.log_threads;
  }
  __device__ __forceinline__ int thread() const { return thread_; }
  /// Rows that a block reads at a time, and the index among them of the thread's row.
  __device__ __forceinline__ int block_rows() const {
    return kSplit ? 1 : kGridThreads >> plan_.log_threads;
  }
  __device__ __forceinline__ int row_in_block() const { return row_in_block_; }
  /// The first vector of the slab, and the vector after its last one. Vectors are counted as in a
  /// row that begins at a 16-byte boundary.
  __device__ __forceinline__ int begin() const { return begin_; }
  __device__ __forceinline__ int end() const { return end_; }
  /// The column after the slab.
  __device__ __forceinline__ int end_column() const { return min(columns_, end_ * lanes_); }

  /// The row of a thread in a step, for 0 <= r < kRows.
  __device__ __forceinline__ int64_t row(int64_t step, int r, int row_in_block) const {
    const int64_t group = (step >> plan_.log_stride) * kRows + r;
    const int64_t first = (group << plan_.log_stride) + (step & ((1 << plan_.log_stride) - 1));
    return first * block_rows() + row_in_block;
  }
  __device__ __forceinline__ int64_t row(int64_t step, int r) const {
    return row(step, r, row_in_block_);
  }

  /// Prefetches the rows of a step of a tensor into L2, from vector `first` of the slab on. Each
  /// thread prefetches one line.
  template <class T>
  __device__ __forceinline__ void prefetch(const T* data, int64_t stride, int64_t rows,
                                           int64_t step, int first) const {
    constexpr int kLineElements = 128 / static_cast<int>(sizeof(T));
    if (!kSplit || data == nullptr || step >= plan_.steps) return;
    const int column = first * lanes_ + thread_ % kWarpLanes * kLineElements;
    if (column >= end_column()) return;
    for (int r = thread_ / kWarpLanes; r < kRows; r += kGridWarps) {
      if (row(step, r, 0) < rows) prefetch_to_l2(data + row(step, r, 0) * stride + column);
    }
  }

 private:
  const GridPlan& plan_;
  int columns_;
  int lanes_;
  int index_;
  int block_;
  int thread_;
  int row_in_block_;
  int begin_;
  int end_;
};

/// The merge of values that are added, over the lanes of a warp. `lanes`: as in reduce_warp().
struct AddValues {
  template <class C, int kPerLane, int kValues>
  __device__ __forceinline__ void operator()(const C (&values)[kPerLane][kValues],
                                             C (&sums)[kValues], int lanes) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      sums[i] = values[0][i];
#pragma unroll
      for (int k = 1; k < kPerLane; ++k) sums[i] += values[k][i];
    }
    reduce_warp(sums, Sum{}, lanes);
  }
};

/// The values that the blocks of a team exchange through global memory, for each row. Until a value
/// is published, all bits of its slot are set.
template <class C, int kValues>
class RowExchange {
  static_assert(kValues == 1 || kValues == 2 || (kValues == 4 && sizeof(C) == 4),
                "the values of a slot fit in one access");

 public:
  __device__ __forceinline__ RowExchange(C* slots, int blocks) : slots_(slots), blocks_(blocks) {}

  __device__ __forceinline__ void publish(int64_t row, int block,
                                          const C (&values)[kValues]) const {
    Values published;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const C nan = C(__int_as_float(0x7fffffff));  // NaN with one bit clear, unlike an empty slot
      published.lane[i] = values[i] == values[i] ? values[i] : nan;
    }
    store_shared(slot(row, block), published);
  }

  /// Waits for the values of all blocks, and merges them. All lanes of the warp get the result.
  template <class Merge>
  __device__ __forceinline__ void collect(int64_t row, C (&result)[kValues],
                                          const Merge& merge) const {
    static_assert(kMaxTeamBlocks <= 9 * kWarpLanes, "at most 9 blocks per lane");
    if (blocks_ <= kWarpLanes) return collect_per_lane<1>(row, result, merge);
    if (blocks_ <= 3 * kWarpLanes) return collect_per_lane<3>(row, result, merge);
    collect_per_lane<9>(row, result, merge);
  }

 private:
  using Values = Vec<C, kValues>;

  template <int kPerLane, class Merge>
  __device__ __forceinline__ void collect_per_lane(int64_t row, C (&result)[kValues],
                                                   const Merge& merge) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    C values[kPerLane][kValues];
    for (bool complete = false; !complete;) {
      complete = true;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int block = lane + k * kWarpLanes;
        Values read{};
        if (block < blocks_) read = load_shared(slot(row, block));
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[k][i] = read.lane[i];
      }
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) complete = complete && is_published(values[k][i]);
      }
    }
    merge(values, result, kWarpLanes);
  }

  __device__ __forceinline__ Values* slot(int64_t row, int block) const {
    return reinterpret_cast<Values*>(slots_) + row * blocks_ + block;
  }
  /// Loads all values of a slot in one access, from the L2 cache.
  static __device__ __forceinline__ Values load_shared(const Values* from) {
    Values values;
    C(&to)[kValues] = values.lane;
    if constexpr (sizeof(C) == 8 && kValues == 2) {
      asm volatile("ld.volatile.global.v2.f64 {%0, %1}, [%2];"
                   : "=d"(to[0]), "=d"(to[1])
                   : "l"(from));
    } else if constexpr (sizeof(C) == 8) {
      asm volatile("ld.volatile.global.f64 %0, [%1];" : "=d"(to[0]) : "l"(from));
    } else if constexpr (kValues == 4) {
      asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                   : "l"(from));
    } else if constexpr (kValues == 2) {
      asm volatile("ld.volatile.global.v2.f32 {%0, %1}, [%2];"
                   : "=f"(to[0]), "=f"(to[1])
                   : "l"(from));
    } else {
      asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(to[0]) : "l"(from));
    }
    return values;
  }
  static __device__ __forceinline__ void store_shared(Values* to, const Values& values) {
    const C(&from)[kValues] = values.lane;
    if constexpr (sizeof(C) == 8 && kValues == 2) {
      __stcg(reinterpret_cast<double2*>(to), make_double2(from[0], from[1]));
    } else if constexpr (kValues == 4) {
      __stcg(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
    } else if constexpr (kValues == 2) {
      __stcg(reinterpret_cast<float2*>(to), make_float2(from[0], from[1]));
    } else {
      __stcg(&to->lane[0], from[0]);
    }
  }
  static __device__ __forceinline__ bool is_published(float value) {
    return __float_as_int(value) != -1;
  }
  static __device__ __forceinline__ bool is_published(double value) {
    return __double_as_longlong(value) != -1;
  }

  C* slots_;
  int blocks_;
};

/// Merges the values of the warps of a block. All lanes of the calling warp get the result.
template <class C, int kValues, int kParts, class Merge>
__device__ __forceinline__ void merge_warps(const C (&parts)[kValues][kParts], C (&result)[kValues],
                                            const Merge& merge) {
  static_assert(kParts >= kGridWarps, "a part per warp");
  C values[1][kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[0][i] = parts[i][threadIdx.x % kGridWarps];
  merge(values, result, kGridWarps);
}

/// Allocates the slots of a RowExchange among `blocks` blocks per team, and marks them as empty.
template <class C>
Status allocate_exchange(int64_t rows, int values, int blocks, Allocate allocate,
                         cudaStream_t stream, C*& slots) {
  const size_t bytes = static_cast<size_t>(rows * values * blocks) * sizeof(C);
  slots = static_cast<C*>(allocate(bytes));
  return status_of(cudaMemsetAsync(slots, 0xff, bytes, stream));
}

}  // namespace torchkiln::rowwise
