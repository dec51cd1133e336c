#pragma once

// What one thread of a team reads and writes of a row. A row is cut into vectors at the 16-byte
// boundaries of memory, wherever it begins: the first and the last may belong to it in part. The
// threads of the team take vectors in turns.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "detail/rowwise/team.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// The vectors of a row. kAligned: every one of them belongs to the row as a whole. kLanes = 1
/// takes rows that lie differently in each of several tensors.
template <class T_, int kLanes_, bool kWhole_>
struct RowVectors {
  using T = T_;
  static constexpr int kLanes = kLanes_;
  static constexpr bool kAligned = kWhole_;
  using Item = Vec<T, kLanes>;

  int columns;
  int skipped;  // lanes of the first vector that lie before the row

  __device__ __forceinline__ RowVectors(const void* row, int columns_)
      : columns(columns_), skipped(0) {
    if constexpr (!kAligned && kLanes > 1)
      skipped = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes);
  }

  __device__ __forceinline__ int vectors() const {
    return (columns + skipped + kLanes - 1) / kLanes;
  }
  /// Of the vector's first lane; negative where that lies before the row.
  __device__ __forceinline__ int column(int vector) const { return vector * kLanes - skipped; }

  /// Whether a lane of the vector that begins at `column` belongs to the row.
  __device__ __forceinline__ bool has(int column, int lane) const {
    return kAligned || static_cast<unsigned>(column + lane) < static_cast<unsigned>(columns);
  }
  __device__ __forceinline__ bool has_all(int column) const {
    return kAligned || (column >= 0 && column + kLanes <= columns);
  }

  /// How many rows at either end of a tensor, `stride` elements apart, have vectors that may reach
  /// beyond it.
  static __device__ __forceinline__ int64_t rows_at_ends(int64_t stride) {
    return stride >= kLanes ? 1 : stride > 0 ? kLanes : int64_t{1} << 62;
  }
  /// Whether all that lies within the vectors of a row belongs to the tensor.
  static __device__ __forceinline__ bool has_neighbours(int64_t row, int64_t rows, int64_t stride) {
    const int64_t at_ends = rows_at_ends(stride);
    return row >= at_ends && row + at_ends < rows;
  }

  /// The vector at `column` of a row of this alignment; lanes outside of the row are `outside`.
  __device__ __forceinline__ Item load(const T* row, int column, T outside = T(0.0f)) const {
    if (has_all(column)) return load_vector<kLanes>(row + column);
    return load_part(row, column, outside);
  }

  /// Those at column, column + step ...; `outside` where they do not belong to the row. All are on
  /// the way before any is looked at. What lies beside the row is read and dropped where it is a
  /// neighbour's: of the rows at the ends of a tensor, lanes are read one by one.
  template <int kItems>
  __device__ __forceinline__ void load(const T* row, int column, int step, Item (&items)[kItems],
                                       T outside, bool has_neighbours) const {
    const T* own = row + column;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      fill(items[k], outside);
      const int at = column + k * step;
      if (at < columns && (has_neighbours || has_all(at)))
        items[k] = load_vector<kLanes>(own + k * step);
    }
    if constexpr (!kAligned) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int at = column + k * step;
        if (at >= columns || has_all(at)) continue;
        if (!has_neighbours) items[k] = load_part(row, at, outside);
#pragma unroll
        for (int i = 0; i < kLanes; ++i)
          if (!has(at, i)) items[k].lane[i] = outside;
      }
    }
  }

  template <class C>
  __device__ __forceinline__ void save(T* row, int column, const C (&values)[kLanes]) const {
    if constexpr (kAligned || kLanes == 1) {
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
  __device__ __forceinline__ void load_parameters(int column, const W* parameters,
                                                  C (&values)[kLanes]) const {
    if constexpr (kAligned && kLanes > 1) {
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
struct TensorRows {
  const void* data;  // null: there is no such tensor
  int64_t stride;
};

/// How rows lie in memory. whole: from one 16-byte boundary to another; alike: a row begins equally
/// far past a boundary in each tensor; apart: it does not.
enum class Alignment { vector, shared_offset, scalar };

/// Of rows that lie alike. Elements of 8 bytes are half a vector: one way less to compile.
inline Alignment alignment_with_offset(Dtype dtype) {
  return size_of(dtype) == 8 ? Alignment::scalar : Alignment::shared_offset;
}

template <int N>
Alignment alignment_of(const TensorRows (&tensors)[N], Dtype dtype, int64_t rows, int64_t columns) {
  const auto size = static_cast<uint64_t>(size_of(dtype));
  bool whole = static_cast<uint64_t>(columns) * size % kVectorBytes == 0;
  const TensorRows* first = nullptr;
  for (const TensorRows& tensor : tensors) {
    if (tensor.data == nullptr) continue;
    const auto past = [size](const TensorRows& of) {
      return std::pair(reinterpret_cast<uintptr_t>(of.data) % kVectorBytes,
                       static_cast<uint64_t>(of.stride) * size % kVectorBytes);
    };
    auto [begin, step] = past(tensor);
    if (rows == 1) step = 0;
    if (begin != 0 || step != 0) whole = false;
    if (first == nullptr) first = &tensor;
    auto [first_begin, first_step] = past(*first);
    if (begin != first_begin || (rows > 1 && step != first_step)) return Alignment::scalar;
  }
  return whole ? Alignment::vector : alignment_with_offset(dtype);
}

// Of a block that works on one row: two of them, with 64 registers a thread, share a
// multiprocessor.
inline constexpr int kRowThreads = 512;
/// Vectors that a thread has on the way where not more of them are held.
inline constexpr int kFewItems = 4;

/// Calls body(TypeTag<RowVectors<T, ...>>) of the access that fits.
template <class T, class Body>
Status with_vectors(Alignment alignment, const Body& body) {
  constexpr int kLanes = kVectorLanes<T>;
  if (alignment == Alignment::vector) return body(TypeTag<RowVectors<T, kLanes, true>>{});
  if constexpr (sizeof(T) < 8) {
    if (alignment == Alignment::shared_offset) return body(TypeTag<RowVectors<T, kLanes, false>>{});
  }
  return body(TypeTag<RowVectors<T, 1, true>>{});
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

}  // namespace torchkiln::rowwise
