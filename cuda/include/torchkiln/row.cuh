#pragma once

// What one thread of a team reads and writes of a row. A row is cut into vectors at the 16-byte
// boundaries of memory, wherever it begins: the first and the last may belong to it in part. The
// threads of the team take vectors in turns.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "torchkiln/team.cuh"
#include "torchkiln/vec.cuh"

namespace torchkiln {

/// The vectors of a row. kWhole: every one of them belongs to the row as a whole. kLanes = 1 takes
/// rows that lie differently in each of several tensors.
template <class T_, int kLanes_, bool kWhole_>
struct RowAccess {
  using T = T_;
  static constexpr int kLanes = kLanes_;
  static constexpr bool kWhole = kWhole_;
  using Item = Vec<T, kLanes>;

  int columns;
  int skipped;  // lanes of the first vector that lie before the row

  __device__ __forceinline__ RowAccess(const void* row, int columns_)
      : columns(columns_), skipped(0) {
    if constexpr (!kWhole && kLanes > 1)
      skipped = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes);
  }

  __device__ __forceinline__ int vectors() const {
    return (columns + skipped + kLanes - 1) / kLanes;
  }
  /// Of the vector's first lane; negative where that lies before the row.
  __device__ __forceinline__ int column(int vector) const { return vector * kLanes - skipped; }

  /// Whether a lane of the vector that begins at `column` belongs to the row.
  __device__ __forceinline__ bool has(int column, int lane) const {
    return kWhole || static_cast<unsigned>(column + lane) < static_cast<unsigned>(columns);
  }
  __device__ __forceinline__ bool has_all(int column) const {
    return kWhole || (column >= 0 && column + kLanes <= columns);
  }

  /// The vector at `column` of a row of this kind; lanes outside of the row are `outside`.
  __device__ __forceinline__ Item load(const T* row, int column, T outside = T(0.0f)) const {
    if (has_all(column)) return load_vector<kLanes>(row + column);
    return load_part(row, column, outside);
  }

  /// Those at column, column + step ...; `outside` where they do not belong to the row. The whole
  /// ones are on the way before any is looked at: behind a branch that a vector may come from in
  /// parts, too, the compiler waits for it.
  template <int kItems>
  __device__ __forceinline__ void load(const T* row, int column, int step, Item (&items)[kItems],
                                       T outside) const {
    const T* own = row + column;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      fill(items[k], outside);
      const int at = column + k * step;
      if (at < columns && has_all(at)) items[k] = load_vector<kLanes>(own + k * step);
    }
    if constexpr (!kWhole) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int at = column + k * step;
        if (at < columns && !has_all(at)) items[k] = load_part(row, at, outside);
      }
    }
  }

  template <class C>
  __device__ __forceinline__ void save(T* row, int column, const C (&values)[kLanes]) const {
    if constexpr (kWhole || kLanes == 1) {
      store(row + column, values);
    } else {
      // Not in a branch beside one that stores the same in parts: the compiler makes both alike.
      const bool all = has_all(column);
      store_if(all, row + column, values);
      if (all) return;
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (has(column, i)) row[column + i] = convert<T>(values[i]);
    }
  }

  __device__ __forceinline__ Item load_part(const T* row, int column, T outside) const {
    Item item;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) item.lane[i] = has(column, i) ? row[column + i] : outside;
    return item;
  }

  /// Parameters of the columns, of which the vector that holds some begins at any place in memory
  /// unless rows are whole.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(const W* parameters, int column,
                                                  C (&values)[kLanes]) const {
    if constexpr (kWhole && kLanes > 1) {
      constexpr int kEach = kLanes < kVectorLanes<W> ? kLanes : kVectorLanes<W>;
#pragma unroll
      for (int part = 0; part < kLanes; part += kEach) {
        const auto item = load_constant<kEach>(parameters + column + part);
        C some[kEach];
        widen(item, some);
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[part + i] = some[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        values[i] = has(column, i) ? convert<C>(__ldg(parameters + column + i)) : C(0);
    }
  }
};

/// Which kItems vectors of every row are a thread's.
template <class Access_, int kItems_>
class RowPlace {
 public:
  using Access = Access_;
  using T = typename Access::T;
  using Item = typename Access::Item;
  static constexpr int kItems = kItems_;
  static constexpr int kLanes = Access::kLanes;

  __device__ __forceinline__ RowPlace(const Access& access, int rank, int size)
      : access_(access), column_(access.column(rank)), step_(size * kLanes) {}

  __device__ __forceinline__ const Access& access() const { return access_; }
  /// The column of the first lane of item k.
  __device__ __forceinline__ int column(int k) const { return column_ + k * step_; }
  /// Whether any, or a certain, lane of item k belongs to the row.
  __device__ __forceinline__ bool has_any(int k) const { return column(k) < access_.columns; }
  __device__ __forceinline__ bool has(int k, int lane) const {
    return Access::kWhole ? has_any(k) : access_.has(column(k), lane);
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
    access_.load(row, column_, step_, items, outside);
  }

  /// Has what load() will read brought to the L2 cache.
  __device__ __forceinline__ void prefetch(const T* row) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (has_any(k) && column(k) >= 0)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + column(k)));
    }
  }

  /// Stores item k of a row of results where it is `wanted`.
  template <class C>
  __device__ __forceinline__ void save(bool wanted, T* row, int k,
                                       const C (&values)[kLanes]) const {
    if constexpr (Access::kWhole && kLanes > 1) {
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

/// Passes over a row that is read again by each, kItems of a thread's vectors at a time.
template <int kItems, class Load>
class RowPasses {
 public:
  using Item = decltype(std::declval<Load>()(0));

  __device__ __forceinline__ RowPasses(const Load& load, int rank, int size, int vectors)
      : load_(load), rank_(rank), size_(size), vectors_(vectors) {}

  /// Calls body(item, vector) for each of the thread's items.
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
    for (int first = rank_; first < vectors_; first += kItems * size_) {
      Item items[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (first + k * size_ < vectors_) items[k] = load_(first + k * size_);
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (first + k * size_ < vectors_) body(items[k], first + k * size_);
    }
  }

 private:
  Load load_;
  int rank_;
  int size_;
  int vectors_;
};

/// Rows of one tensor.
struct RowsOf {
  const void* data;  // null: there is no such tensor
  int64_t stride;
};

/// How rows lie in memory. whole: from one 16-byte boundary to another; alike: a row begins equally
/// far past a boundary in each tensor; apart: it does not.
enum class RowKind { whole, alike, apart };

template <int N>
RowKind kind_of(const RowsOf (&tensors)[N], Dtype dtype, int64_t rows, int64_t columns) {
  const auto size = static_cast<uint64_t>(size_of(dtype));
  bool whole = static_cast<uint64_t>(columns) * size % kVectorBytes == 0;
  const RowsOf* first = nullptr;
  for (const RowsOf& tensor : tensors) {
    if (tensor.data == nullptr) continue;
    const auto past = [size](const RowsOf& of) {
      return std::pair(reinterpret_cast<uintptr_t>(of.data) % kVectorBytes,
                       static_cast<uint64_t>(of.stride) * size % kVectorBytes);
    };
    auto [begin, step] = past(tensor);
    if (rows == 1) step = 0;
    if (begin != 0 || step != 0) whole = false;
    if (first == nullptr) first = &tensor;
    auto [first_begin, first_step] = past(*first);
    if (begin != first_begin || (rows > 1 && step != first_step)) return RowKind::apart;
  }
  return whole ? RowKind::whole : RowKind::alike;
}

// Of a block that works on one row: two of them, with 64 registers a thread, share a
// multiprocessor.
inline constexpr int kRowThreads = 512;

/// How a row is shared out where its team holds all of it: kFewItems or kManyItems vectors a
/// thread. A row that is longer is read again by each step.
inline constexpr int kFewItems = 4;
inline constexpr int kManyItems = 8;
struct RowPlan {
  TeamShape team;
  int items;  // 0: the row is too long
};

/// `streams`: how many rows a thread holds at a time.
inline RowPlan make_row_plan(int64_t vectors, int streams) {
  // Of a block of several rows.
  constexpr int kSmallBlock = 128;
  const int most_blocks = current_device().runs_90_code ? kMostClusterBlocks : 1;
  const auto plan = [&](int items, int block, int blocks) {
    const int64_t threads = ceil_div(vectors, items);
    RowPlan found{team_of(threads, block, threads <= kWarpLanes ? kSmallBlock : 0, blocks), items};
    if (found.team.size() < threads) found.items = 0;
    return found;
  };
  // What is on the way hides the time that it takes to meet: of one row, as much as the registers
  // hold. Two rows are as much already, and small blocks of a cluster wait less for each other.
  RowPlan found = streams == 1 ? plan(kFewItems, kRowThreads, 1)
                               : plan(kFewItems, kRowThreads / 2, most_blocks);
  if (found.items == 0 && streams > 1) found = plan(kFewItems, kRowThreads, most_blocks);
  return found.items == 0 ? plan(kManyItems, kRowThreads, most_blocks) : found;
}

/// Calls body(std::integral_constant<int, items>) of the plan.
template <class Body>
Status with_items(const RowPlan& plan, const Body& body) {
  if (plan.items == kFewItems) return body(std::integral_constant<int, kFewItems>{});
  if (plan.items == kManyItems) return body(std::integral_constant<int, kManyItems>{});
  return body(std::integral_constant<int, 0>{});
}

/// Blocks of a multiprocessor: with 64 registers a thread, or with 128 where it holds more than
/// fits.
template <class Place, int kStreams = 1>
inline constexpr int kRowBlocks = Place::kItems * kStreams <= kManyItems ? 2 : 1;

/// Calls body(TypeTag<RowAccess<T, ...>>) of the access that fits.
template <class T, class Body>
Status with_access(RowKind kind, const Body& body) {
  constexpr int kLanes = kVectorLanes<T>;
  if (kind == RowKind::whole) return body(TypeTag<RowAccess<T, kLanes, true>>{});
  if (kind == RowKind::alike) return body(TypeTag<RowAccess<T, kLanes, false>>{});
  return body(TypeTag<RowAccess<T, 1, true>>{});
}

/// Of a row: columns, and those just behind the last one, are counted in 32 bits.
inline constexpr int64_t kMostColumns = (int64_t{1} << 31) - (int64_t{1} << 20);
inline constexpr const char* kTooLong = "a row has more than 2^31 - 2^20 elements";

/// The blocks for so many rows.
inline Status make_grid(const TeamShape& team, int64_t rows, Grid& grid) {
  const int64_t blocks = ceil_div(rows, team.per_block) << team.log_blocks;
  if (blocks > kMaxGridX) return {"too many rows for one launch"};
  grid = {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(team.block_threads())),
          team.blocks()};
  return {};
}

}  // namespace torchkiln
