#pragma once

// One bit per element: whether the output of relu is positive. Outputs of relu are positive, NaN or
// 0; the bit is set unless the output is 0.

#include <array>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "torchkiln/cpu/half.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

#ifdef __SSE2__
/// One bit for each of eight adjacent elements: whether it is not zero.
inline uint8_t not_zero(const float* from) {
  const __m128 zero = _mm_setzero_ps();
  const int low = _mm_movemask_ps(_mm_cmpneq_ps(_mm_loadu_ps(from), zero));
  const int high = _mm_movemask_ps(_mm_cmpneq_ps(_mm_loadu_ps(from + 4), zero));
  return static_cast<uint8_t>(low | high << 4);
}

template <class T>
uint8_t not_zero(const T* from) {
  if constexpr (sizeof(T) == 2) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i zeros = _mm_cmpeq_epi16(bits, _mm_setzero_si128());
    return static_cast<uint8_t>(~_mm_movemask_epi8(_mm_packs_epi16(zeros, _mm_setzero_si128())) &
                                0xff);
  } else {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<unsigned>(from[i] != T(0)) << i;
    return static_cast<uint8_t>(bits);
  }
}
#else
template <class T>
uint8_t not_zero(const T* from) {
  unsigned bits = 0;
  for (int i = 0; i < 8; ++i) {
    if constexpr (sizeof(T) == 2) {
      bits |= static_cast<unsigned>(from[i].bits != 0) << i;
    } else {
      bits |= static_cast<unsigned>(from[i] != T(0)) << i;
    }
  }
  return static_cast<uint8_t>(bits);
}
#endif

/// Packs the bits of the elements begin <= i < end; begin is a multiple of 8.
template <class T>
void pack_signs(uint8_t* signs, const T* from, int64_t begin, int64_t end) {
  int64_t at = begin;
  for (; at + 8 <= end; at += 8) signs[at / 8] = not_zero(from + at);
  if (at == end) return;
  T last[8] = {};
  std::memcpy(last, from + at, static_cast<size_t>(end - at) * sizeof(T));
  signs[at / 8] = not_zero(last);
}

/// For each byte value, its eight bits as numbers 1 or 0.
template <class C>
inline constexpr auto kUnpacked = [] {
  std::array<std::array<C, 8>, 256> table{};
  for (unsigned byte = 0; byte < 256; ++byte)
    for (unsigned i = 0; i < 8; ++i) table[byte][i] = static_cast<C>(byte >> i & 1u);
  return table;
}();

/// Unpacks the bits of `count` elements from index `at` on: sets to[i] to 1 or 0.
template <class C>
void unpack_signs(C* to, const uint8_t* signs, int64_t at, int64_t count) {
  const auto one = [&](int64_t i) {
    return static_cast<C>(signs[(at + i) / 8] >> ((at + i) % 8) & 1);
  };
  int64_t i = 0;
  for (; i < count && (at + i) % 8 != 0; ++i) to[i] = one(i);
  for (; i + 8 <= count; i += 8)
    std::memcpy(to + i, kUnpacked<C>[signs[(at + i) / 8]].data(), 8 * sizeof(C));
  for (; i < count; ++i) to[i] = one(i);
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
