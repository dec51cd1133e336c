#pragma once

// A patch: 4 or 8 rows of 128 columns, held by 16 lanes of a warp. A lane has 8 adjacent elements
// of each row, so that a row is loaded in one 256-byte access (half precision) and stored in one of
// 128 bytes. The scales of a patch are adjacent.

#include "detail/fp8/block.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/kernels/quantize.h"

namespace torchkiln::fp8 {

inline constexpr int kThreads = 256;
inline constexpr int kSide = 8;                         // columns of a lane
inline constexpr int kLanes = kScaledElements / kSide;  // lanes of a patch
inline constexpr int kPatches = kThreads / kLanes;      // patches of a block

/// Reads the elements of a matrix in memory, of type Source_; E4M3 has scales.
template <class Source_>
struct FromMemory {
  using Source = Source_;
  static constexpr bool kScaled = std::is_same_v<Source, Fp8>;
  using T = std::conditional_t<kScaled, __half, Source>;
  using Loaded = Vec<T, kSide>;
  static constexpr int kRowsAtOnce = kSide;  // whose loads are issued before the first use

  /// The vector at a row and column; elements that are not `inside` the matrix are 0.
  template <bool aligned>
  __device__ __forceinline__ Loaded load(const Quantize& p, int64_t row, int64_t column,
                                         bool inside) const {
    const Source* const from = static_cast<const Source*>(p.x) + row * p.stride + column;
    Vec<Source, kSide> found{};
    if constexpr (aligned) {
      if (inside) found = device::load_vector<kSide>(from);
    } else {
#pragma unroll
      for (int c = 0; c < kSide; ++c)
        if (inside && column + c < p.columns) found.lane[c] = from[c];
    }
    if constexpr (kScaled) {
      return to_half(found);
    } else {
      return found;
    }
  }
  __device__ __forceinline__ const Loaded& finish(const Loaded& loaded, int64_t) const {
    return loaded;
  }
  /// The number of the tile along a row that is computed at this place of the order.
  __device__ __forceinline__ int64_t tile_at(int64_t place, int64_t) const { return place; }
};

/// The elements of a lane, from a reader such as FromMemory.
template <class Reader, int kRows>
struct Patch {
  static constexpr bool kScaled = Reader::kScaled;
  using T = typename Reader::T;

  Vec<T, kSide> row[kRows];
  float factor[kScaled ? kRows : 1];

  __device__ __forceinline__ float at(int r, int c) const {
    const float value = widen(row[r].lane[c]);
    if constexpr (kScaled) return value * factor[r];
    return value;
  }

  /// Makes the compiler convert halfs again: it would keep all elements as float32, and spill them.
  __device__ __forceinline__ void drop_converted() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kSide / 2; ++i)
          asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&row[r])[i]));
      }
    }
  }

  /// Loads the elements that begin at (first_row, column); those beyond the matrix are 0.
  template <bool aligned>
  __device__ __forceinline__ void load(const Reader& reader, const Quantize& p, int64_t first_row,
                                       int64_t column) {
    constexpr int kStep = Reader::kRowsAtOnce < kRows ? Reader::kRowsAtOnce : kRows;
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      typename Reader::Loaded loaded[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int64_t at_row = first_row + first + i;
        const bool inside = at_row < p.rows && column < p.columns;
        loaded[i] = reader.template load<aligned>(p, at_row, column, inside);
        if constexpr (kScaled)
          factor[first + i] = inside ? p.x_scale[column / kScaledElements * p.rows + at_row] : 1.0f;
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) row[first + i] = reader.finish(loaded[i], column);
    }
  }

  /// The magnitude of this lane's part of each row, and of each column if they are wanted.
  template <bool has_columns>
  __device__ __forceinline__ void magnitudes(bool only_finite, float (&rows)[kRows],
                                             float (&columns)[kSide]) const {
#pragma unroll
    for (int c = 0; c < kSide; ++c) columns[c] = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = 0;
#pragma unroll
      for (int c = 0; c < kSide; ++c) {
        const float value = only_finite ? finite_magnitude(at(r, c)) : at(r, c);
        rows[r] = larger(rows[r], value);
        if (has_columns) columns[c] = larger(columns[c], value);
      }
    }
  }
};

/// Stores the rows of a patch and, unless the matrix has square blocks, their scales.
template <bool aligned, class Reader, int kRows>
__device__ __forceinline__ void store_rows(const Quantize& p, const Patch<Reader, kRows>& patch,
                                           const float (&magnitude)[kRows], bool infinite,
                                           int64_t first_row, int64_t column) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float scale = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t exponent = fp8_scale_exponent(__float_as_uint(magnitude[r]));
    if (lane == r) scale = scale_of(exponent);
    const Vec<uint32_t, 2> bytes =
        pack_all<kSide>(reciprocal_of(exponent), infinite, [&](int c) { return patch.at(r, c); });
    if (first_row + r >= p.rows || column >= p.columns) continue;
    uint8_t* const to = p.data + (first_row + r) * p.columns + column;
    if constexpr (aligned) {
      *reinterpret_cast<Vec<uint32_t, 2>*>(to) = bytes;
    } else {
#pragma unroll
      for (int c = 0; c < kSide; ++c)
        if (column + c < p.columns) to[c] = static_cast<uint8_t>(bytes.lane[c / 4] >> c % 4 * 8);
    }
  }
  if (p.square || lane >= kRows || first_row + lane >= p.rows) return;
  const int64_t block = column / kScaledElements;
  if (block < p.column_blocks()) p.scale[block * p.rows + first_row + lane] = scale;
}

}  // namespace torchkiln::fp8
