#pragma once

// A patch: 4 or 8 rows of 128 columns, held by 16 lanes of a warp. A lane has 8 adjacent elements
// of each row, so that a row is loaded in one 256-byte access (half precision) and stored in one of
// 128 bytes. The scales of a patch are adjacent.

#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/kernels/quantize.h"
#include "vectors.cuh"

namespace torchkiln::fp8 {

inline constexpr int kThreads = 256;                // per block
inline constexpr int kPatches = kThreads / kLanes;  // per block

/// Reads a matrix in memory with elements of type Source_. E4M3 elements have scales.
template <class Source_>
struct FromMemory {
  using Source = Source_;
  static constexpr bool kScaled = std::is_same_v<Source, Fp8>;
  using T = std::conditional_t<kScaled, float, Source>;
  static constexpr int kResults = 1;
  static constexpr int kRowsAtOnce = kSide;  // loads in flight
  static constexpr int kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;
  struct Loaded {
    Vec<Source, kSide> elements;
    float factor;
  };

  /// The vector at row first_row + r and this column; elements that are not `inside` the matrix are
  /// 0.
  template <bool aligned>
  __device__ __forceinline__ Loaded load(const Quantize& p, int64_t first_row, int r,
                                         int64_t column, bool inside) const {
    const auto* const from =
        static_cast<const Source*>(p.x) + first_row * p.stride + column + r * p.stride;
    Loaded found{{}, 1.0f};
    if constexpr (aligned) {
      found.elements = load_if(inside, from).vector();
    } else {
#pragma unroll
      for (int c = 0; c < kSide; ++c)
        if (inside && column + c < p.columns) found.elements.lane[c] = from[c];
    }
    if constexpr (kScaled)
      if (inside) found.factor = p.x_scale[column / kScaledElements * p.rows + first_row + r];
    return found;
  }
  __device__ __forceinline__ void finish(const Loaded& loaded,
                                         Vec<T, kSide> (&results)[kResults]) const {
    if constexpr (kScaled) {
      float values[kSide];
      device::widen(to_half(loaded.elements), values);
#pragma unroll
      for (int c = 0; c < kSide; ++c) results[0].lane[c] = values[c] * loaded.factor;
    } else {
      results[0] = loaded.elements;
    }
  }
};

/// The elements of a patch that one lane holds.
template <class T_, int kRows_>
struct Patch {
  using T = T_;
  static constexpr int kRows = kRows_;

  /// The largest magnitudes of the elements of a lane in each row and in each column.
  struct Magnitudes {
    Vec<T, kRows> row;
    Vec<T, kSide> column;
  };

  Vec<T, kSide> row[kRows];

  /// Returns elements 2 * pair and 2 * pair + 1 of row r.
  __device__ __forceinline__ const Vec<T, 2>& two(int r, int pair) const {
    return reinterpret_cast<const Vec<T, 2>*>(&row[r])[pair];
  }

  /// Loads a patch from (first_row, column) of a reader with one result. Rows from `inside` on are
  /// 0.
  template <bool aligned, class Reader>
  __device__ __forceinline__ void load(const Reader& reader, const Quantize& p, int64_t first_row,
                                       int64_t column, int inside) {
    constexpr int kStep = Reader::kRowsAtOnce < kRows ? Reader::kRowsAtOnce : kRows;
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      typename Reader::Loaded loaded[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i)
        loaded[i] =
            reader.template load<aligned>(p, first_row, first + i, column, first + i < inside);
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        Vec<T, kSide> results[1];
        reader.finish(loaded[i], results);
        row[first + i] = results[0];
      }
    }
  }

  /// Returns the largest magnitudes, without NaN. Replaces infinities by NaN.
  __device__ __forceinline__ Magnitudes measure() {
    Magnitudes found;
    // A second pass runs only if this lane has an infinity.
    while (true) {
      found = magnitudes();
      Vec<T, 2> most = largest_of_both(found.row, found.row);
      if (__float_as_uint(widen(most.lane[0])) != kInfinity) return found;
      drop_infinities();
    }
  }

 private:
  __device__ __forceinline__ Magnitudes magnitudes() const {
    Magnitudes found{};
#pragma unroll
    for (int r = 0; r < kRows; r += 2) {
      const Vec<T, kSide> first = without_signs(row[r]), second = without_signs(row[r + 1]);
      reinterpret_cast<Vec<T, 2>*>(&found.row)[r / 2] =
          device::elementwise_max(Vec<T, 2>{}, largest_of_both(first, second));
      found.column = device::elementwise_max(found.column, device::elementwise_max(first, second));
    }
    return found;
  }

  static __device__ __forceinline__ Vec<T, kSide> without_signs(Vec<T, kSide> vector) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kWords<T, kSide>; ++i) word(vector, i) &= 0x7fff7fff;
    } else {
#pragma unroll
      for (int i = 0; i < kSide; ++i) vector.lane[i] = fabsf(vector.lane[i]);
    }
    return vector;
  }

  __device__ __forceinline__ void drop_infinities() {
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
    constexpr uint32_t kMask = kMagnitude >> (32 - kBits);
    constexpr uint32_t kInfinite = std::is_same_v<T, __half> ? 0x7c00 : kInfinity >> (32 - kBits);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kWords<T, kSide>; ++i) {
        uint32_t& both = word(row[r], i);
        // Sets a bit of the mantissa, which turns infinity into NaN.
#pragma unroll
        for (int shift = 0; shift < 32; shift += kBits)
          if ((both >> shift & kMask) == kInfinite) both |= uint32_t{1} << shift;
      }
    }
  }
};

/// The number of rows of a patch that are inside the matrix.
template <int kRows>
__device__ __forceinline__ int rows_inside(const Quantize& p, int64_t first_row, int64_t column) {
  const int64_t left = p.rows - first_row;
  if (column >= p.columns || left <= 0) return 0;
  return left < kRows ? static_cast<int>(left) : kRows;
}

/// Stores the rows of a patch and, unless the matrix has square blocks, their scales. `exponent`
/// belongs to row l * kRows / kLanes of the patch, where l is this lane's index in the patch.
template <bool aligned, class T, int kRows>
__device__ __forceinline__ void store_rows(const Quantize& p, const Patch<T, kRows>& patch,
                                           uint32_t exponent, int64_t first_row, int64_t column,
                                           int inside) {
  constexpr unsigned kLanesOfRow = kLanes / kRows;
  const uint32_t own = factor_word<T>(exponent);
  uint8_t* to = p.data + first_row * p.columns + column;
#pragma unroll
  for (int r = 0; r < kRows; ++r, to += p.columns) {
    const uint32_t factor = __shfl_sync(kAllLanes, own, r * static_cast<int>(kLanesOfRow), kLanes);
    const Vec<Factor<T>, 2> factors = twice<T>(factor);
    Vec<uint32_t, 2> bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      bytes.lane[i] =
          pack(scaled(patch.two(r, 2 * i), factors), scaled(patch.two(r, 2 * i + 1), factors));
    if (r >= inside) continue;
    if constexpr (aligned) {
      *reinterpret_cast<Vec<uint32_t, 2>*>(to) = bytes;
    } else {
#pragma unroll
      for (int c = 0; c < kSide; ++c)
        if (column + c < p.columns) to[c] = static_cast<uint8_t>(bytes.lane[c / 4] >> c % 4 * 8);
    }
  }
  // A lane whose columns are outside of the matrix also stores the scale of its row.
  const unsigned lane = threadIdx.x % kLanes;
  const int64_t row = first_row + lane / kLanesOfRow;
  if (p.square || lane % kLanesOfRow != 0 || row >= p.rows) return;
  p.scale[column / kScaledElements * p.rows + row] = scale_of(exponent);
}

}  // namespace torchkiln::fp8
