#pragma once

// Rounding to E4M3, and rows in E4M3 with a scale for each 128 elements.

#include <algorithm>

#include "torchkiln/core/fp8.h"
#include "torchkiln/cpu/half.h"
#include "torchkiln/kernels/quantize.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;

/// Rounds to the nearest E4M3 number, ties to even. The magnitude must be at most 448, or not
/// finite.
inline uint8_t narrow_fp8(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kMagnitude;
  constexpr uint32_t kSmallestNormal = 121u << 23;  // 2^-6
  // The last bit of a float of this size is 2^-9, the last bit of E4M3 below kSmallestNormal.
  constexpr float kLastBit = 0x1p14f;
  const uint32_t small = bits_of(float_of(magnitude) + kLastBit) - bits_of(kLastBit);
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t rounded = (magnitude < kSmallestNormal ? small : normal) | (bits >> 24 & 0x80u);
  return static_cast<uint8_t>(magnitude < kInfinity ? rounded : kFp8Nan);
}

/// The magnitude of a finite value, as bits; 0 for other values. Such bits have the order of the
/// values.
inline uint32_t finite_magnitude(float value) {
  const uint32_t magnitude = bits_of(value) & kMagnitude;
  return magnitude < kInfinity ? magnitude : 0u;
}

/// Writes a row in E4M3, and its scales. Adjacent scales of the row are `scale_stride` elements
/// apart.
template <class T>
void quantize_row(const T* row, int64_t columns, uint8_t* data, float* scale,
                  int64_t scale_stride) {
  float value[kScaledElements];
  for (int64_t begin = 0; begin < columns; begin += kScaledElements) {
    const int64_t count = std::min<int64_t>(kScaledElements, columns - begin);
    widen_run(value, row + begin, /*stride=*/1, count);
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, finite_magnitude(value[i]));
    const uint32_t exponent = fp8_scale_exponent(most);
    const float reciprocal = float_of(fp8_reciprocal_bits(exponent));
    for (int64_t i = 0; i < count; ++i) data[begin + i] = narrow_fp8(value[i] * reciprocal);
    scale[begin / kScaledElements * scale_stride] = float_of(fp8_scale_bits(exponent));
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
