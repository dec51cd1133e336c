#pragma once

// The vectors of one row. A row is cut at the 16-byte boundaries of memory, wherever it begins, so
// the first and the last vector may be partial:
//
//   memory   |   16 B    |   16 B    |   16 B    |   16 B    |
//   row               x x x x x x x x x x x x x x x x x x
//   vector   |     0     |     1     |     2     |     3     |
//             partial                               partial
//
// Thread r of a team of n threads has the vectors r, r + n, r + 2 n, ...

#include <algorithm>
#include <type_traits>
#include <utility>

#include "detail/rowwise/team.cuh"
#include "torchkiln/device/alignment.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// The vectors of a row. kAligned: all vectors are whole. kLanes = 1: single elements, for rows
/// whose offset differs between tensors.
template <class T_, int kLanes_, bool kAligned_>
struct RowVectors {
  using T = T_;
  static constexpr int kLanes = kLanes_;
  static constexpr bool kAligned = kAligned_;
  using Item = Vec<T, kLanes>;

  int columns;
  int skipped;  // lanes of the first vector before the row

  __device__ __forceinline__ RowVectors(const void* row, int columns_)
      : columns(columns_), skipped(0) {
    if constexpr (!kAligned && kLanes > 1)
      skipped = elements_past_boundary(static_cast<const T*>(row));
  }

  __device__ __forceinline__ int vectors() const {
    return (columns + skipped + kLanes - 1) / kLanes;
  }
  /// The column of the vector's first lane; negative if that lies before the row.
  __device__ __forceinline__ int column(int vector) const { return vector * kLanes - skipped; }

  /// Whether a lane of the vector that begins at `column` belongs to the row.
  __device__ __forceinline__ bool has(int column, int lane) const {
    return kAligned || static_cast<unsigned>(column + lane) < static_cast<unsigned>(columns);
  }
  __device__ __forceinline__ bool has_all(int column) const {
    return kAligned || (column >= 0 && column + kLanes <= columns);
  }

  /// The number of rows, at either end of a tensor, whose vectors may reach beyond the tensor. Rows
  /// are `stride` elements apart.
  static __device__ __forceinline__ int64_t edge_rows(int64_t stride) {
    return stride >= kLanes ? 1 : stride > 0 ? kLanes : int64_t{1} << 62;
  }
  /// Whether whole vectors may be read at both ends of this row, because their lanes outside the
  /// row are inside the tensor.
  static __device__ __forceinline__ bool can_overread(int64_t row, int64_t rows, int64_t stride) {
    const int64_t edge = edge_rows(stride);
    return row >= edge && row + edge < rows;
  }

  /// Loads the vector at `column`; lanes outside the row are set to `outside`.
  __device__ __forceinline__ Item load(const T* row, int column, T outside = T(0.0f)) const {
    if (has_all(column)) return load_vector<kLanes>(row + column);
    return load_partial(row, column, outside);
  }

  /// Loads kItems vectors from `column` on, `step` apart; issues all loads before using any. Lanes
  /// outside the row are set to `outside`. Partial vectors are read whole if `can_overread`, else
  /// lane by lane.
  template <int kItems>
  __device__ __forceinline__ void load(const T* row, int column, int step, Item (&items)[kItems],
                                       T outside, bool can_overread) const {
    const T* own = row + column;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      fill(items[k], outside);
      const int at = column + k * step;
      if (at < columns && (can_overread || has_all(at)))
        items[k] = load_vector<kLanes>(own + k * step);
    }
    if constexpr (!kAligned) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int at = column + k * step;
        if (at >= columns || has_all(at)) continue;
        if (!can_overread) items[k] = load_partial(row, at, outside);
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
      // A predicated store and a return. With an if/else around it and the loop below, nvcc would
      // split both into scalar stores.
      const bool all = has_all(column);
      store_if(all, row + column, values);
      if (all) return;
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (has(column, i)) row[column + i] = convert<T>(values[i]);
    }
  }

  __device__ __forceinline__ Item load_partial(const T* row, int column, T outside) const {
    Item item;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) item.lane[i] = has(column, i) ? row[column + i] : outside;
    return item;
  }

  /// Loads the parameters of the columns of a vector. Uses vector loads only if the rows are
  /// aligned, because otherwise a vector may begin at any element of the parameter array.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(int column, const W* parameters,
                                                  C (&values)[kLanes]) const {
    if constexpr (kAligned && kLanes > 1) {
      constexpr int kEach = kLanes < kVectorLanes<W> ? kLanes : kVectorLanes<W>;
#pragma unroll
      for (int part = 0; part < kLanes; part += kEach) {
        const auto item = load_constant<kEach>(parameters + column + part);
        C widened[kEach];
        widen(item, widened);
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[part + i] = widened[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        values[i] = has(column, i) ? convert<C>(__ldg(parameters + column + i)) : C(0);
    }
  }
};

/// Calls body(TypeTag<RowVectors<T, ...>>{}) with the access for `alignment`.
template <class T, class Body>
Status with_vectors(Alignment alignment, const Body& body) {
  constexpr int kLanes = kVectorLanes<T>;
  if (alignment == Alignment::vector) return body(TypeTag<RowVectors<T, kLanes, true>>{});
  if constexpr (sizeof(T) < 8) {
    if (alignment == Alignment::shared_offset) return body(TypeTag<RowVectors<T, kLanes, false>>{});
  }
  return body(TypeTag<RowVectors<T, 1, true>>{});
}

/// Sets the grid for `rows` rows.
inline Status make_grid(const TeamShape& team, int64_t rows, Grid& grid) {
  const int64_t blocks = ceil_div(rows, team.per_block) << team.log_blocks;
  if (blocks > kMaxGridX) return {"too many rows for one launch"};
  grid = {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(team.block_threads())),
          team.blocks()};
  return {};
}

}  // namespace torchkiln::rowwise
