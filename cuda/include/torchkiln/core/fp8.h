#pragma once

// The scale of a block of E4M3 elements, for CPU and GPU kernels.

#include <cstdint>

#ifdef __CUDACC__
#define TORCHKILN_FP8_INLINE __host__ __device__ __forceinline__
#else
#define TORCHKILN_FP8_INLINE inline
#endif

namespace torchkiln {

/// The byte that represents NaN.
inline constexpr uint8_t kFp8Nan = 0x7f;

/// The biased float32 exponent of a scale: the smallest power of two for which magnitude / scale is
/// at most 448 = 1.75 * 2^8. `bits`: the bits of the magnitude, a finite float32. The exponent is
/// at least 1, so that scale and reciprocal are normal numbers; for a magnitude of 0 it is 127, a
/// scale of 1.
TORCHKILN_FP8_INLINE uint32_t fp8_scale_exponent(uint32_t bits) {
  constexpr uint32_t kAboveMost = 0x1fffff;  // carries into the exponent if the mantissa is > 1.75
  const uint32_t exponent = (bits + kAboveMost) >> 23;
  return bits == 0 ? 127u : exponent <= 8 ? 1u : exponent - 8;
}

/// The bits of the scale with this exponent, and of its reciprocal.
TORCHKILN_FP8_INLINE uint32_t fp8_scale_bits(uint32_t exponent) { return exponent << 23; }
TORCHKILN_FP8_INLINE uint32_t fp8_reciprocal_bits(uint32_t exponent) {
  return (254u - exponent) << 23;
}

}  // namespace torchkiln
