#pragma once

// Half-precision types on the host, for storage only. Conversions process runs of elements, so that
// they can be vectorised. All round to nearest even.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "torchkiln/core/dtype.h"

namespace torchkiln {
namespace cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace cpu

template <>
struct DtypeOf<cpu::Half> {
  static constexpr Dtype value = Dtype::float16;
};
template <>
struct DtypeOf<cpu::BFloat16> {
  static constexpr Dtype value = Dtype::bfloat16;
};

namespace cpu::TORCHKILN_ISA {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }

inline BFloat16 narrow_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t high = bits >> 16;
  const uint32_t rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? high | 0x40u : rounded)};
}

inline float widen(Half value) {
#ifdef __F16C__
  return _cvtsh_ss(value.bits);
#else
  // Shifts exponent and mantissa to their bits of a float, and corrects the exponent bias by a
  // multiplication. Subnormal halves are converted as integers, because the processor may flush
  // subnormal floats to zero. Infinity and NaN get the largest exponent.
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const float subnormal = static_cast<float>(static_cast<int32_t>(value.bits & 0x3ffu)) * 0x1p-24f;
  const float result = magnitude < 0x00800000u ? subnormal : float_of(magnitude) * 0x1p112f;
  const uint32_t special = (value.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return float_of(bits_of(result) | special | (value.bits & 0x8000u) << 16);
#endif
}

inline Half narrow_half(float value) {
#ifdef __F16C__
  return {static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
#else
  const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
  const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return {static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: after adding 1/2, the low bits are the mantissa of the subnormal result, rounded
    // by the addition.
    const uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  return {static_cast<uint16_t>(sign | rounded)};
#endif
}

/// Sets to[i] = from[i * stride].
template <class C, class T>
void widen_run(C* to, const T* from, int64_t stride, int64_t count) {
  if constexpr (sizeof(T) >= 4) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<C>(from[i * stride]);
  } else {
    int64_t i = 0;
#ifdef __F16C__
    if constexpr (std::is_same_v<T, Half> && std::is_same_v<C, float>) {
#ifdef __AVX512F__
      for (; stride == 1 && i + 16 <= count; i += 16) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(0xffff, halves));
      }
#endif
      for (; stride == 1 && i + 8 <= count; i += 8) {
        _mm256_storeu_ps(
            to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
      }
    }
#endif
    if (stride == 1) {
      for (; i < count; ++i) to[i] = static_cast<C>(widen(from[i]));
    } else {
      for (; i < count; ++i) to[i] = static_cast<C>(widen(from[i * stride]));
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512BW__)
/// narrow_bfloat16() of eight elements that are not NaN, each in 32 bits.
inline __m256i narrow_bfloat16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}
#endif

inline void narrow_run(BFloat16* to, const float* from, int64_t count) {
  int64_t i = 0;
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // Intrinsics, because the compiler's own code takes more than 1.5 times as long. With AVX-512 the
  // compiler's code is faster.
  for (; i + 16 <= count; i += 16) {
    const __m256 first = _mm256_loadu_ps(from + i), second = _mm256_loadu_ps(from + i + 8);
    if (_mm256_movemask_ps(_mm256_cmp_ps(first, second, _CMP_UNORD_Q)) != 0) {  // either is NaN
      for (int64_t k = i; k < i + 16; ++k) to[k] = narrow_bfloat16(from[k]);
      continue;
    }
    // Packing works within halves of 128 bits, so the middle quarters are exchanged afterwards.
    const __m256i packed = _mm256_packus_epi32(narrow_bfloat16(first), narrow_bfloat16(second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute4x64_epi64(packed, 0xd8));
  }
#endif
  for (; i < count; ++i) to[i] = narrow_bfloat16(from[i]);
}

inline void narrow_run(Half* to, const float* from, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#ifdef __AVX512F__
  for (; i + 16 <= count; i += 16) {
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(from + i), kNearest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), halves);
  }
#endif
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), kNearest);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
#endif
  for (; i < count; ++i) to[i] = narrow_half(from[i]);
}

template <class C>
void narrow_run(C* to, const C* from, int64_t count) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(C));
}

/// Sets to[i * stride] = from[i], rounded.
template <class T, class C>
void scatter_run(T* to, int64_t stride, const C* from, int64_t count) {
  constexpr int64_t kPiece = 64;
  T rounded[kPiece];
  for (int64_t done = 0; done < count; done += kPiece) {
    const int64_t piece = count - done < kPiece ? count - done : kPiece;
    narrow_run(rounded, from + done, piece);
    for (int64_t i = 0; i < piece; ++i) to[(done + i) * stride] = rounded[i];
  }
}

/// dispatch() over the types that the elementwise kernels are compiled for.
template <class Body>
Status dispatch_floating(Dtype dtype, const Body& body) {
  return dispatch<float, double, Half, BFloat16>(dtype, body);
}

/// A run of an input in the compute type: the input's own memory if it has that type, else a copy
/// in `buffer`.
template <class C>
const C* read_run(C* buffer, const void* from, int64_t offset, int64_t stride, int64_t count,
                  Dtype dtype) {
  if (dtype == DtypeOf<C>::value && stride == 1) return static_cast<const C*>(from) + offset;
  switch (dtype) {
    case Dtype::float32:
      widen_run(buffer, static_cast<const float*>(from) + offset, stride, count);
      break;
    case Dtype::float64:
      widen_run(buffer, static_cast<const double*>(from) + offset, stride, count);
      break;
    case Dtype::float16:
      widen_run(buffer, static_cast<const Half*>(from) + offset, stride, count);
      break;
    case Dtype::bfloat16:
      widen_run(buffer, static_cast<const BFloat16*>(from) + offset, stride, count);
      break;
  }
  return buffer;
}

/// Evenly spaced rows of an operand, which are read from column `first` of a row on.
struct SpacedRows {
  int64_t first;
  int64_t width;
  int64_t stride;      // elements from one column to the next
  int64_t row_stride;  // elements from one row to the next

  /// Whether `count` elements have the same distance from each other.
  bool is_run(int64_t count) const {
    return count <= width - first || row_stride == width * stride;
  }
};

/// Copies `count` elements of rows; `from` is the first one. `stride` is an argument of its own, so
/// that it can be a constant.
template <class T, class Stride>
void gather_rows(T* to, const T* from, const SpacedRows& rows, Stride stride, int64_t count) {
  const T* row = from - rows.first * stride;
  for (int64_t column = rows.first; count > 0; column = 0, row += rows.row_stride) {
    const int64_t end = std::min(rows.width, column + count);
    count -= end - column;
    for (; column < end; ++column) *to++ = row[column * stride];
  }
}

template <class T>
void gather_rows(T* to, const T* from, const SpacedRows& rows, int64_t count) {
  constexpr int64_t kCopied = 16;  // elements of a row, from which on a copy in vectors is faster
  if (rows.stride == 1 && rows.width >= kCopied) {
    gather_rows(to, from, rows, std::integral_constant<int64_t, 1>{}, count);
  } else {
    gather_rows(to, from, rows, rows.stride, count);
  }
}

/// read_run() of elements of several rows, at most kMost.
template <int64_t kMost, class C>
const C* read_rows(C* buffer, const void* from, int64_t offset, const SpacedRows& rows,
                   int64_t count, Dtype dtype) {
  if (rows.is_run(count)) return read_run(buffer, from, offset, rows.stride, count, dtype);
  // It has no dtype but these.
  static_cast<void>(dispatch_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const elements = static_cast<const T*>(from) + offset;
    if constexpr (std::is_same_v<T, C>) {
      gather_rows(buffer, elements, rows, count);
    } else {
      T gathered[kMost];
      gather_rows(gathered, elements, rows, count);
      widen_run(buffer, gathered, /*stride=*/1, count);
    }
    return Status{};
  }));
  return buffer;
}

/// Calls body(run) with elements that widen() converts to the compute type: the memory of the
/// operand if a loop over it can be vectorised, else a copy in `buffer`. It calls body in one place
/// per element type, because each call is inlined.
template <class T, class Body>
auto with_run(Compute<T>* buffer, const T* from, int64_t stride, int64_t count, const Body& body) {
  const Compute<T>* run = buffer;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (stride == 1) return body(from);
  } else if constexpr (std::is_same_v<T, Compute<T>>) {
    if (stride == 1) run = from;
  }
  if (run == buffer) widen_run(buffer, from, stride, count);
  return body(run);
}

/// with_run() for two operands: calls body(first, second).
template <class T, class Body>
auto with_runs(Compute<T>* first_buffer, const T* first, int64_t first_stride,
               Compute<T>* second_buffer, const T* second, int64_t second_stride, int64_t count,
               const Body& body) {
  using C = Compute<T>;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (first_stride == 1 && second_stride == 1) return body(first, second);
    widen_run(first_buffer, first, first_stride, count);
    widen_run(second_buffer, second, second_stride, count);
    return body(static_cast<const C*>(first_buffer), static_cast<const C*>(second_buffer));
  } else {
    return with_run(first_buffer, first, first_stride, count, [&](const C* a) {
      return with_run(second_buffer, second, second_stride, count,
                      [&](const C* b) { return body(a, b); });
    });
  }
}

/// Sets to[i * stride] to result(i), rounded. `buffer` holds results that are rounded together.
template <class T, class Result>
void store_run(T* to, int64_t stride, int64_t count, Compute<T>* buffer, const Result& result) {
  Compute<T>* results = buffer;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (stride == 1) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) to[i] = narrow_bfloat16(result(i));
      return;
    }
  } else if constexpr (std::is_same_v<T, Compute<T>>) {
    if (stride == 1) results = to;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) results[i] = result(i);
  if (stride != 1) {
    scatter_run(to, stride, buffer, count);
  } else if constexpr (!std::is_same_v<T, Compute<T>>) {
    narrow_run(to, buffer, count);
  }
}

}  // namespace cpu::TORCHKILN_ISA
}  // namespace torchkiln
