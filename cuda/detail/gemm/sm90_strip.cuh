#pragma once

// The sums of a tile in shared memory, in strips of 16 rows. Each finisher warp processes one strip
// at a time.

#include "detail/gemm/sm90_tile.cuh"

namespace torchkiln::gemm::sm90 {

/// A strip: 16 rows of a slice, which one finisher warp processes. A lane has 16 bytes of every
/// fourth row.
template <class T>
struct Strip {
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kChunks = kSliceColumns / kLanes;  // per row
  static constexpr int kRowStep = kWarpLanes / kChunks;
  static constexpr int kItems = kStripRows / kRowStep;

  T* data;        // the first row in shared memory; the other rows follow
  int first_row;  // position of the first element in the result
  int first_column;
  int batch;
  int lane;

  __device__ __forceinline__ int row(int i) const { return i * kRowStep + lane / kChunks; }
  __device__ __forceinline__ int column() const { return lane % kChunks * kLanes; }
  __device__ __forceinline__ T* item(int i) const {
    // The swizzle has a period of eight rows. kStripRows is a multiple of it, so row(i) can stand
    // for the row within the slice.
    return reinterpret_cast<T*>(reinterpret_cast<char*>(data) + swizzled(row(i), lane % kChunks));
  }
  /// Starts to copy the strip to a result.
  __device__ __forceinline__ void store_box_to(const CUtensorMap& map) const {
    if (lane == 0) store_box(map, first_column, first_row, batch, data);
  }
};

inline constexpr int kStripsOfSlice = wgmma::kRows / kStripRows;
inline constexpr int kStripsOfMultiplier = kSlices * kStripsOfSlice;

/// Strip i of a multiplier's sums: first the strips of slice 0, then of slice 1, ...
template <class T>
__device__ __forceinline__ Strip<T> strip_at(Shared<T>& shared, const Tile& tile, int multiplier,
                                             int i, int lane) {
  const int slice = i / kStripsOfSlice;
  const int row = i % kStripsOfSlice * kStripRows;
  return {shared.sums[multiplier][slice] + row * kSliceColumns,
          tile.row + multiplier * wgmma::kRows + row, tile.column_at(slice * kSliceColumns),
          tile.batch, lane};
}

/// Prefetches the residual of a tile into L2, so that it is there when the sums are. `thread`: the
/// index of the calling thread among the threads of all finishers.
template <class T>
__device__ __forceinline__ void prefetch_tile(const T* matrix, int rows, int columns,
                                              int64_t row_stride, const Tile& tile, int thread) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  constexpr int kLinesOfRow = kTileColumns / kLine;
  for (int line = thread; line < kTileRows * kLinesOfRow; line += kFinishers * kWarpLanes) {
    const int row = tile.row + line / kLinesOfRow;
    const int column = tile.column + line % kLinesOfRow * kLine;
    if (row < rows && column < columns) device::prefetch_to_l2(matrix + row * row_stride + column);
  }
}

}  // namespace torchkiln::gemm::sm90
