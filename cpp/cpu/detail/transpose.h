#pragma once

// Copies of transposed matrices, in blocks that are exchanged in registers.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "torchkiln/kernels/pointwise.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Copies to[row * to_stride + column] = from[column * from_stride + row].
template <class U>
void transpose_elements(U* to, int64_t to_stride, const U* from, int64_t from_stride, int64_t rows,
                        int64_t columns) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column)
      to[row * to_stride + column] = from[column * from_stride + row];
}

/// transpose_elements() for a few rows that follow one another column by column. The number of rows
/// is a constant, so that the compiler vectorises the loop.
template <int64_t rows, class U>
void split_rows(U* to, int64_t to_stride, const U* from, int64_t columns) {
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t row = 0; row < rows; ++row)
      to[row * to_stride + column] = from[column * rows + row];
}

/// transpose_elements() for a few columns that follow one another row by row.
template <int64_t columns, class U>
void join_columns(U* to, const U* from, int64_t from_stride, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column)
      to[row * columns + column] = from[column * from_stride + row];
}

/// Rows and columns of a square of registers of 16 bytes.
template <class U>
inline constexpr int64_t kSquare = 16 / sizeof(U);

#ifdef __SSE2__

template <class U>
__m128i low_halves(__m128i a, __m128i b) {
  if constexpr (sizeof(U) == 2) return _mm_unpacklo_epi16(a, b);
  if constexpr (sizeof(U) == 4) return _mm_unpacklo_epi32(a, b);
  return _mm_unpacklo_epi64(a, b);
}

template <class U>
__m128i high_halves(__m128i a, __m128i b) {
  if constexpr (sizeof(U) == 2) return _mm_unpackhi_epi16(a, b);
  if constexpr (sizeof(U) == 4) return _mm_unpackhi_epi32(a, b);
  return _mm_unpackhi_epi64(a, b);
}

/// Interleaves each register with the one half of the square after it, which moves one bit of the
/// index of a register to the index of a lane. Rounds over all bits exchange rows and columns.
template <class U>
void interleave(const __m128i (&from)[kSquare<U>], __m128i (&to)[kSquare<U>]) {
  constexpr int64_t kHalf = kSquare<U> / 2;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kHalf; ++i) {
    to[2 * i] = low_halves<U>(from[i], from[i + kHalf]);
    to[2 * i + 1] = high_halves<U>(from[i], from[i + kHalf]);
  }
}

/// transpose_elements() of a square.
template <class U>
void transpose_square(U* to, int64_t to_stride, const U* from, int64_t from_stride) {
  __m128i a[kSquare<U>], b[kSquare<U>];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSquare<U>; ++i)
    a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
  interleave<U>(a, b);
  if constexpr (kSquare<U> > 2) interleave<U>(b, a);
  if constexpr (kSquare<U> > 4) interleave<U>(a, b);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSquare<U>; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), kSquare<U> == 4 ? a[i] : b[i]);
}

#else

template <class U>
void transpose_square(U* to, int64_t to_stride, const U* from, int64_t from_stride) {
  transpose_elements(to, to_stride, from, from_stride, kSquare<U>, kSquare<U>);
}

#endif

/// transpose_elements() in squares. The last squares of a side overlap those before them.
template <class U>
void transpose_tile(U* to, int64_t to_stride, const U* from, int64_t from_stride, int64_t rows,
                    int64_t columns) {
  if (rows < kSquare<U> && rows == from_stride) {
    if (rows == 2) return split_rows<2>(to, to_stride, from, columns);
    if (rows == 3) return split_rows<3>(to, to_stride, from, columns);
    if (rows == 4) return split_rows<4>(to, to_stride, from, columns);
  }
  if (columns < kSquare<U> && columns == to_stride) {
    if (columns == 1) return join_columns<1>(to, from, from_stride, rows);
    if (columns == 2) return join_columns<2>(to, from, from_stride, rows);
    if (columns == 3) return join_columns<3>(to, from, from_stride, rows);
    if (columns == 4) return join_columns<4>(to, from, from_stride, rows);
  }
  if (rows < kSquare<U> || columns < kSquare<U>)
    return transpose_elements(to, to_stride, from, from_stride, rows, columns);
  for (int64_t each = 0; each < rows; each += kSquare<U>) {
    const int64_t row = std::min(each, rows - kSquare<U>);
    for (int64_t at = 0; at < columns; at += kSquare<U>) {
      const int64_t column = std::min(at, columns - kSquare<U>);
      transpose_square(to + row * to_stride + column, to_stride, from + column * from_stride + row,
                       from_stride);
    }
  }
}

/// Copies the tiles begin <= tile < end.
template <class U>
void transpose_tiles(const Transpose& p, int64_t begin, int64_t end) {
  const int64_t across = (p.columns + Transpose::kSide - 1) / Transpose::kSide;
  const int64_t down = (p.rows + Transpose::kSide - 1) / Transpose::kSide;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t column = tile % across * Transpose::kSide;
    const int64_t row = tile / across % down * Transpose::kSide;
    const int64_t matrix = tile / across / down;
    const U* const from = static_cast<const U*>(p.from) + matrix * p.matrix_stride;
    U* const to = static_cast<U*>(p.to) + matrix * p.rows * p.columns;
    transpose_tile(to + row * p.columns + column, p.columns, from + column * p.column_stride + row,
                   p.column_stride, std::min(Transpose::kSide, p.rows - row),
                   std::min(Transpose::kSide, p.columns - column));
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
