#pragma once

// Which elements of a row are a thread's where its team holds all of it in registers, and how many
// threads such a team has.

#include "detail/rowwise/vectors.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// kItems vectors of every row. Of rows that are not whole, only a pipeline reads and writes them.
template <class Access_, int kItems_>
class RowTile {
 public:
  using Access = Access_;
  using T = typename Access::T;
  using Item = typename Access::Item;
  static constexpr int kItems = kItems_;
  static constexpr int kVectors = kItems;
  static constexpr int kLanes = Access::kLanes;

  __device__ __forceinline__ RowTile(const void* row, int columns, int rank, int size)
      : RowTile(Access(row, columns), rank, size) {}
  __device__ __forceinline__ RowTile(const Access& access, int rank, int size)
      : access_(access), column_(access.column(rank)), step_(size * kLanes) {}

  __device__ __forceinline__ const Access& access() const { return access_; }
  /// How many lanes of item k may belong to a row.
  static __device__ constexpr int lanes(int) { return kLanes; }
  /// The column of the first lane of item k.
  __device__ __forceinline__ int column(int k) const { return column_ + k * step_; }
  /// Whether any, or a certain, lane of item k belongs to the row.
  __device__ __forceinline__ bool has_any(int k) const { return column(k) < access_.columns; }
  __device__ __forceinline__ bool has(int k, int) const {
    static_assert(Access::kAligned, "lanes of other rows are asked for one by one");
    return has_any(k);
  }

  /// How many elements of the row the lanes of a warp have, or a team of fewer.
  __device__ __forceinline__ int count_of_lanes(int lane, int lanes) const {
    int count = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int first = column(k) - lane * kLanes;
      count += max(min(first + lanes * kLanes, access_.columns) - max(first, 0), 0);
    }
    return count;
  }

  /// The items of a row, `outside` where they do not belong to it.
  __device__ __forceinline__ void load(const T* row, Item (&items)[kItems],
                                       T outside = T(0.0f)) const {
    static_assert(Access::kAligned, "vectors that belong to a row in part");
    access_.load(row, column_, step_, items, outside, true);
  }

  /// Has what load() will read brought to the L2 cache.
  __device__ __forceinline__ void prefetch(const T* row) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (has_any(k) && column(k) >= 0)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + column(k)));
    }
  }

  /// Those of item k. Without a branch, behind which everything would wait: of no item, those of
  /// the first columns.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(int k, const W* parameters,
                                                  C (&values)[kLanes]) const {
    access_.load_parameters(has_any(k) ? column(k) : 0, parameters, values);
  }

  /// Stores item k of a row of results where it is `wanted`.
  template <class C>
  __device__ __forceinline__ void save(bool wanted, T* row, int k,
                                       const C (&values)[kLanes]) const {
    static_assert(Access::kAligned, "vectors that belong to a row in part");
    if constexpr (kLanes > 1) {
      T* own = row + column_;
      store_if(wanted && has_any(k), own + k * step_, values);
    } else if (wanted && has_any(k)) {
      access_.save(row, column(k), values);
    }
  }

 private:
  Access access_;
  int column_;
  int step_;
};

/// Of rows that begin anywhere between two 16-byte boundaries, but alike in every tensor: kVectors
/// vectors that belong to the row as a whole. The last item is one of the elements before and
/// behind all such vectors, of which there are fewer than two vectors: a vector that may belong to
/// the row in part costs every thread the registers and the code that two of them need.
template <class T_, int kVectors_>
class UnalignedRowTile {
 public:
  using T = T_;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kVectors = kVectors_;
  static constexpr int kItems = kVectors + 1;
  using Item = Vec<T, kLanes>;

  // So many threads at least have the elements at the edges.
  static constexpr int kFewestThreads = 2 * kLanes - 1;
  // Behind these vectors there is one more, so that parameters which begin at a boundary can be
  // read by vectors, too: those of a vector of the row lie in two.
  static __host__ __device__ constexpr int64_t vectors_of(int64_t columns) {
    return columns < kLanes ? 0 : columns / kLanes - 1;
  }

  __device__ __forceinline__ UnalignedRowTile(const void* row, int columns, int rank, int size)
      : step_(size * kLanes) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes);
    head_ = (kLanes - past) % kLanes;
    const int inner = static_cast<int>(vectors_of(columns)) * kLanes;
    column_ = head_ + rank * kLanes;
    end_ = head_ + inner;
    edges_ = columns - inner;
    edge_ = rank < edges_ ? (rank < head_ ? rank : rank + inner) : -1;
  }

  static __device__ constexpr int lanes(int k) { return k < kVectors ? kLanes : 1; }
  __device__ __forceinline__ int column(int k) const {
    return k < kVectors ? column_ + k * step_ : edge_;
  }
  __device__ __forceinline__ bool has_any(int k) const {
    return k < kVectors ? column(k) < end_ : edge_ >= 0;
  }
  __device__ __forceinline__ bool has(int k, int lane) const {
    return lane < lanes(k) && has_any(k);
  }

  __device__ __forceinline__ int count_of_lanes(int lane, int lanes) const {
    const int first_rank = (column_ - head_) / kLanes - lane;
    int count = max(min(edges_ - first_rank, lanes), 0);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int first = column(k) - lane * kLanes;
      count += max(min(first + lanes * kLanes, end_) - first, 0);
    }
    return count;
  }

  __device__ __forceinline__ void load(const T* row, Item (&items)[kItems],
                                       T outside = T(0.0f)) const {
    const T* own = row + column_;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      fill(items[k], outside);
      if (has_any(k)) items[k] = load_vector<kLanes>(own + k * step_);
    }
    fill(items[kVectors], outside);
    if (edge_ >= 0) items[kVectors].lane[0] = row[edge_];
  }

  /// `parameters` begin at a 16-byte boundary.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(int k, const W* parameters,
                                                  C (&values)[kLanes]) const {
    if (k < kVectors) {
      Vec<W, kLanes> own{};
      if (has_any(k)) own = load_between<kLanes>(parameters + column(k), head_);
      widen(own, values);
    } else {
      values[0] = edge_ >= 0 ? convert<C>(__ldg(parameters + edge_)) : C(0);
    }
  }

  template <class C>
  __device__ __forceinline__ void save(bool wanted, T* row, int k,
                                       const C (&values)[kLanes]) const {
    if (k < kVectors) {
      store_if(wanted && has_any(k), row + column_ + k * step_, values);
    } else if (wanted && edge_ >= 0) {
      row[edge_] = convert<T>(values[0]);
    }
  }

 private:
  int head_;    // elements before the first vector
  int column_;  // of the first lane of item 0
  int step_;
  int end_;    // the column behind the last vector
  int edges_;  // elements before and behind the vectors
  int edge_;   // the column of the thread's one, or -1
};

/// How a row is shared out where its team holds all of it: kFewItems or kManyItems vectors a
/// thread. A row that is longer is read again by each step.
inline constexpr int kManyItems = 8;
struct RowPlan {
  TeamShape team;
  int items;  // 0: the row is too long
};

/// `streams`: how many rows a thread holds at a time. cluster_threads: of the blocks of a cluster,
/// where so few are enough. Small blocks wait less for a place beside each other, large ones tell
/// fewer others what they know.
inline RowPlan make_row_plan(int64_t vectors, int64_t fewest_threads, int streams,
                             int cluster_threads) {
  // Of a block of several rows.
  constexpr int kSmallBlock = 128;
  const int most_blocks = current_device().runs_90_code ? kMostClusterBlocks : 1;
  const auto plan = [&](int items, int block, int blocks) {
    const int64_t threads = std::max(ceil_div(vectors, items), fewest_threads);
    RowPlan found{team_of(threads, block, threads <= kWarpLanes ? kSmallBlock : 0, blocks), items};
    if (found.team.size() < threads) found.items = 0;
    return found;
  };
  const auto in_cluster = [&](int items) {
    const RowPlan found = plan(items, cluster_threads, most_blocks);
    return found.items == 0 ? plan(items, kRowThreads, most_blocks) : found;
  };
  // What is on the way hides the time that it takes to meet: of one row, as much as the registers
  // hold. Two rows are as much already.
  RowPlan found = streams == 1 ? plan(kFewItems, kRowThreads, 1) : in_cluster(kFewItems);
  if (found.items == 0 && streams == 1) found = plan(kManyItems, kRowThreads, 1);
  return found.items == 0 ? in_cluster(kManyItems) : found;
}

/// Blocks of a multiprocessor: with 64 registers a thread, or with 128 where it holds more than
/// fits.
template <class Tile, int kStreams = 1>
inline constexpr int kRowBlocks = Tile::kVectors * kStreams <= kManyItems ? 2 : 1;

/// Calls held(TypeTag<Tile>, team) of the place that fits, or streamed(TypeTag<Access>, team) of
/// what reads rows that no team holds.
template <class T, class InRegisters, class Streamed>
Status with_tile(Alignment alignment, int64_t columns, int streams, int cluster_threads,
                 const InRegisters& in_registers, const Streamed& streamed) {
  constexpr int kLanes = kVectorLanes<T>;
  using Whole = RowVectors<T, kLanes, true>;
  using Apart = RowVectors<T, 1, true>;
  const auto with_items = [&](int64_t vectors, int64_t fewest_threads, auto launch_few_rows,
                              auto many, auto access) {
    const RowPlan plan = make_row_plan(vectors, fewest_threads, streams, cluster_threads);
    if (plan.items == kFewItems) return in_registers(launch_few_rows, plan.team);
    if (plan.items == kManyItems) return in_registers(many, plan.team);
    return streamed(access, plan.team);
  };
  if (alignment == Alignment::vector) {
    return with_items(ceil_div(columns, kLanes), 1, TypeTag<RowTile<Whole, kFewItems>>{},
                      TypeTag<RowTile<Whole, kManyItems>>{}, TypeTag<Whole>{});
  }
  if constexpr (sizeof(T) < 8) {
    if (alignment == Alignment::shared_offset) {
      using Few = UnalignedRowTile<T, kFewItems>;
      return with_items(Few::vectors_of(columns), Few::kFewestThreads, TypeTag<Few>{},
                        TypeTag<UnalignedRowTile<T, kManyItems>>{}, TypeTag<Apart>{});
    }
  }
  return with_items(columns, 1, TypeTag<RowTile<Apart, kFewItems>>{},
                    TypeTag<RowTile<Apart, kManyItems>>{}, TypeTag<Apart>{});
}

}  // namespace torchkiln::rowwise
