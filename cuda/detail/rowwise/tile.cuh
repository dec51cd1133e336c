#pragma once

// The elements of a row that a thread holds in registers, and the number of threads that a team
// needs for the whole row.

#include "detail/rowwise/vectors.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// kItems vectors of a row per thread. Vectors of unaligned rows may be partial; only RowPipeline
/// reads and writes partial vectors.
///
/// The items of a thread are as many vectors apart as the team has threads or, if kGroup is not 0,
/// kGroup vectors. With kGroup a group of threads has adjacent vectors of the row, and one register
/// suffices for the addresses of all items, because the distances are constants in the
/// instructions. kWhole: a thread has all of its items or none, so that one predicate suffices for
/// all, too.
template <class Access_, int kItems_, int kGroup_ = 0, bool kWhole_ = false>
class RowTile {
 public:
  using Access = Access_;
  using T = typename Access::T;
  using Item = typename Access::Item;
  static constexpr int kItems = kItems_;
  static constexpr int kVectors = kItems;
  static constexpr int kLanes = Access::kLanes;
  static constexpr int kGroup = kGroup_;
  static constexpr bool kWhole = kWhole_;

  __device__ __forceinline__ RowTile(const void* row, int columns, int rank, int size)
      : RowTile(Access(row, columns), rank, size) {}
  __device__ __forceinline__ RowTile(const Access& access, int rank, int size)
      : access_(access), column_(access.column(first_vector(rank))), step_(size * kLanes) {}

  __device__ __forceinline__ const Access& access() const { return access_; }
  /// Lanes of item k that can belong to a row.
  static __device__ constexpr int lanes(int) { return kLanes; }
  /// The column of the first lane of item k.
  __device__ __forceinline__ int column(int k) const { return column_ + k * step(); }
  /// Whether any lane, or the given lane, of item k belongs to the row.
  __device__ __forceinline__ bool has_any(int k) const {
    return column(kWhole ? 0 : k) < access_.columns;
  }
  __device__ __forceinline__ bool has(int k, int) const {
    static_assert(Access::kAligned, "lanes of other rows are tested one by one");
    return has_any(k);
  }

  /// The number of elements of the row in a group of `lanes` adjacent threads, of which this thread
  /// has index `lane`.
  __device__ __forceinline__ int count_of_lanes(int lane, int lanes) const {
    if constexpr (kGroup > 0) {  // `lanes` is a multiple of kGroup
      const int first = column_ - first_vector(lane) * kLanes;
      return max(min(access_.columns - first, lanes * kItems * kLanes), 0);
    } else {
      int count = 0;
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int first = column(k) - lane * kLanes;
        count += max(min(first + lanes * kLanes, access_.columns) - max(first, 0), 0);
      }
      return count;
    }
  }

  /// Loads the items of a row. Lanes outside the row are set to `outside`.
  __device__ __forceinline__ void load(const T* row, Item (&items)[kItems],
                                       T outside = T(0.0f)) const {
    static_assert(Access::kAligned, "vectors that belong to a row in part");
    if constexpr (kGroup > 0) {
      const T* const own = row + column_;
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        fill(items[k], outside);
        if (has_any(k)) items[k] = load_vector<kLanes>(own + k * step());
      }
    } else {
      access_.load(row, column_, step_, items, outside, true);
    }
  }

  /// Prefetches into L2 the items that load() will read.
  __device__ __forceinline__ void prefetch(const T* row) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (has_any(k) && column(k) >= 0) prefetch_to_l2(row + column(k));
    }
  }

  /// Loads the parameters of item k. To avoid a branch, a thread without item k loads the
  /// parameters of another item, and ignores them.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(int k, const W* parameters,
                                                  C (&values)[kLanes]) const {
    if constexpr (kWhole) {
      access_.load_parameters(has_any(k) ? column_ : 0, parameters + k * step(), values);
    } else {
      access_.load_parameters(has_any(k) ? column(k) : 0, parameters, values);
    }
  }

  /// Stores item k of a row of results if `enabled`.
  template <class C>
  __device__ __forceinline__ void save(bool enabled, T* row, int k,
                                       const C (&values)[kLanes]) const {
    static_assert(Access::kAligned, "vectors that belong to a row in part");
    if constexpr (kLanes > 1) {
      T* own = row + column_;
      store_if(enabled && has_any(k), own + k * step(), values);
    } else if (enabled && has_any(k)) {
      access_.save(row, column(k), values);
    }
  }

 private:
  static __device__ __forceinline__ int first_vector(int rank) {
    if constexpr (kGroup == 0) {
      return rank;
    } else {
      return rank / kGroup * (kGroup * kItems) + rank % kGroup;
    }
  }
  __device__ __forceinline__ int step() const { return kGroup > 0 ? kGroup * kLanes : step_; }

  Access access_;
  int column_;
  int step_;
};

/// A tile of a row that has any offset from a 16-byte boundary, the same in every tensor: kVectors
/// vectors per thread, and one single element per thread at the edges of the row.
///
///   memory   |  16 B   |  16 B   |  16 B   |  16 B   |  16 B   |  16 B   |
///   row          h h h v v v v v v v v v v v v v v v t t t t t t t
///
/// The head h and the tail t have fewer elements than two vectors. Partial vectors instead would
/// cost every thread the registers and the code of two more items.
template <class T_, int kVectors_>
class UnalignedRowTile {
 public:
  using T = T_;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kVectors = kVectors_;
  static constexpr int kItems = kVectors + 1;
  using Item = Vec<T, kLanes>;

  static __host__ __device__ constexpr int64_t inner_vectors(int64_t columns) {
    return rowwise::inner_vectors(columns, kLanes);
  }

  __device__ __forceinline__ UnalignedRowTile(const void* row, int columns, int rank, int size)
      : step_(size * kLanes) {
    head_ = (kLanes - elements_past_boundary(static_cast<const T*>(row))) % kLanes;
    const int inner = static_cast<int>(inner_vectors(columns)) * kLanes;
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

  /// `parameters` must begin at a 16-byte boundary.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(int k, const W* parameters,
                                                  C (&values)[kLanes]) const {
    if (k < kVectors) {
      Vec<W, kLanes> own{};
      if (has_any(k)) own = load_unaligned<kLanes>(parameters + column(k), head_);
      widen(own, values);
    } else {
      values[0] = edge_ >= 0 ? convert<C>(__ldg(parameters + edge_)) : C(0);
    }
  }

  template <class C>
  __device__ __forceinline__ void save(bool enabled, T* row, int k,
                                       const C (&values)[kLanes]) const {
    if (k < kVectors) {
      store_if(enabled && has_any(k), row + column_ + k * step_, values);
    } else if (enabled && edge_ >= 0) {
      row[edge_] = convert<T>(values[0]);
    }
  }

 private:
  int head_;    // elements before the first vector
  int column_;  // the column of the first lane of item 0
  int step_;
  int end_;    // the column after the last vector
  int edges_;  // elements of head and tail
  int edge_;   // the column of the thread's edge element, or -1
};

/// Blocks per SM: two with 64 registers per thread, or one with 128 if a thread holds more than
/// kManyItems vectors.
template <class Tile, int kStreams = 1>
inline constexpr int kRowBlocks = Tile::kVectors * kStreams <= kManyItems ? 2 : 1;

/// Calls in_registers(TypeTag<Tile>{}, team) with the tile that belongs to a plan of plan_rows().
template <class T, class InRegisters>
Status with_tile(Alignment alignment, const RowPlan& plan, const InRegisters& in_registers) {
  const auto with_items = [&](auto few, auto many) {
    return plan.items == kFewItems ? in_registers(few, plan.team) : in_registers(many, plan.team);
  };
  const auto with_vectors = [&](auto tag) {
    using Vectors = typename decltype(tag)::type;
    return with_items(TypeTag<RowTile<Vectors, kFewItems>>{},
                      TypeTag<RowTile<Vectors, kManyItems>>{});
  };
  if (alignment == Alignment::vector)
    return with_vectors(TypeTag<RowVectors<T, kVectorLanes<T>, true>>{});
  if constexpr (sizeof(T) < 8) {
    if (alignment == Alignment::shared_offset) {
      return with_items(TypeTag<UnalignedRowTile<T, kFewItems>>{},
                        TypeTag<UnalignedRowTile<T, kManyItems>>{});
    }
  }
  return with_vectors(TypeTag<RowVectors<T, 1, true>>{});
}

}  // namespace torchkiln::rowwise
